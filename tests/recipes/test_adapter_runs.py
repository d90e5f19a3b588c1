"""Runs with each kind of adapter: they learn, resume exactly, and PEFT loads their result."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import whet
from tiny import run_config
from tiny_adapters import shake, tokens
from whet.config.load_config import validate_config
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.errors import ConfigError
from whet.hardware import choose_precision
from whet.training.callbacks import Callback, StopRun
from whet.training.compile import compile_blocks

METHODS = {
    "rslora": {"variant": "rslora"},
    "dora": {"variant": "dora", "dropout": 0.1},
    "pissa": {"variant": "pissa"},
    "plus": {"lr_ratio": 4, "targets": "attention", "rank_pattern": {"q_proj": 2}},
    "saved": {"targets": "mlp", "modules_to_save": ["embed_tokens"]},
}


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("enough", unfinished=True) if step == self.step else None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_run_learns_resumes_exactly_and_peft_loads_its_adapter(tiny_directory, tmp_path, name, precision):
    sections = {
        "method": METHODS[name] | {"rank": 4},
        "run": {"steps": 6, "precision": precision},
        "eval": {"every": 3},
    }
    uninterrupted = whet.train(run_config(tiny_directory, tmp_path / "whole", **sections))
    losses = [row["eval_loss"] for row in uninterrupted.history if "eval_loss" in row]
    assert losses[-1] < losses[0]
    first = whet.train(run_config(tiny_directory, tmp_path / "parts", **sections), [StopAt(3)])
    resumed = whet.resume(first.directory)
    finals = [
        load_file(run.directory / "final" / "adapter_model.safetensors") for run in (uninterrupted, resumed)
    ]
    assert finals[0].keys() == finals[1].keys()
    assert all(torch.equal(finals[0][key], finals[1][key]) for key in finals[0])
    model, _ = whet.load(uninterrupted.directory, dtype=torch.float32, device="cpu")
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    with torch.no_grad():
        peft_logits = PeftModel.from_pretrained(base, uninterrupted.directory / "final")(
            input_ids=tokens()
        ).logits
        torch.testing.assert_close(model(tokens()), peft_logits, rtol=1e-4, atol=1e-5)


def test_lora_plus_without_lora_b_is_rejected_with_its_key(tiny_directory, tmp_path):
    sections = {"method": {"lr_ratio": 4}, "optim": {"groups": {"lora_": {"lr_scale": 2}}}}
    with pytest.raises(ConfigError, match="^method.lr_ratio: no adapter has a trainable matrix B"):
        whet.train(run_config(tiny_directory, tmp_path, **sections))


def test_lora_plus_gives_lora_b_a_separate_learning_rate(tiny, tiny_directory, tmp_path):
    method = {"lr_ratio": 16, "rank": 4}
    groups = {"layers.0": {"lr_scale": 0.5}}
    config = validate_config(run_config(tiny_directory, tmp_path, method=method, optim={"groups": groups}))
    model = whet.attach_lora(tiny[0], rank=4)
    optimizer = whet.create_optimizer(config.optim_groups, model)
    scales = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = 0.5 if "layers.0" in name else 16 if name.endswith("lora_B") else 1
            assert scales[id(parameter)] == expected
    assert config.optim.groups.keys() == groups.keys(), "the stored config stays what it was"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lora", "dora", "pissa"])
def test_compiled_layers_with_adapters_match_eager_ones(tiny, variant):
    model = shake(whet.attach_lora(tiny[0], rank=4, variant=variant))
    with torch.no_grad():
        plain = model(tokens())
    batch = make_batch([[Example(list(range(9)), [True] * 9, "")]])
    assert compile_blocks(model, batch, choose_precision("fp32", model.device)).startswith("on")
    torch.testing.assert_close(model(tokens()), plain, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # few rows, as in a small evaluation
        torch.testing.assert_close(model(tokens()[:1, :8]), plain[:1, :8], rtol=1e-4, atol=1e-5)
