"""Runs of mixture-of-experts models: metrics rows, balancing bias, collapse, resume, parameter groups."""

import json
import logging

import numpy as np
import pytest
import torch

import whet
from whet.config.load_config import validate_config
from whet.config.optim import Optim
from whet.errors import ConfigError
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.models.moe import MixtureOfExperts, moe_layers
from whet.models.spec import ExpertsSpec
from whet.objectives.router_losses import STATISTICS
from whet.training.callbacks import Callback, StopRun
from whet.training.optim.param_groups import parameter_groups
from whet.training.router_balancing import RouterMetrics, effective_experts

SMALL = {"preset": "nano-moe", "d_model": 32, "heads": 2, "width": 16, "layers": 2, "experts": 4}


def config(tmp_path, *, model=None, **sections):
    actual = {
        "model": {**SMALL, **(model or {})},
        "method": {"kind": "full"},
        "data": {
            "train": "synth:python-topics",
            "valid": "synth:python-topics-valid",
            "max_length": 65,
            "too_long": "split",
        },
        "optim": {"lr": 1e-2},
        "eval": {"batches": 1},
        "run": {"name": "moe", "dir": str(tmp_path), "steps": 3, "batch_tokens": 512, "device": "cpu", "precision": "fp32"},
    }  # fmt: skip
    for name, keys in sections.items():
        actual[name] = {**actual.get(name, {}), **keys}
    return actual


