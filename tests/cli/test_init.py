"""whet init: starter projects that train as they are."""

import pytest
import yaml

import whet
from whet.cli.init import Kind
from whet.config.load_config import load_config
from whet.runs.starter import STARTERS, write_starter

SMALL = {"preset": "nano", "layers": 1, "d_model": 16, "heads": 2, "width": 16}


def test_every_kind_has_a_starter():
    assert {kind.value for kind in Kind} == set(STARTERS)


@pytest.mark.parametrize("kind", STARTERS)
def test_starter_trains_as_it_is(kind, tmp_path, tiny_directory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = write_starter(kind, tmp_path)
    assert [path.name.split(".")[0] for path in files] == [kind, f"{kind}-train", f"{kind}-valid"]
    load_config(files[0])  # every key is known
    text = files[0].read_text().replace("smollm2-135m-instruct", str(tiny_directory))
    config = yaml.safe_load(text)
    config["run"] |= {"steps": 1, "device": "cpu", "precision": "fp32"}
    if "max_length" in config["data"]:  # the tiny model has one token per byte, and 512 positions
        config["data"]["max_length"] = 257
    if kind == "pretrain":
        config["model"] |= SMALL
    result = whet.train(config, verbose=0)
    assert result.steps == 1
    assert (result.directory / "final").is_dir()


def test_command_writes_the_files_once(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = cli("init", "dpo", "--dir", "new")
    assert code == 0
    assert "whet train new/dpo.yaml" in out
    before = (tmp_path / "new" / "dpo.yaml").read_text()
    code, _, err = cli("init", "dpo", "--dir", "new")
    assert code == 2
    assert "dpo.yaml, dpo-train.jsonl, dpo-valid.jsonl exist in new; nothing was written" in err
    assert (tmp_path / "new" / "dpo.yaml").read_text() == before
    code, _, err = cli("init", "kto")
    assert code == 2
    assert "kto" in err


def test_convert_command(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "axolotl.yml").write_text(
        "base_model: org/model\nadapter: lora\nlora_r: 4\ndatasets: [{path: a.jsonl, type: alpaca}]\n"
        "learning_rate: 1e-4\nmicro_batch_size: 2\nnum_epochs: 1\nloss_watchdog_threshold: 5.0\n"
    )
    code, out, err = cli("convert", "axolotl.yml", "--out", "whet.yaml")
    assert (code, out) == (0, "wrote whet.yaml\n")
    assert "not translated: loss_watchdog_threshold" in err
    config = load_config(tmp_path / "whet.yaml")
    assert (config.method.rank, config.data.train, config.run.batch_size) == (4, "a.jsonl", 2)
    assert cli("convert", "axolotl.yml", "--out", "whet.yaml")[0] == 2  # never overwritten
    code, out, _ = cli("convert", "axolotl.yml")
    assert "rank: 4" in out
    code, _, err = cli("convert", "missing.yml")
    assert code == 2
    assert "missing.yml" in err
