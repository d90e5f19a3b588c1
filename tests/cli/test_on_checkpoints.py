"""A checkpoint as the model of the next run, of an export and of a merge."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import whet
from tiny import run_config
from whet.config.load_config import validate_config
from whet.planning.plan import plan_run
from whet.studies.advise import advise

TOKENS = torch.arange(24).reshape(2, 12)
BEFORE = {"checkpoint": {"every": 2}, "optim": {"lr": 3e-2}}


def logits_of(model):
    with torch.no_grad():
        output = model(TOKENS)
    return getattr(output, "logits", output)


def loaded_logits(path):
    return logits_of(whet.load(path, dtype=torch.float32, device="cpu")[0])


def base_named_in(directory):
    return json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.fixture(scope="module")
def on_top(tiny_directory, tmp_path_factory):
    """A run on top of an adapter."""
    path = tmp_path_factory.mktemp("on_top")
    first = whet.train(run_config(tiny_directory, path / "first", optim={"lr": 3e-2})).directory
    return whet.train(run_config(first, path / "second", **BEFORE)).directory


@pytest.mark.parametrize("before", ["lora", "qlora", "full", "scratch"])
@pytest.mark.parametrize("after", ["lora", "full"])
def test_run_starts_from_a_checkpoint(tiny_directory, tmp_path, before, after):
    methods = {"scratch": {"kind": "full"}, "full": {"kind": "full"}}
    config = run_config(tiny_directory, tmp_path / "before", **BEFORE)
    config["method"] = methods.get(before, {"kind": before, "rank": 4})
    if before == "scratch":
        preset = {"preset": "nano", "d_model": 64, "layers": 2, "heads": 2, "max_positions": 512}
        config["model"] = preset | {"tokenizer": str(tiny_directory)}
    run = whet.train(config).directory
    checkpoint = run / "checkpoints" / "step-000002"
    expected = loaded_logits(checkpoint)
    # a step of this rate changes nothing
    config = run_config(checkpoint, tmp_path / "after", optim={"lr": 1e-12}, run={"steps": 1})
    config["method"] = methods.get(after, {"kind": after, "rank": 4})
    assert advise(validate_config(config)) is not None
    assert plan_run(validate_config(config)).memory
    final = whet.train(config).directory / "final"
    torch.testing.assert_close(loaded_logits(final.parent), expected, rtol=1e-4, atol=1e-4)
    # checkpoints can be deleted, so the base of an adapter is stored with it
    if after == "lora":
        assert base_named_in(final) == str(final.parent / "base")
        base = AutoModelForCausalLM.from_pretrained(final.parent / "base", dtype=torch.float32)
        again = PeftModel.from_pretrained(base, final)
    else:
        again = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    torch.testing.assert_close(logits_of(again), expected, rtol=1e-4, atol=1e-4)


def test_checkpoint_adapter_is_exported_with_its_base(cli, on_top, tmp_path):
    checkpoint = on_top / "checkpoints" / "step-000002"
    code, out, err = cli("export", checkpoint, "--to", "peft", "--out", tmp_path / "peft", "--check")
    assert code == 0, out + err
    assert "checked: PEFT: largest logit difference" in out
    assert base_named_in(tmp_path / "peft") == str(on_top / "base")
    torch.testing.assert_close(
        loaded_logits(tmp_path / "peft"), loaded_logits(checkpoint), rtol=1e-4, atol=1e-4
    )
    code, out, err = cli("export", checkpoint, "--to", "hf", "--out", tmp_path / "hf")
    assert code == 0, out + err
    assert f"merged into {on_top / 'base'}" in out


def test_base_of_unfinished_run_is_the_stacked_adapter(cli, on_top, tmp_path):
    """The base is written with the end of a run."""
    expected = loaded_logits(on_top / "checkpoints" / "step-000002")
    (on_top / "base").rename(tmp_path / "base")
    try:
        out = tmp_path / "peft"
        code, printed, err = cli(
            "export", on_top / "checkpoints" / "step-000002", "--to", "peft", "--out", out
        )
    finally:
        (tmp_path / "base").rename(on_top / "base")
    assert code == 0, printed + err
    assert base_named_in(out) == str(on_top.parents[2] / "first" / "runs" / "test")
    torch.testing.assert_close(loaded_logits(out), expected, rtol=1e-4, atol=1e-4)


def test_run_with_own_base_does_not_need_the_original(on_top, tmp_path):
    shutil.copytree(on_top, tmp_path / "runs" / "copy")
    checkpoint = tmp_path / "runs" / "copy" / "checkpoints" / "step-000002"
    config = checkpoint.parents[1] / "config.yaml"
    first = on_top.parents[2] / "first" / "runs" / "test"
    text = config.read_text()
    assert str(first) in text
    config.write_text(text.replace(str(first), str(tmp_path / "gone")))
    expected = loaded_logits(on_top / "checkpoints" / "step-000002")
    torch.testing.assert_close(loaded_logits(checkpoint), expected, rtol=1e-4, atol=1e-4)
    after = run_config(checkpoint, tmp_path / "after", run={"steps": 1})
    assert advise(validate_config(after)) is not None
    assert plan_run(validate_config(after)).memory


def test_merge_adapter_checkpoints(cli, tiny_directory, tmp_path):
    run = whet.train(run_config(tiny_directory, tmp_path, **BEFORE)).directory
    checkpoints = [run / "checkpoints" / f"step-00000{step}" for step in (2, 4)]
    code, out, err = cli("merge", *checkpoints, "--method", "average", "--out", tmp_path / "both")
    assert code == 0, out + err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "both", dtype=torch.float32)
    halves = [whet.merge(whet.load(path, dtype=torch.float32, device="cpu")[0]) for path in checkpoints]
    name = "layers.1.self_attn.q_proj.weight"
    first, second = (half.get_parameter(name) for half in halves)
    assert not torch.equal(first, second)
    torch.testing.assert_close(merged.get_parameter(f"model.{name}"), (first + second) / 2)


def test_merge_rejects_full_model_checkpoint(cli, tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, **BEFORE) | {"method": {"kind": "full"}}
    checkpoint = whet.train(config).directory / "checkpoints" / "step-000002"
    code, _, err = cli("merge", checkpoint, tiny_directory, "--method", "average", "--out", tmp_path / "both")
    assert code == 2
    assert f"{checkpoint} is a checkpoint of a full model" in err
    assert f"whet export {checkpoint} --to hf" in err
