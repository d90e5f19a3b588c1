"""MTP runs: heads train with every method, are in checkpoints, resume exactly, and are not in final/."""

import json

import pytest
import torch
from safetensors.torch import load_file

import whet
from tiny import run_config
from whet.training.callbacks import Callback, StopRun

MTP = {"kind": "mtp", "n_predict": 2}
METHODS = {
    "full": {"method": {"kind": "full"}, "optim": {"lr": 1e-3}},
    "lora": {"method": {"kind": "lora", "rank": 4, "dropout": 0.1}},
    "qlora": {"method": {"kind": "qlora", "rank": 4}},
}


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("stopped by the test", unfinished=True) if step == self.step else None


@pytest.mark.parametrize("method", METHODS)
def test_heads_train_with_every_method_and_are_only_in_checkpoints(tiny_directory, tmp_path, method):
    config = run_config(
        tiny_directory, tmp_path, **METHODS[method], objective=MTP, data={"test": "synth:house-test:4"}
    )
    result = whet.train(config)
    trained = [row for row in rows(result.directory) if "lr" in row]
    for row in trained:
        assert row["loss"] == pytest.approx(row["main_loss"] + 0.3 * row["mtp_loss"], rel=1e-5)
        assert row["total_loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert trained[-1]["mtp_loss"] < trained[0]["mtp_loss"]
    assert {"eval_main_loss", "eval_mtp_loss", "eval_perplexity"} <= result.metrics.keys()
    assert "heads: 2, with" in (result.directory / "log.txt").read_text()

    checkpoint = result.directory / "checkpoints" / "step-000004"
    stored = load_file(checkpoint / "weights.safetensors")
    heads = {name for name in stored if name.startswith("heads.")}
    assert {f"heads.layers.{n}.project.weight" for n in (0, 1)} <= heads
    assert {f"{name}::exp_avg" for name in heads} <= load_file(checkpoint / "optimizer.safetensors").keys()
    [weights] = (result.directory / "final").glob("*.safetensors")
    assert not any("heads" in name or "project" in name for name in load_file(weights))
    final, _ = whet.load(result.directory, dtype=torch.float32, device="cpu")
    tokens = torch.randint(260, (2, 9))
    if method != "qlora":  # a checkpoint of one is opened on the weights before they were quantized
        opened, _ = whet.load(checkpoint, dtype=torch.float32, device="cpu")
        torch.testing.assert_close(opened(tokens), final(tokens))


@pytest.mark.parametrize(("method", "pack"), [("full", True), ("lora", False)])
def test_resumed_run_is_bit_identical_to_uninterrupted_run(tiny_directory, tmp_path, method, pack):
    sections = {
        **METHODS[method],
        "objective": {**MTP, "block": {"heads": 2, "width": 40}},
        "data": {"pack": pack, "train": "synth:house:10"},
        "run": {"steps": 5, "micro_batch_tokens": 300},
    }
    uninterrupted = whet.train(run_config(tiny_directory, tmp_path / "whole", **sections))
    first = whet.train(run_config(tiny_directory, tmp_path / "parts", **sections), [StopAt(3)])
    second = whet.resume(first.directory)
    assert second.steps == 5
    name = "checkpoints/step-000005/weights.safetensors"
    expected, actual = load_file(uninterrupted.directory / name), load_file(second.directory / name)
    assert any(key.startswith("heads.") for key in expected)
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
    assert expected.keys() == actual.keys()
    for a, b in zip(rows(uninterrupted.directory), rows(second.directory), strict=True):
        for key in ("step", "loss", "main_loss", "mtp_loss", "grad_norm", "eval_loss"):
            assert a.get(key) == b.get(key)


@pytest.mark.slow  # half a minute of compiling
def test_compiled_layers_train_like_eager_ones(tiny_directory, tmp_path):
    """Only the layers of the model are compiled, not the heads."""
    actual = []
    for compiled in (False, True):
        keys = {**METHODS["full"], "objective": MTP, "run": {"compile": compiled, "steps": 2}}
        result = whet.train(run_config(tiny_directory, tmp_path / str(compiled), **keys))
        actual.append([row["total_loss"] for row in rows(result.directory) if "lr" in row])
    assert actual[0] == pytest.approx(actual[1], rel=1e-4)


def test_bf16_and_gradient_checkpointing_run(tiny_directory, tmp_path):
    for name, method, run in (
        ("bf16", "lora", {"precision": "bf16"}),
        ("pure", "full", {"precision": "bf16-pure", "grad_checkpoint": True}),
    ):
        keys = {**METHODS[method], "objective": MTP, "run": {"steps": 2, **run}}
        result = whet.train(run_config(tiny_directory, tmp_path / name, **keys))
        assert 3 < result.metrics["mtp_loss"] < 8
        dtype = torch.float32 if name == "bf16" else torch.bfloat16
        stored = load_file(result.directory / "checkpoints" / "step-000002" / "weights.safetensors")
        assert {tensor.dtype for key, tensor in stored.items() if key.startswith("heads.")} == {dtype}
