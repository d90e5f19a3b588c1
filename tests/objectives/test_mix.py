"""Mixes of objectives: the gradient is the weighted sum of the parts for all micro-batches; exact resume."""

import copy
import json

import pytest
import torch
from torch import nn

import whet
from tiny import run_config, write_tiny_model
from whet.adapters.attach import attach_lora
from whet.config.load_config import load_config, to_yaml, validate_config
from whet.data.batches import make_batch
from whet.errors import ConfigError
from whet.objectives.mix import Mix
from whet.objectives.objective import Loss
from whet.objectives.preference import Preference
from whet.objectives.sft import SFT
from whet.recipes.registry import recipe_for
from whet.training.callbacks import Callback, StopRun

SFT_PART = {
    "weight": 0.5,
    "objective": {"kind": "sft"},
    "data": {"train": "synth:house-styles:24", "valid": "synth:house-styles-valid:4", "max_length": 256},
    "batch_size": 6,
}
DPO_PART = {
    "weight": 2.0,
    "objective": {"kind": "dpo", "beta": 0.5},
    "data": {"train": "synth:house-pairs:12", "valid": "synth:house-pairs-valid:4", "max_length": 256},
    "batch_size": 3,
}


def mix_config(tiny_directory, tmp_path, parts=(SFT_PART, DPO_PART), **sections):
    config = run_config(
        tiny_directory, tmp_path, objective={"kind": "mix", "parts": copy.deepcopy(list(parts))}, **sections
    )
    return {key: value for key, value in config.items() if key != "data"}


def plain_losses(model, batches):
    """Return the losses of both parts, from a full softmax per sequence in the precision of the model."""
    tokens, nll, margins = 0, 0.0, []
    for batch in batches:
        place, logps = 0, []
        for row, documents in enumerate(batch.documents or [(batch.tokens.shape[1],)] * len(batch.tokens)):
            start = 0
            for size in documents:
                span = slice(start, start + size)
                logs = model(batch.tokens[row : row + 1, span])[0].log_softmax(-1)
                targets = batch.targets[row, span]
                kept = targets >= 0
                logps.append(logs[kept].gather(1, targets[kept][:, None]).sum())
                tokens += int(kept.sum()) if batch.part == "sft" else 0
                start += size
                place += 1
        if batch.part == "sft":
            nll = nll - sum(logps)
        else:
            ratios = torch.stack(logps[: len(batch.origins)]) - batch.column("values")[:, 0]
            margins += list(0.5 * (ratios[::2] - ratios[1::2]))
    return nll / tokens, -torch.stack(margins).sigmoid().log().mean()