def rows(result):
    lines = (result.directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def test_every_row_has_router_metrics(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "whet"):
        result = whet.train(
            config(tmp_path, experts={"load_balancing": 0.01, "z_loss": 1e-3}, run={"grad_checkpoint": True})
        )
    actual = rows(result)
    assert [row["step"] for row in actual] == [1, 2, 3]
    for row in actual:
        assert STATISTICS not in row
        assert len(row["per_expert_share"]) == 4
        assert sum(row["per_expert_share"]) == pytest.approx(1, abs=1e-4)
        assert np.array(row["router_share"]).shape == (2, 4)
        assert 0 < row["router_entropy_mean"] <= np.log(4) + 1e-6
        assert row["router_layers"] == [0, 1]
        assert row["load_balancing_loss"] >= 1.9
    said = caplog.text
    assert "experts: 4 in each of 2 layers, 2 per token; computed by one grouped matmul" in said
    assert "load_balancing_loss is averaged over micro-batches" in said
    assert not any("router" in key for row in actual for key in row if key.startswith("eval"))


class StopAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("enough for now", unfinished=True) if step == self.step else None


def test_resumed_run_with_bias_equals_an_uninterrupted_one(tmp_path):
    settings = {
        "model": {"balance_bias": True, "router": "sigmoid", "shared_experts": 1},
        "experts": {"bias_rate": 0.05},
    }
    whole = whet.train(config(tmp_path / "a", **settings, run={"steps": 5}))
    part = whet.train(config(tmp_path / "b", **settings, run={"steps": 5}), callbacks=[StopAfter(3)])
    whet.resume(part.directory)
    first, second = (
        whet.load(d, dtype=torch.float32, device="cpu")[0] for d in (whole.directory, part.directory)
    )
    states = first.state_dict(), second.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    biases = [layer.expert_bias for layer in moe_layers(first)]
    assert all(bias.abs().max() > 0.04 for bias in biases)
    # steps of 0.05 up and down, and nothing else: no gradient, no decay
    assert all(torch.allclose(bias / 0.05, (bias / 0.05).round(), atol=1e-4) for bias in biases)
    checkpoint = whet.load(
        whole.directory / "checkpoints" / "step-000005", dtype=torch.float32, device="cpu"
    )[0]
    assert torch.equal(moe_layers(checkpoint)[1].expert_bias, biases[1])


def test_bias_balances_a_skewed_router(tmp_path):
    """Uses a model whose router prefers two of four experts for every token."""
    spec = preset_spec(
        "nano-moe", **{k: v for k, v in SMALL.items() if k != "preset"}, balance_bias=True, vocab_size=50
    )
    model = new_decoder(spec, seed=0)
    torch.manual_seed(0)
    metrics = RouterMetrics(moe_layers(model), [0, 1], bias_rate=0.02)
    tilt = torch.tensor([0.6, 0.5, 0.0, 0.0])
    scores = torch.rand(400, 4) * 0.5 + tilt
    violations = []
    for step in range(60):
        biased = scores[None] + torch.stack([layer.expert_bias for layer in moe_layers(model)])[:, None]
        chosen = biased.topk(2).indices
        counts = torch.stack([each.flatten().bincount(minlength=4) for each in chosen]).float()
        row = {STATISTICS: torch.cat((counts, counts, torch.ones(2, 5)), 1).tolist(), "tokens": 400}
        metrics.on_step_end(step + 1, row)
        violations.append(max(row["router_max_violation"]))
    assert violations[0] > 0.9
    assert max(violations[-5:]) < 0.2


def test_even_load_does_not_change_the_bias_in_any_summation_order():
    spec = ExpertsSpec(experts=4, top_k=2, width=16, balance_bias=True)
    rng = np.random.default_rng(0)
    for _ in range(100):
        layer = MixtureOfExperts(spec, d_model=16)
        parts = [rng.integers(1, 60, 4) for _ in range(3)]
        parts.append(sum(parts).max() + 5 - sum(parts))  # together every expert has the same load
        units = float(sum(part.sum() for part in parts) // 2 - 7)
        sums = sum(torch.tensor([*part, *part, 1, 1, 1, 1, part.sum()]).float() / units for part in parts)
        metrics = RouterMetrics([layer], [0], bias_rate=0.01)
        metrics.on_step_end(1, {STATISTICS: [sums.tolist()], "tokens": 100})
        assert not layer.expert_bias.any()
        sums[0] += 1 / units  # one choice more is no longer even
        metrics.on_step_end(2, {STATISTICS: [sums.tolist()], "tokens": 100})
        assert layer.expert_bias.tolist() == pytest.approx([-0.01, 0.01, 0.01, 0.01])


def test_skipped_step_does_not_change_the_bias(tmp_path):
    model = new_decoder(preset_spec("nano-moe", layers=1, balance_bias=True), seed=0)
    counts = torch.zeros(1, 8)
    counts[0, 0] = 5.0
    raw = torch.cat((counts, counts, torch.ones(1, 5)), 1).tolist()
    metrics = RouterMetrics(moe_layers(model), [0], bias_rate=0.1)
    metrics.on_step_end(1, {STATISTICS: raw, "tokens": 5, "skipped": True})
    assert moe_layers(model)[0].expert_bias.abs().max() == 0
    metrics.on_step_end(2, {STATISTICS: raw, "tokens": 5})
    assert moe_layers(model)[0].expert_bias.tolist() == pytest.approx([-0.1] + 7 * [0.1])


def test_collapse_is_logged_once_with_step_and_layer(caplog):
    model = new_decoder(preset_spec("nano-moe", layers=2), seed=0)
    metrics = RouterMetrics(moe_layers(model), [0, 1])
    even, gone = torch.full((8,), 50.0), torch.tensor([200.0, 190, 10, 0, 0, 0, 0, 0])

    def step(number, *layers, tokens=200):
        counts = torch.stack(layers)
        metrics.on_step_end(
            number, {STATISTICS: torch.cat((counts, counts, torch.ones(2, 5)), 1).tolist(), "tokens": tokens}
        )

    step(1, even, even)
    step(2, even, gone, tokens=20)  # too few to tell
    assert not caplog.records
    step(3, even, gone)
    step(4, gone, gone)
    [record] = caplog.records
    assert (
        "step 3: routers have collapsed: experts in use, of 8 per layer: layer 1 (2." in record.getMessage()
    )
    again = RouterMetrics(moe_layers(model), [0, 1])
    again.restore(json.loads(json.dumps(metrics.state())))
    assert again.warned


def test_effective_experts():
    assert effective_experts(np.array([0.25] * 4)) == pytest.approx(4)
    assert effective_experts(np.array([0.5, 0.5, 0, 0])) == pytest.approx(2)


def test_router_learning_rate_by_parameter_name(tmp_path):
    made = validate_config(config(tmp_path, optim={"router_lr_scale": 0.1}))
    model = new_decoder(preset_spec("nano-moe", layers=2), seed=0)
    groups = parameter_groups(made.optim_groups, model)
    [routers] = [group for group in groups if group.lr_scale == 0.1]
    assert {id(p) for p in routers.parameters} == {id(layer.gate.weight) for layer in moe_layers(model)}


def test_router_learning_rate_in_custom_loops():
    model = new_decoder(preset_spec("nano-moe", layers=2), seed=0)
    optimizer = whet.create_optimizer(Optim(lr=0.5, router_lr_scale=0.1), model)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    routers = {id(layer.gate.weight) for layer in moe_layers(model)}
    assert rates == {number: 0.05 if number in routers else 0.5 for number in rates}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"preset": "nano"}, "experts": {"z_loss": 0.1}},
            "experts.z_loss: whet finds no experts in this model",
        ),
        (
            {"experts": {"bias_rate": 0.1}},
            "experts.bias_rate: the routers of this model have no balancing bias",
        ),
        (
            {"model": {"preset": "nano"}, "optim": {"router_lr_scale": 0.1}},
            "^optim.router_lr_scale: no routers are trained",
        ),
        (
            {"optim": {"groups": {"[.]mlp[.]gate[.]x": {}}}},
            "^optim.groups: .* matches no trainable parameter",
        ),
        ({"experts": {"balance": 0.1}}, "balance"),
        ({"experts": {"z_loss": -1}}, "z_loss"),
    ],
)
def test_unsupported_settings_are_errors(tmp_path, changes, message):
    made = config(tmp_path, **changes)
    if made["model"]["preset"] == "nano":
        del made["model"]["experts"]
    with pytest.raises(ConfigError, match=message):
        whet.train(made)


