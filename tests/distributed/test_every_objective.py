"""Runs that stop and resume on more or fewer processes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import FalconConfig, FalconForCausalLM

import tiny
from distributed.checks import recorded_train
from distributed.harness import run_world

FULL, LORA = {"kind": "full"}, {"kind": "lora", "rank": 4}
PAIRS = {"train": "synth:house-pairs:12", "valid": "synth:house-pairs-valid:5", "max_length": 256}
SHORT = {"function": "length", "arguments": {"longest": 2, "margin": 20}}
GRPO = {"kind": "grpo", "group_size": 3, "max_new_tokens": 6, "reward_workers": 1, "beta": 0.1}
SUMS = {"train": "synth:sums:10", "valid": "synth:sums-valid:5", "test": "synth:sums-valid:3"}

CASES = {
    "lora": {
        "method": LORA,
        "eval": {"generate": True, "max_new_tokens": 4},
        "log": {"samples": {"prompts": ["Who?"], "every": 2, "max_tokens": 4}},
    },
    "qlora": {"method": {"kind": "qlora", "rank": 4}},
    "recomputed": {"method": FULL, "run": {"grad_checkpoint": True}, "data": {"pack": False}},
    "dpo-copy": {"method": FULL, "objective": {"kind": "dpo", "reference": "online"}, "data": PAIRS},
    "dpo-adapters-off": {"method": LORA, "objective": {"kind": "dpo", "reference": "online"}, "data": PAIRS},
    "dpo-named": {
        "method": LORA,
        "objective": {"kind": "dpo", "reference": "online", "reference_model": ""},
        "data": PAIRS,
    },
    "dpo-named-stored": {
        "method": FULL,
        "objective": {"kind": "dpo", "reference_model": ""},
        "data": PAIRS,
    },
    "dpo-stored": {"method": LORA, "objective": {"kind": "dpo"}, "data": PAIRS},
    "distill": {"method": FULL, "objective": {"kind": "distill", "hidden": {"layers": {1: 1, 2: 2}}}},
    "mtp": {"method": FULL, "objective": {"kind": "mtp", "n_predict": 2}},
    "classify": {"method": LORA, "objective": {"kind": "classify", "calibrate": True, "probe": False}},
    "unused-head": {"method": FULL, "objective": {"kind": "classify", "probe": False, "bias": True}},
    "grpo": {"method": FULL, "objective": GRPO, "data": SUMS, "run": {"batch_size": 2}},
    "grpo-named": {
        "method": FULL,
        "objective": {**GRPO, "reference_model": ""},
        "data": SUMS,
        "run": {"batch_size": 2},
    },
    "mix": {"method": LORA, "objective": {"kind": "mix"}},
    "sgd": {"method": FULL, "optim": {"name": "sgd", "momentum": 0.9, "lr": 1e-2}},
    "experts": {"method": FULL, "experts": {"load_balancing": 0.01, "z_loss": 0.001, "bias_rate": 0.01}},
    "bridge": {"method": {**LORA, "targets": ["query_key_value"]}},
    "pissa": {"method": {**LORA, "variant": "pissa"}},
    "dora": {"method": {**LORA, "variant": "dora"}},
    "compiled": {"method": FULL, "run": {"compile": True, "grad_checkpoint": True}},
    "lion": {"method": FULL, "optim": {"name": "lion", "lr": 1e-4}},
}
QUICK = {"ddp": ("lora", "mix"), "fsdp": ("lora", "qlora", "mtp", "mix")}
SLOW = [(kind, name) for kind in QUICK for name in CASES if name not in QUICK[kind]]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A teacher wider than the student, so that hidden states are matched through a trained projection."""
    directory = tmp_path_factory.mktemp("models") / "teacher"
    tiny.write_tiny_model(directory, hidden_size=48)
    return directory