def gradient_of(model, objective, batches):
    """Return the gradient, as the trainer computes it."""
    from whet.training.loss import total_weights, weighted_loss

    precision = whet.hardware.Precision(torch.float64, torch.float64, torch.float64, "a test")
    weights = total_weights(objective, batches)
    model.zero_grad()
    metrics = {}
    for batch in batches:
        loss, actual = weighted_loss(model, objective, batch, weights=weights, precision=precision)
        loss.backward()
        for name, value in {"loss": loss.detach(), **actual}.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), metrics


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("adapter", [True, False])
def test_gradient_is_the_sum_of_the_parts_for_all_micro_batches(
    tiny, tiny_directory, tmp_path, pack, adapter
):
    model, tokenizer = tiny
    if adapter:
        attach_lora(model, rank=2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.double()
    actual = []
    for micro in (4096, 300):
        parts = copy.deepcopy([SFT_PART, DPO_PART])
        for part in parts:
            part["data"]["pack"] = pack
        config = validate_config(
            mix_config(tiny_directory, tmp_path, parts, run={"micro_batch_tokens": micro})
        )
        data = recipe_for(config).open_data()
        data.prepare(tokenizer)
        pairs = data.parts["dpo"].examples["train"]
        torch.manual_seed(0)
        pairs.reference_logprobs = -150 + 5 * torch.randn(len(pairs), 2).double().numpy()
        batches = next(data.stream())
        assert {batch.part for batch in batches} == {"sft", "dpo"}
        assert sum(len(b.origins) for b in batches if b.part == "sft") == 6
        assert sum(len(b.origins) for b in batches if b.part == "dpo") == 2 * 3
        objective = Mix({"sft": SFT(), "dpo": Preference("dpo", beta=0.5)}, data.weights)
        gradient, metrics = gradient_of(model, objective, batches)
        actual.append(gradient)
        if pack or micro == 300:
            sft, dpo = plain_losses(model, batches)
            model.zero_grad()
            (0.5 * sft + 2.0 * dpo).backward()
            expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            assert (gradient - expected).norm() < 1e-6 * expected.norm()
            assert metrics["sft.loss"] == pytest.approx(sft.item(), rel=1e-6)
            assert metrics["dpo.loss"] == pytest.approx(dpo.item(), rel=1e-6)
            assert metrics["loss"] == pytest.approx(0.5 * sft.item() + 2 * dpo.item(), rel=1e-6)
            assert 0 <= metrics["dpo.reward_accuracy"] <= 1 + 1e-6
    assert len(batches) > 2
    assert (actual[0] - actual[1]).norm() < 1e-9 * actual[0].norm()


@pytest.mark.parametrize("method", [{"kind": "lora", "rank": 4}, {"kind": "full"}])
def test_mix_trains_and_reports_both_parts_and_resumes_exactly(tiny_directory, tmp_path, method):
    class StopAt(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 3 else None

    def config(name):
        return mix_config(
            tiny_directory, tmp_path, method=method, optim={"lr": 3e-3}, eval={"every": 4},
            run={"name": name, "steps": 8},
        )  # fmt: skip

    whole = whet.train(config("whole"))
    first, last = whole.history[0], whole.metrics
    assert last["eval_sft.loss"] < first["eval_sft.loss"]
    assert last["eval_dpo.loss"] < first["eval_dpo.loss"]
    assert {"sft.loss", "dpo.loss", "dpo.reward_margin", "eval_dpo.reward_accuracy"} <= last.keys()
    assert last["eval_loss"] == pytest.approx(0.5 * last["eval_sft.loss"] + 2 * last["eval_dpo.loss"])
    assert "eval_perplexity" not in last
    said = json.loads((whole.directory / "provenance.json").read_text())
    assert said["data_sha256"].keys() == {"sft.train", "sft.valid", "dpo.train", "dpo.valid"}
    part = whet.train(config("part"), [StopAt()])
    rest = whet.resume(part.directory)
    losses = [row["loss"] for row in whole.history if "loss" in row]
    assert [row["loss"] for row in (*part.history, *rest.history) if "loss" in row] == losses
    name = "model.safetensors" if method["kind"] == "full" else "adapter_model.safetensors"
    one, other = ((run.directory / "final" / name).read_bytes() for run in (whole, rest))
    assert one == other


def test_completions_are_generated_and_evaluated_for_all_parts(tiny_directory, tmp_path):
    parts = copy.deepcopy([SFT_PART, DPO_PART])
    parts[0]["data"]["test"] = "synth:house-test:3"
    evaluation = {
        "every": 2, "generate": True, "max_new_tokens": 4,
        "early_stop": {"metric": "eval_loss", "patience": 9},
    }  # fmt: skip
    config = mix_config(tiny_directory, tmp_path, parts, eval=evaluation)
    result = whet.train(config)
    assert result.metrics["exact_match"] == 0
    assert result.best["metric"] == "eval_loss"
    assert result.summary["test"]["sft.loss"] > 0
    assert "dpo.loss" not in result.summary["test"]


class Headed(SFT):
    def __init__(self):
        self.heads = nn.ModuleDict({"score": nn.Linear(32, 1)})

    def loss(self, model, batch):
        actual = super().loss(model, batch)
        miss = (self.heads["score"](model.hidden(batch.tokens, batch.positions, batch.layout())) - 1).square()
        return Loss({name: total + miss.sum() for name, total in actual.sums.items()}, actual.metrics)


def test_mix_has_the_heads_of_its_parts(tiny):
    objective = Mix({"a": Headed(), "b": SFT(), "c": Headed()}, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert {name for name, _ in objective.heads.named_parameters()} == {
        "a.score.weight", "a.score.bias", "c.score.weight", "c.score.bias",
    }  # fmt: skip
    assert Mix({"b": SFT()}, {"b": 1.0}).heads is None


def test_metrics_of_a_part_keep_their_units(tiny):
    class Odd(SFT):
        def __init__(self):
            self.coefficients = {"loss": 1.0, "other": 0.0}

        def weights(self, batch):
            return {"loss": 10.0, "other": 4.0}

        def loss(self, model, batch):
            two = torch.tensor(2.0)
            return Loss({"loss": two, "other": two}, {"a": two, "b": two}, {"b": "other"})

    from dataclasses import replace

    from tiny import random_examples

    batch = replace(make_batch([random_examples(1)]), part="odd")
    actual = Mix({"odd": Odd()}, {"odd": 3.0}).loss(None, batch)
    assert actual.units["odd.a"] == "odd.loss"
    assert actual.units["odd.b"] == "odd.other"


def test_parts_may_have_curricula_and_other_objectives(tiny_directory, tmp_path):
    parts = [
        {**SFT_PART, "data": {**SFT_PART["data"], "curriculum": {"kind": "length", "stages": 2}}},
        {
            "name": "teacher",
            "objective": {"kind": "distill", "teacher": str(tiny_directory)},
            "data": {"train": "synth:house:8", "max_length": 256},
        },
    ]
    result = whet.train(mix_config(tiny_directory, tmp_path, parts, run={"steps": 2}))
    assert {"sft.loss", "teacher.soft_loss", "teacher.hard_loss", "teacher.cross_entropy"} <= (
        result.metrics.keys()
    )
    assert "eval_teacher.soft_loss" not in result.metrics  # it has no valid
    assert "eval_sft.loss" in result.metrics


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": {"kind": "mix", "parts": [SFT_PART, SFT_PART]}}, "give each a different name"),
        ({"objective": {"kind": "mix", "parts": [SFT_PART]}}, "objective.parts: List should have at least 2"),
        (
            {"objective": {"kind": "mix", "parts": [{**SFT_PART, "weight": 0}, DPO_PART]}},
            "objective.parts.0.weight: Input should be greater than 0",
        ),
        (
            {"objective": {"kind": "mix", "parts": [SFT_PART, {**DPO_PART, "wieght": 1}]}},
            "unknown key 'objective.parts.1.wieght', did you mean 'weight'",
        ),
        (
            {
                "objective": {
                    "kind": "mix",
                    "parts": [SFT_PART, {**DPO_PART, "objective": {"kind": "mix", "parts": []}}],
                }
            },
            "objective.parts.1.objective: unknown kind 'mix'",
        ),
        ({"data": {"train": "synth:house:4"}}, "each part of a mix has separate data"),
        ({"run": {"epochs": 1, "batch_size": 2}}, "a mix has no epochs"),
        ({"objective": {"kind": "sft"}}, "data is missing"),
    ],
)
def test_invalid_mixes_are_errors(tiny_directory, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        validate_config(mix_config(tiny_directory, tmp_path) | change)


def test_config_yaml_round_trip_and_overrides_of_parts(tiny_directory, tmp_path):
    config = validate_config(mix_config(tiny_directory, tmp_path))
    path = tmp_path / "mix.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    changed = load_config(path, ["objective.parts.1.weight=0.25", "objective.parts.0.data.max_length=99"])
    assert changed.objective.parts[1].weight == 0.25
    assert changed.parts()["sft"].data.max_length == 99
    with pytest.raises(ConfigError, match=r"7 is not an index \(from 0\) of a list with 2 items"):
        load_config(path, ["objective.parts.7.weight=1"])


def test_tokenizer_is_trained_on_the_records_of_all_parts(tiny_directory, tmp_path):
    from whet.runs.inspect_data import view_data_by_part

    (tmp_path / "a.txt").write_text("aaaa bbbb aaaa bbbb")
    (tmp_path / "z.txt").write_text("zzzz yyyy zzzz yyyy")
    parts = [
        {"name": name, "objective": {"kind": "sft"}, "data": {"train": str(tmp_path / f"{name}.txt")}}
        for name in ("a", "z")
    ]
    config = mix_config(tiny_directory, tmp_path, parts, method={"kind": "full"}, run={"steps": 1})
    config["model"] = {"preset": "nano", "tokenizer": "chars", "d_model": 32, "layers": 1}
    shown = view_data_by_part(validate_config(config))
    trained = whet.train(config)
    sizes = {len(whet.load(trained.directory)[1]), *(view.tokenizer.size for view in shown.values())}
    assert len(sizes) == 1
    assert not any(view.errors for view in shown.values())


CASES = [
    ({"kind": "orpo", "beta": 0.3}, "synth:house-pairs:8"),
    ({"kind": "dpo"}, "synth:house-pairs:8"),
    ({"kind": "mtp", "n_predict": 2}, "synth:house:8"),
    ({"kind": "distrust"}, "synth:disputes:8"),
    ({"kind": "distrust", "mode": "additive"}, "synth:disputes:8"),
    ({"kind": "distill", "alpha": 0.4}, "synth:house:8"),
]


@pytest.mark.parametrize(("objective", "source"), CASES, ids=lambda case: str(case)[:40])
def test_part_reports_the_metrics_of_its_objective(tiny_directory, tmp_path, objective, source):
    if objective["kind"] == "distill":
        write_tiny_model(tmp_path / "teacher", hidden_size=48)
        objective = {**objective, "teacher": f"{tmp_path}/teacher"}
    data = {"train": source, "valid": source, "max_length": 256}
    run = {"steps": 2, "batch_size": 8, "micro_batch_tokens": 600}
    alone = whet.train(
        run_config(tiny_directory, tmp_path, objective=objective, data=data, run={**run, "name": "alone"})
    )
    parts = [
        {"name": "part", "weight": 0.7, "objective": objective, "data": data},
        {**SFT_PART, "weight": 2.0},
    ]
    mixed = whet.train(mix_config(tiny_directory, tmp_path, parts, run={**run, "name": "mixed"}))
    kinds = ("loss", "cross_entropy", "logprob", "reward", "kl")
    for row, other in zip(alone.history[:2], mixed.history[:2], strict=True):  # before the first update
        before = "eval_" if "eval_loss" in row else ""
        own = {name: value for name, value in row.items() if any(kind in name for kind in kinds)}
        assert f"{before}loss" in own
        for name, value in own.items():
            told = f"{before}part.{name.removeprefix(before)}"
            assert other[told] == pytest.approx(value, rel=1e-4, abs=1e-5), told
        total = 0.7 * other[f"{before}part.loss"] + 2 * other[f"{before}sft.loss"]
        assert other[f"{before}loss"] == pytest.approx(total, rel=1e-5)


def test_heads_without_targets_in_a_step_are_left_out(tiny_directory, tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "abcdefgh")))
    data = {"train": str(path), "max_length": 64, "order": "sequential"}
    short = {"name": "short", "objective": {"kind": "mtp", "n_predict": 3}, "data": data, "batch_size": 1}
    rows = whet.train(mix_config(tiny_directory, tmp_path, [short, SFT_PART], run={"steps": 2})).history
    first, second = (row for row in rows if "loss" in row)
    assert not [name for name, value in first.items() if value != value]
    assert "short.mtp_loss_3" not in first
    assert "short.mtp_loss_3" in second
    for row in (first, second):
        assert row["loss"] == pytest.approx(row["short.loss"] + 0.5 * row["sft.loss"], rel=1e-5)
