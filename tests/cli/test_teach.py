"""`whet teach`: the teacher runs once, and training does not load it."""

import shlex
import shutil

import yaml

from tiny import run_config, write_tiny_model


def test_teach_prints_the_train_command(cli, tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_TOKENS", str(tmp_path / "tokens"))
    write_tiny_model(tmp_path / "teacher", hidden_size=48)
    objective = {"kind": "distill", "teacher": str(tmp_path / "teacher"), "offline": {"top_k": 4}}
    path = tmp_path / "distill.yaml"
    path.write_text(yaml.safe_dump(run_config(tiny_directory, tmp_path, objective=objective)))
    code, _, err = cli("train", path)
    assert code == 2
    assert "compute them with: whet teach CONFIG" in err
    overrides = ["data.valid=null", "optim.betas=[0.9, 0.99]"]
    code, out, err = cli("teach", path, *overrides)
    assert code == 0
    command = out.splitlines()[-1].removeprefix("train with: ")
    assert shlex.split(command) == ["whet", "train", str(path), *overrides]
    assert "computing the top 4 tokens of" in err
    shutil.rmtree(tmp_path / "teacher")
    assert cli("train", path, *overrides)[0] == 0