def config(name, kind, directory, tiny_directory, teacher):
    sections = {key: dict(value) for key, value in CASES[name].items()}
    objective = sections.get("objective", {})
    if "reference_model" in objective:
        objective["reference_model"] = str(teacher)
    if objective.get("kind") == "distill":
        objective["teacher"] = str(teacher)
    elif objective.get("kind") == "grpo":
        objective["rewards"] = [SHORT]
    elif objective.get("kind") == "classify":
        objective["classes"] = ["a", "b"]
        path = directory / "texts.jsonl"
        directory.mkdir(exist_ok=True, parents=True)
        texts = [{"text": f"{'yes ' * (n % 5)}{n}", "label": "ab"[n % 2]} for n in range(24)]
        path.write_text("".join(json.dumps(text) + "\n" for text in texts))
        sections["data"] = {"train": str(path), "valid": str(path), "max_length": 64}
    elif objective.get("kind") == "mix":
        objective["parts"] = [
            {
                "objective": {"kind": "sft"},
                "data": {"train": "synth:house:12", "valid": "synth:house-valid:4"},
            },
            {"objective": {"kind": "dpo", "reference": "online"}, "data": PAIRS, "batch_size": 3},
        ]
        sections["data"] = None
    if name == "experts":
        tiny_directory = {"preset": "nano-moe", "d_model": 32, "heads": 2, "width": 16, "layers": 2}
        tiny_directory |= {"experts": 4, "balance_bias": True}
        topics = {"train": "synth:python-topics", "valid": "synth:python-topics-valid"}
        sections["data"] = {**topics, "max_length": 65, "too_long": "split"}
        sections["eval"] = {"batches": 3}
    elif name == "unused-head":  # no rank has a gradient of lm_head, so weight decay does not apply
        tiny_directory = directory / "untied"
        tiny.write_tiny_model(tiny_directory, tie_word_embeddings=False)
        sections["optim"] = {"weight_decay": 0.5}
    elif name == "bridge":
        tiny_directory = falcon(directory / "falcon")
    run = {"steps": 4, "batch_size": 5, "micro_batch_tokens": 320, "name": name, **sections.pop("run", {})}
    sections["optim"] = {"lr": 1e-3, "clip": 1.0, "warmup": 1, **sections.get("optim", {})}
    settings = tiny.run_config(tiny_directory, directory / kind, **sections, run=run)
    if name == "experts":
        settings["model"] = tiny_directory
    return settings | {"parallel": {"kind": kind}}


def falcon(directory):
    """Write a model that runs through transformers, with tied embeddings, and return its directory."""
    if not directory.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        FalconForCausalLM(FalconConfig(vocab_size=260, eos_token_id=256, **sizes)).save_pretrained(directory)
        tiny.write_tokenizer(directory)
    return directory


def final(directory, kind, name):
    path = directory / kind / "runs" / name / "final"
    file = path / "adapter_model.safetensors"
    return load_file(file if file.is_file() else path / "model.safetensors")


def distance(a, b):
    """Return the relative L2 distance of all tensors."""
    assert a.keys() == b.keys()
    squares = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((squares / sum(tensor.double().square().sum() for tensor in a.values())).sqrt())


def compare(names, kind, directory, tiny_directory, teacher):
    configs = {name: config(name, kind, directory, tiny_directory, teacher) for name in names}
    ranks = run_world(2, "train_and_record", out=directory / "out", timeout=500, configs=configs)
    for name in names:
        single = recorded_train(config(name, "none", directory, tiny_directory, teacher)).results()
        error = distance(final(directory, "none", name), final(directory, kind, name))
        print(f"{kind} {name}: relative error of the weights: {error:.2e}")
        assert error < 1e-6, name
        samples, parallel_samples = (
            directory / each / "runs" / name / "samples.jsonl" for each in ("none", kind)
        )
        if samples.exists() and not name.startswith("grpo"):
            assert samples.read_text() == parallel_samples.read_text()
        for each in ranks:
            # the terms of the GRPO loss nearly cancel: the difference has the rounding error of values around 1
            rounding = 1e-7 if name.startswith("grpo") else None
            assert each[name]["losses"] == pytest.approx(single["losses"], rel=1e-5, abs=rounding), name
            assert len(each[name]["evaluations"]) == len(single["evaluations"])
            # a margin is a difference of log-ratios, which are large against another model
            rounding = 1e-5 if "named" in name else 1e-6
            for metrics, expected in zip(each[name]["evaluations"], single["evaluations"], strict=True):
                assert metrics == pytest.approx(expected, rel=1e-4, abs=rounding), name


@pytest.mark.parametrize("kind", QUICK)
def test_two_processes_equal_one(tiny_directory, teacher, tmp_path, kind):
    compare(QUICK[kind], kind, tmp_path, tiny_directory, teacher)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), SLOW)
def test_two_processes_equal_one_with(tiny_directory, teacher, tmp_path, kind, name):
    compare([name], kind, tmp_path, tiny_directory, teacher)


@pytest.mark.slow
def test_probes_of_replicated_run_equal_one_process(tiny_directory, tmp_path):
    rows = {}
    for kind in ("none", "ddp"):
        probes = dict.fromkeys(("gradients", "weights", "activations", "attention", "noise", "rank"), 2)
        sections = {"method": FULL, "log": {"probes": probes}, "run": {"steps": 4, "micro_batch_tokens": 256}}
        settings = tiny.run_config(tiny_directory, tmp_path / kind, **sections) | {"parallel": {"kind": kind}}
        if kind == "none":
            recorded_train(settings)
        else:
            run_world(2, "train_and_record", out=tmp_path / "out", configs={"ddp": settings})
        lines = (tmp_path / kind / "runs" / "test" / "metrics.jsonl").read_text().splitlines()
        rows[kind] = [row for row in map(json.loads, lines) if "probe_s" in row]
    assert len(rows["none"]) == len(rows["ddp"]) == 2
    for a, two in zip(rows["none"], rows["ddp"], strict=True):
        assert a.keys() == two.keys()
        for name in ("exp_grad_norm_mean", "exp_effective_rank_mean", "exp_attn_entropy_mean"):
            assert two[name] == pytest.approx(a[name], rel=1e-5)
