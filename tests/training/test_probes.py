"""Probes: their metrics are correct, and a run is bit-identical with and without them."""

import contextlib
import json
import logging
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import whet
from tiny import random_examples, run_config, write_tiny_model, write_tokenizer
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.errors import ConfigError
from whet.hardware import choose_precision
from whet.objectives.sft import SFT
from whet.runs.assemble import open_assembly
from whet.training.callbacks import Callback, StopRun
from whet.training.observe.layer_stats import effective_rank, gradient_noise
from whet.training.observe.preserve_state import preserve_state
from whet.training.observe.probe_batches import documents_of, loss_units, probe_batches
from whet.training.trainer import Trainer

NAMES = ("gradients", "weights", "activations", "attention", "noise", "rank")
ALL = {**dict.fromkeys(NAMES, 2), "curvature": None}
LAYERS = 12  # more than ten: names sorted as text would put layer 10 before layer 2


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def probed(actual):
    return [{key: row[key] for key in row if key.startswith("exp_")} for row in actual if "probe_s" in row]


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("the test says so", unfinished=True) if step == self.step else None


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two steps of full training with all probes after each, and the resulting model in transformers, in float64."""
    tmp_path = tmp_path_factory.mktemp("measured")
    write_tiny_model(tmp_path / "deep", num_hidden_layers=LAYERS, initializer_range=0.1)
    model, tokenizer = whet.load(tmp_path / "deep", dtype=torch.float32, device="cpu")
    began = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.requires_grad_(True)
    settings = StepSettings(batch_size=3, batch_tokens=None, micro_batch_tokens=64, pack=True)
    stream = BatchStream(random_examples(40, longest=30), settings, seed=0)
    pieces = probe_batches(stream, SFT())
    probes = [
        whet.GradientStats(pieces[0], every=1),
        whet.WeightStats(every=1),
        whet.ActivationStats(pieces[0], every=1),
        whet.AttentionEntropy(pieces[0], every=1),
        whet.GradientNoise(pieces, every=1),
        whet.EffectiveRank(every=1),
    ]
    config = validate_config(
        run_config(tmp_path / "deep", tmp_path, method={"kind": "full"}, run={"steps": 2})
    )
    result = Trainer(model, SFT(), stream, config, probes).fit()
    whet.save(model, tokenizer, tmp_path / "after")
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "after", dtype=torch.float64, attn_implementation="eager"
    )
    return {
        "row": result.history[-1],
        "reference": reference,
        "pieces": pieces,
        "began": began,
        "model": model,
    }


def documents(piece):
    """Return the tokens and targets of each document of the packed rows."""
    for batch in piece:
        for row, lengths in enumerate(batch.documents or [(batch.tokens.shape[1],)] * len(batch.tokens)):
            start = 0
            for length in lengths:
                tokens, targets = (t[row, start : start + length] for t in (batch.tokens, batch.targets))
                start += length
                if (targets != -100).any() or batch.real is None or batch.real[row, start - length]:
                    yield tokens, targets


def reference_gradients(reference, piece):
    """Return the gradients by layer of the mean loss over supervised tokens, computed by transformers."""
    reference.zero_grad()
    total, count = 0.0, 0
    for tokens, targets in documents(piece):
        logits = reference(tokens[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    (total / count).backward()
    return {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}, count


def norm(tensors):
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def of_layer(named, layer):
    return [t for name, t in named.items() if f"layers.{layer}." in name]


def outside(named):
    return [t for name, t in named.items() if "layers." not in name]


def test_gradient_norms_match_transformers(measured):
    gradients, _ = reference_gradients(measured["reference"], measured["pieces"][0])
    row, expected = measured["row"], [norm(of_layer(gradients, layer)) for layer in range(LAYERS)]
    assert row["exp_grad_norm_layer"] == pytest.approx(expected, rel=1e-4)
    assert row["exp_grad_norm_rest"] == pytest.approx(norm(outside(gradients)), rel=1e-4)
    tensors = [norm([gradient]) for gradient in gradients.values()]
    assert row["exp_grad_norm_mean"] == pytest.approx(np.mean(tensors), rel=1e-4)
    assert row["exp_grad_norm_std"] == pytest.approx(np.std(tensors), rel=1e-3)
    assert row["exp_grad_norm_largest_layer"] == int(np.argmax(expected))


def test_weight_norms_and_distance_from_initial_weights(measured):
    row, began = measured["row"], measured["began"]
    now = {name: p.detach() for name, p in measured["model"].named_parameters()}
    way = {name: now[name].double() - began[name].double() for name in now}
    for key, tensors in (("exp_weight_norm", now), ("exp_weight_distance", way)):
        assert row[key] == pytest.approx(norm(tensors.values()), rel=1e-5)
        assert row[f"{key}_layer"] == pytest.approx(
            [norm(of_layer(tensors, n)) for n in range(LAYERS)], rel=1e-5
        )
        assert row[f"{key}_rest"] == pytest.approx(norm(outside(tensors)), rel=1e-5)
    assert row["exp_weight_distance"] > 0
    change = norm(now.values()) - norm(began.values())
    assert row["exp_weight_delta"] == pytest.approx(abs(change), rel=1e-2, abs=1e-5)


def test_activations_match_transformers(measured):
    outputs = [[] for _ in range(LAYERS)]
    reference = measured["reference"]
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, n=n: outputs[n].append(out[0] if isinstance(out, tuple) else out)
        )
        for n, layer in enumerate(reference.model.layers)
    ]
    with torch.no_grad():
        for tokens, _ in documents(measured["pieces"][0]):
            reference(tokens[None])
    for hook in hooks:
        hook.remove()
    flat = [torch.cat([x.flatten() for x in actual]).numpy() for actual in outputs]
    sizes = [np.sqrt((x**2).mean()) for x in flat]
    sparse = [(np.abs(x) < 1e-3).mean() for x in flat]
    row = measured["row"]
    assert row["exp_act_norm_layer"] == pytest.approx(sizes, rel=1e-4)
    assert row["exp_act_norm_ratio"] == pytest.approx(sizes[-1] / sizes[0], rel=1e-4)
    assert row["exp_act_sparsity_layer"] == pytest.approx(
        sparse, abs=2e-4
    )  # an entry may round across the edge
    assert row["exp_act_sparsity_mean"] == pytest.approx(np.mean(sparse), abs=1e-4)
    assert max(sparse) > 0


def test_attention_entropy_matches_transformers(measured):
    by_layer = [[] for _ in range(LAYERS)]
    with torch.no_grad():
        for tokens, _ in documents(measured["pieces"][0]):
            for layer, weights in enumerate(
                measured["reference"](tokens[None], output_attentions=True).attentions
            ):
                p = weights[0].numpy()  # [heads, T, T]
                logs = np.log(p, where=p > 0, out=np.zeros_like(p))
                by_layer[layer] += list((-p * logs).sum(-1).mean(0))
    expected = [np.mean(actual) for actual in by_layer]
    row = measured["row"]
    assert row["exp_attn_entropy_layer"] == pytest.approx(expected, rel=1e-4)
    assert row["exp_attn_entropy_mean"] == pytest.approx(np.mean(expected), rel=1e-4)
    assert row["exp_attn_entropy_std"] == pytest.approx(np.std(expected), rel=1e-2)


def test_noise_scale_matches_the_paper(measured):
    """Appendix A.1 of arXiv 1812.06162 with batches of unequal size, on gradients of transformers."""
    actual = [reference_gradients(measured["reference"], piece) for piece in measured["pieces"]]
    sizes = [count for _, count in actual]
    assert len(set(sizes)) > 1
    total = sum(sizes)
    both = {name: sum(g[name] * count / total for g, count in actual) for name in actual[0][0]}
    big, small = norm(both.values()) ** 2, sum(n / total * norm(g.values()) ** 2 for g, n in actual)
    harmonic = total / len(sizes)  # parts weighted by size are worth a batch of this size each
    signal = (total * big - harmonic * small) / (total - harmonic)
    noise = (small - big) / (1 / harmonic - 1 / total)
    row = measured["row"]
    assert row["exp_grad_noise"] == pytest.approx(noise, rel=1e-3)
    assert row["exp_grad_signal"] == pytest.approx(signal, rel=1e-3)
    if signal > 0:
        assert row["exp_simple_noise_scale"] == pytest.approx(noise / signal, rel=1e-2)


def test_loss_curvature_is_the_relative_standard_deviation_of_gradient_norms(tiny_directory, tmp_path):
    def train(name, callbacks=()):
        log = {"probes": {**dict.fromkeys(NAMES), "curvature": 3}}
        return whet.train(
            run_config(tiny_directory, tmp_path, run={"name": name, "steps": 6}, log=log), callbacks
        )

    actual = [row for row in rows(train("whole").directory) if "loss" in row]
    norms = [row["grad_norm"] for row in actual]
    assert "exp_grad_noise_scale" not in actual[0], "one norm has no spread"
    for number, row in enumerate(actual[1:], start=2):
        last = norms[max(0, number - 3) : number]
        assert row["exp_grad_noise_scale"] == pytest.approx(np.std(last) / np.mean(last), rel=1e-9)
    resumed = whet.resume(train("cut", [StopAt(2)]).directory)
    again = [row for row in rows(resumed.directory) if "loss" in row]
    assert [row.get("exp_grad_noise_scale") for row in again] == [
        row.get("exp_grad_noise_scale") for row in actual
    ]


def test_loss_curvature_ignores_nonfinite_gradients():
    probe = whet.LossCurvature()
    for value in (1.0, math.nan, math.inf, 3.0):
        metrics = {"grad_norm": value}
        probe.on_step_end(1, metrics)
    assert metrics["exp_grad_noise_scale"] == 0.5
    assert probe.norms.maxlen == 50
    with pytest.raises(ConfigError, match="window must be at least 1"):
        whet.LossCurvature(0)


@pytest.mark.parametrize("eps", [1e-3, 0.5, 1e9])
def test_sparsity_threshold(measured, tiny_directory, eps):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    pieces = measured["pieces"]
    probe = whet.ActivationStats(pieces[0], eps=eps)
    probe.trainer = SimpleNamespace(
        model=model, device=model.device, precision=choose_precision("fp32", model.device)
    )
    outputs = []
    hook = model.layers[0].register_forward_hook(lambda _, __, out: outputs.append(out.flatten()))
    actual = probe.measure()
    hook.remove()
    assert actual["exp_act_sparsity_layer"][0] == pytest.approx(
        (torch.cat(outputs).abs() < eps).double().mean()
    )
    with pytest.raises(ConfigError, match="eps must be > 0"):
        whet.ActivationStats(pieces[0], eps=0.0)


def test_signal_and_noise_estimates_are_unbiased():
    rng = np.random.default_rng(0)
    truth, deviation, sizes = np.full(20, 0.3), 2.0, [3, 5, 9, 20]
    actual = []
    for _ in range(4000):
        parts = [truth + rng.normal(0, deviation, (n, 20)).mean(0) for n in sizes]
        mean = sum(n * part for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
        estimate = gradient_noise(sizes, [float(p @ p) for p in parts], float(mean @ mean))
        actual.append((estimate.signal, estimate.noise))
    signal, noise = np.mean(actual, 0)
    assert signal == pytest.approx(20 * 0.3**2, rel=0.05)
    assert noise == pytest.approx(20 * deviation**2, rel=0.02)
    assert gradient_noise([1, 1], [1.0, 1.0], 0.0).scale is None, "nothing but noise"


def entropy_rank(matrix):
    values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def test_effective_ranks_match_the_singular_values(measured):
    now = {name: p.detach() for name, p in measured["model"].named_parameters() if p.ndim == 2}
    row = measured["row"]
    expected = [np.mean([entropy_rank(t) for t in of_layer(now, layer)]) for layer in range(LAYERS)]
    assert row["exp_effective_rank_layer"] == pytest.approx(expected, rel=1e-6)
    assert row["exp_effective_rank_mean"] == pytest.approx(
        np.mean([entropy_rank(t) for t in now.values()]), rel=1e-6
    )


def test_effective_rank_of_known_matrices():
    assert effective_rank(torch.eye(7)).item() == pytest.approx(7)
    one = torch.outer(torch.arange(1.0, 9), torch.arange(1.0, 5))
    assert effective_rank(one).item() == pytest.approx(1, abs=1e-5)
    both = torch.stack([torch.eye(4), torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0]))])
    assert effective_rank(both).tolist() == pytest.approx(
        [4, math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))]
    )
    assert effective_rank(torch.zeros(4, 4)).isnan()


KINDS = {
    "lora with dropout": {"method": {"kind": "lora", "rank": 4, "dropout": 0.3}},
    "full": {"method": {"kind": "full"}, "optim": {"lr": 1e-3}, "run": {"grad_checkpoint": True}},
    "fp16": {"run": {"precision": "fp16"}},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "fp16" else ()) for kind in KINDS]
)
def test_probes_do_not_change_a_run(tiny_directory, tmp_path, kind):
    """Also after a stop and a resume."""
    sections = {**KINDS[kind], "run": {**KINDS[kind].get("run", {}), "steps": 5}}
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", **sections))
    looked_at = {
        **sections,
        "log": {"probes": ALL, "samples": {"prompts": ["Hello"], "every": 2, "max_tokens": 4}},
    }
    watched = whet.train(run_config(tiny_directory, tmp_path / "watched", **looked_at))
    first = whet.train(run_config(tiny_directory, tmp_path / "stopped", **looked_at), [StopAt(3)])
    second = whet.resume(first.directory)
    assert second.steps == 5
    for other in (watched, second):
        for part in ("weights", "optimizer"):
            name = f"checkpoints/step-000005/{part}.safetensors"
            expected, actual = load_file(plain.directory / name), load_file(other.directory / name)
            assert expected.keys() == actual.keys()
            assert all(torch.equal(expected[key], actual[key]) for key in expected)
    assert [row["step"] for row in rows(watched.directory) if "probe_s" in row] == [2, 4]
    assert probed(rows(watched.directory)) == probed(rows(second.directory)), "the start is kept, to the bit"
    assert [row["loss"] for row in rows(plain.directory) if "loss" in row] == [
        row["loss"] for row in rows(watched.directory) if "loss" in row
    ]


@pytest.mark.slow
def test_probes_do_not_recompile_layers(tiny_directory, tmp_path):
    """Hooks, modes and shapes of probes cause no recompilation: graphs and results stay the same."""
    finals = []
    for name, log in (("plain", {}), ("watched", {"probes": dict.fromkeys(NAMES, 1)})):
        config = run_config(tiny_directory, tmp_path / name, run={"steps": 3, "compile": True}, log=log)
        result = whet.train(config)
        finals.append(load_file(result.directory / "final" / "adapter_model.safetensors"))
        assert len(probed(rows(result.directory))) == (3 if log else 0)
    assert all(torch.equal(finals[0][key], finals[1][key]) for key in finals[0])


def test_probes_measure_only_trained_parameters(tiny_directory, tmp_path):
    config = run_config(
        tiny_directory, tmp_path, method={"kind": "lora", "layers": 1}, run={"steps": 2}, log={"probes": ALL}
    )
    [actual] = probed(rows(whet.train(config).directory))
    for key in ("exp_grad_norm_layer", "exp_weight_norm_layer", "exp_effective_rank_layer"):
        assert actual[key][0] is None, "the first layer has no adapters"
        assert actual[key][1] > 0
    assert actual["exp_grad_norm_largest_layer"] == 1
    assert None not in actual["exp_act_norm_layer"]


def test_probes_of_moe_and_attention_free_models(tmp_path):
    model = {"preset": "nano-moe", "d_model": 32, "heads": 2, "width": 16, "layers": 2, "experts": 4}
    config = {
        "model": model,
        "method": {"kind": "full"},
        "data": {"train": "synth:python-topics", "max_length": 65, "too_long": "split"},
        "experts": {"load_balancing": 0.01},
        "log": {"probes": ALL},
        "run": {"dir": str(tmp_path), "steps": 2, "batch_tokens": 256, "device": "cpu", "precision": "fp32"},
    }
    result = whet.train(config)
    [actual] = probed(rows(result.directory))
    weights = load_file(result.directory / "checkpoints" / "step-000002" / "weights.safetensors")
    ranks = []
    for name, tensor in weights.items():
        if "layers.1." in name and tensor.ndim >= 2:
            matrices = tensor if tensor.ndim == 3 else tensor[None]
            ranks += [entropy_rank(matrix) for matrix in matrices]
    assert actual["exp_effective_rank_layer"][1] == pytest.approx(np.mean(ranks), rel=1e-6)
    assert len(actual["exp_attn_entropy_layer"]) == 2


def bridged(directory, kind):
    """Save a small model of an architecture without native support, with the tiny tokenizer."""
    sizes = {
        "gpt_neox": {"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 512},
        "mamba": {"state_size": 8, "time_step_rank": 4},
    }[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=260, hidden_size=32, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=256, **sizes
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize("kind", ["gpt_neox", "mamba"])
def test_probes_of_bridge_models(tmp_path, kind, caplog):
    directory = bridged(tmp_path / kind, kind)
    method = (
        {"kind": "full"} if kind == "mamba" else {"kind": "lora", "rank": 4, "targets": ["query_key_value"]}
    )
    sections = {"method": method, "data": {"max_length": 64, "valid": None}, "run": {"steps": 3}}
    plain = whet.train(run_config(directory, tmp_path / "plain", **sections))
    result = whet.train(run_config(directory, tmp_path / "watched", **sections, log={"probes": ALL}))
    actual = probed(rows(result.directory))
    assert len(actual) == 1
    assert all(
        len(row[f"exp_{name}_layer"]) == 2
        for row in actual
        for name in ("grad_norm", "weight_distance", "act_norm")
    )
    if kind == "gpt_neox":
        assert all(entropy > 0 for row in actual for entropy in row["exp_attn_entropy_layer"])
    else:
        assert "exp_attn_entropy_mean" not in actual[0]
        assert (
            caplog.text.count(
                "AttentionEntropy is disabled, because it failed: ModelError: MambaForCausalLM does not"
            )
            == 1
        )
    name = "checkpoints/step-000003/weights.safetensors"
    expected, weights = load_file(plain.directory / name), load_file(result.directory / name)
    assert all(torch.equal(expected[key], weights[key]) for key in expected)


@pytest.mark.parametrize("kind", ["qlora", "classify"])
def test_probes_of_quantized_models_and_classifiers(tiny_directory, tmp_path, kind):
    sections = {"run": {"steps": 3}, **({"method": {"kind": "qlora", "rank": 4}} if kind == "qlora" else {})}
    if kind == "classify":
        texts = [{"input": f"{word} {n}", "label": word} for n in range(12) for word in ("red", "blue")]
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        sections["objective"] = {"kind": "classify", "classes": ["red", "blue"], "probe": False}
        sections["data"] = {"train": str(tmp_path / "texts.jsonl"), "valid": None, "max_length": 64}
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", **sections))
    result = whet.train(run_config(tiny_directory, tmp_path / "watched", **sections, log={"probes": ALL}))
    actual = probed(rows(result.directory))
    assert len(actual) == 1
    assert all(
        {"exp_grad_norm_mean", "exp_weight_delta", "exp_attn_entropy_mean", "exp_grad_noise"} <= set(row)
        for row in actual
    )
    assert (actual[0]["exp_grad_norm_rest"] > 0) == (kind == "classify"), "the head is outside the layers"
    name = "checkpoints/step-000003/weights.safetensors"
    expected, weights = load_file(plain.directory / name), load_file(result.directory / name)
    assert all(torch.equal(expected[key], weights[key]) for key in expected)


def test_probes_of_models_of_numeric_rows(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="whet")
    config = {
        "model": {"quality": "nano"},
        "data": {"train": "synth:quality:96"},
        "log": {"probes": ALL},
        "run": {
            "dir": str(tmp_path),
            "name": "q",
            "steps": 2,
            "batch_size": 32,
            "device": "cpu",
            "precision": "fp32",
        },
    }
    [actual] = probed(rows(whet.train(config).directory))
    assert {
        "exp_grad_norm_mean",
        "exp_weight_delta",
        "exp_effective_rank_mean",
        "exp_grad_noise",
    } <= actual.keys()
    assert not any(key.startswith(("exp_act", "exp_attn")) for key in actual)
    assert caplog.text.count("no activations and no attention") == 1


def test_grpo_has_no_probe_batches(tiny_directory, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="whet")
    reward = {"function": "length", "arguments": {"longest": 2, "margin": 20}}
    objective = {
        "kind": "grpo",
        "rewards": [reward],
        "group_size": 3,
        "max_new_tokens": 4,
        "reward_workers": 1,
    }
    data = {"train": "synth:sums:10", "valid": None}
    config = run_config(
        tiny_directory, tmp_path, objective=objective, data=data, run={"batch_size": 2, "steps": 2}, log={"probes": ALL}
    )  # fmt: skip
    [actual] = probed(rows(whet.train(config).directory))
    assert {key.split("_")[1] for key in actual} == {"weight", "effective"}
    assert caplog.text.count("probes: only curvature, weights and rank") == 1


def test_probes_of_a_mix_cover_all_parts(tiny_directory, tmp_path):
    parts = [
        {"name": "a", "objective": {"kind": "sft"}, "data": {"train": "synth:house:12", "max_length": 256}},
        {
            "name": "b",
            "objective": {"kind": "dpo"},
            "data": {"train": "synth:house-pairs:12", "max_length": 256},
        },
    ]
    config = run_config(
        tiny_directory,
        tmp_path,
        objective={"kind": "mix", "parts": parts},
        run={"steps": 2, "batch_size": 2},
        log={"probes": ALL},
    )
    del config["data"]
    [actual] = probed(rows(whet.train(config).directory))
    assert actual["exp_grad_norm_mean"] > 0
    assert "exp_attn_entropy_mean" in actual


def test_failing_probe_is_disabled_and_the_run_continues(tiny_directory, tmp_path, caplog, monkeypatch):
    def fail(self):
        raise torch.OutOfMemoryError("no more\nof it")

    monkeypatch.setattr(whet.EffectiveRank, "measure", fail)
    result = whet.train(run_config(tiny_directory, tmp_path, log={"probes": ALL}))
    assert result.steps == 4
    assert caplog.text.count("EffectiveRank is disabled, because it failed: OutOfMemoryError: no more") == 1
    assert all("exp_grad_norm_mean" in actual for actual in probed(rows(result.directory)))


def test_rows_with_probes_are_always_written(tiny_directory, tmp_path):
    result = whet.train(run_config(tiny_directory, tmp_path, log={"every": 3, "probes": {"weights": 2}}))
    assert [row["step"] for row in rows(result.directory) if "loss" in row] == [2, 3, 4]


def test_missing_initial_weights_are_logged(tiny_directory, tmp_path, caplog):
    """If probes are enabled on resume, the distance from the initial weights is unknown."""
    first = whet.train(run_config(tiny_directory, tmp_path), [StopAt(2)])
    text = (first.directory / "config.yaml").read_text()
    (first.directory / "config.yaml").write_text(
        text.replace("probes: null", "probes: {weights: 1, curvature: null}")
    )
    actual = probed(rows(whet.resume(first.directory).directory))
    assert [sorted(row) for row in actual] == [
        ["exp_weight_norm", "exp_weight_norm_layer", "exp_weight_norm_rest"]
    ] * 2
    assert "exp_weight_distance is not measured" in caplog.text


def test_probe_batches_do_not_depend_on_the_stream_position(tiny_directory):
    settings = StepSettings(batch_size=3, batch_tokens=None, micro_batch_tokens=64, pack=True)
    examples = random_examples(40, longest=30)
    stream = BatchStream(examples, settings, seed=0)
    before = stream.state()
    pieces = probe_batches(stream, SFT())
    assert stream.state() == before
    assert [len(piece) for piece in pieces] == [1, 1, 1, 1]
    fresh = BatchStream(examples, settings, seed=0)
    for [batch] in pieces:
        assert torch.equal(batch.tokens, next(fresh)[0].tokens)
    texts = documents_of(pieces[0], tokens=10)
    assert sum(text.numel() for text in texts) == 10
    assert torch.equal(texts[0][0], pieces[0][0].tokens[0, : texts[0].shape[1]])


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ({"probes": {"gradients": 0}}, "log.probes.gradients: Input should be greater than 0"),
        ({"probes": {"gradient": 5}}, "unknown key 'log.probes.gradient', did you mean 'gradients'?"),
        ({"samples": {"prompts": []}}, "log.samples.prompts"),
        ({"samples": {"prompts": [" "]}}, "a prompt is empty"),
        ({"samples": {}}, "log.samples.prompts is missing"),
        ({"sinks": ["tensorbord"]}, "log.sinks.0"),
        ({"sinks": ["wandb", "wandb"]}, "a sink is listed twice"),
    ],
)
def test_invalid_settings_are_errors(tiny_directory, tmp_path, log, message):
    with pytest.raises(ConfigError) as caught:
        validate_config(run_config(tiny_directory, tmp_path, log=log))
    assert message in str(caught.value)


def test_preserve_state_restores_everything(tiny):
    model, _ = tiny
    model.train()
    model.layers[1].eval()  # somebody's own choice
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with contextlib.suppress(ZeroDivisionError), preserve_state(model, model):
        assert not any(module.training for module in model.modules())
        torch.rand(5), random.random(), np.random.rand()
        raise ZeroDivisionError
    actual = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(actual[0], expected[0])
    assert actual[1:] == expected[1:]
    assert [module.training for module in model.modules()] == modes


def test_only_steps_with_a_measurement_prevent_prefetching(tiny_directory, tmp_path, monkeypatch):
    """The next step is prefetched before metrics are read, except at steps where a probe uses the model."""
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", run={"steps": 6}))
    seen, may = {}, Trainer._may_prefetch
    monkeypatch.setattr(Trainer, "_may_prefetch", lambda run, step: seen.setdefault(step, may(run, step)))
    monkeypatch.setattr(
        Trainer, "prefetches", property(lambda run: True, lambda run, value: None), raising=False
    )
    log = {
        "probes": {"gradients": 3, "weights": 3},
        "samples": {"prompts": ["Hello"], "every": 4, "max_tokens": 2},
    }
    result = whet.train(run_config(tiny_directory, tmp_path / "watched", run={"steps": 6}, log=log))
    assert seen == {1: True, 2: True, 3: False, 4: False, 5: True, 6: False}
    name = "checkpoints/step-000006/weights.safetensors"
    expected, weights = load_file(plain.directory / name), load_file(result.directory / name)
    assert all(torch.equal(expected[key], weights[key]) for key in expected)


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [
        ({"kind": "dpo"}, "pairs"),
        ({"kind": "mtp"}, "tokens"),
        ({"kind": "classify", "classes": ["even", "odd"], "probe": False}, "texts"),
    ],
)
def test_loss_units_are_those_of_the_first_term(objective, wanted, tiny_directory, tmp_path):
    kinds = {"dpo": "synth:house-pairs:16", "mtp": "synth:house:16", "classify": f"{tmp_path}/marked.jsonl"}
    lines = [{"input": f"text {i}", "label": ["even", "odd"][i % 2]} for i in range(16)]
    (tmp_path / "marked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"train": kinds[objective["kind"]], "valid": None, "max_length": 256}
    config = validate_config(run_config(tiny_directory, tmp_path, objective=objective, data=data))
    with open_assembly(config) as work:
        batch = next(work.stream)[0]
        counts = {"pairs": len(batch.origins) / 2, "tokens": batch.supervised, "texts": len(batch.origins)}
        assert loss_units(work.objective, [batch]) == pytest.approx(counts[wanted])