def test_bias_with_adapters_is_an_error(tmp_path):
    made = {**config(tmp_path, experts={"bias_rate": 0.1}), "model": "any", "method": {"kind": "lora"}}
    with pytest.raises(ConfigError, match="adapters cannot store the router bias"):
        validate_config(made)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_lora_on_experts_and_routers_trains_and_saves(tmp_path, method):
    """Trains adapters on the base of another run; other parameters stay unchanged."""
    base = whet.train(config(tmp_path))
    result = whet.train(
        {
            **config(tmp_path, run={"name": "adapted", "steps": 4}, experts={"load_balancing": 0.01}),
            "model": str(base.directory / "final"),
            "method": {"kind": method, "rank": 2, "targets": ["experts", "routers", "attention"]},
        }
    )
    assert "router_entropy_mean" in rows(result)[-1]
    settings = json.loads((result.directory / "final" / "adapter_config.json").read_text())
    assert "model.layers.1.mlp.gate.weight" in settings["target_parameters"]
    model, _ = whet.load(result.directory, dtype=torch.float32, device="cpu")
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        adapted = model(tokens)
        merged = whet.merge(model)(tokens)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)


def test_other_objectives_report_router_metrics(tmp_path, tiny_directory):
    """DPO also runs the model without adapters, which is not counted; its batches have two examples per pair."""
    base = whet.train(config(tmp_path, model={"tokenizer": str(tiny_directory)}))
    made = config(
        tmp_path, run={"name": "dpo", "steps": 1, "batch_size": 2}, experts={"load_balancing": 0.01}
    )
    del made["run"]["batch_tokens"]
    result = whet.train(
        {
            **made,
            "model": str(base.directory / "final"),
            "method": {"kind": "lora", "rank": 2},
            "data": {"train": "synth:house-pairs:8", "valid": "synth:house-pairs:4", "max_length": 256},
            "objective": {"kind": "dpo", "reference": "online"},
        }
    )
    [row] = rows(result)
    assert len(row["per_expert_share"]) == 4
    assert np.isfinite(row["load_balancing_loss"])


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_every_optimizer_updates_experts_and_routers(name, tmp_path):
    """Expert weights have three dimensions."""
    result = whet.train(config(tmp_path, optim={"name": name, "weight_decay": 0.1}, run={"steps": 2}))
    model, _ = whet.load(result.directory, dtype=torch.float32, device="cpu")
    fresh = new_decoder(model.spec, seed=0)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, fresh.get_parameter(n))]
    assert {
        "layers.1.mlp.experts.gate_up_proj",
        "layers.1.mlp.experts.down_proj",
        "layers.1.mlp.gate.weight",
    } <= set(moved)
    assert np.isfinite(result.metrics["eval_loss"])
