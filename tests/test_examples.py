"""Every example runs: configs are valid, and the demo does what it says, on a model small enough to test with."""

import importlib.util
import json
import math
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml

import whet
from tiny import run_config
from whet.config.load_config import load_config
from whet.data.synthetic.generators import generate
from whet.recipes.quality.ledgers import create_ledgers
from whet.recipes.quality.tabular_model import load_quality

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_configs_are_valid(path):
    load_config(path)


def test_the_demo_runs_twice_and_says_how_to_go_on(tiny_directory, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    config = run_config(tiny_directory, tmp_path, run={"steps": 2, "name": "demo"})
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(demo, "CONFIG", tmp_path / "demo.yaml")
    monkeypatch.setattr(demo, "TEST", "synth:house-test:10")
    for directory in ("demo", "demo-2"):
        demo.main()
        said = capsys.readouterr().out
        assert said.count("exact match on 10 test commands") == 2
        assert f"whet chat {tmp_path}/runs/{directory}" in said
        assert (tmp_path / "runs" / directory / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["house-styles", "dpo-house", "distrust", "distill-nano", "mix-sft-dpo"])
def test_the_objective_examples_run(name, tmp_path, tiny_directory):
    """On a tiny model, two steps each."""
    config = load_config(EXAMPLES / f"{name}.yaml").model_dump(mode="json", by_alias=True)
    if name == "distill-nano":
        config["model"] |= {"tokenizer": str(tiny_directory), "vocab_size": 260}
        config["objective"]["teacher"] = str(tiny_directory)
    else:
        config["model"] = str(tiny_directory)
    config["run"] |= {"dir": str(tmp_path), "steps": 2, "device": "cpu", "precision": "fp32"}
    assert whet.train(config).steps == 2


def test_the_quality_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create_ledgers(tmp_path / "ledgers", 60)
    for name in ("quality-nano", "quality-ledgers"):
        overrides = ["run.steps=2", "run.device=cpu"]
        if name == "quality-nano":
            overrides += ["data.train=synth:quality:64", "data.valid=synth:quality-valid:16"]
        result = whet.train(load_config(EXAMPLES / f"{name}.yaml", overrides))
        assert result.steps == 2
        assert load_quality(result.directory).spec.size == "nano"


def write_corpus(directory):
    directory.mkdir()
    for split in ("train", "valid"):
        lines = [
            f"{split} {n}: the quick brown fox number {n * 7} jumps over the lazy dog." for n in range(400)
        ]
        (directory / f"{split}.txt").write_text("\n".join(lines))


def test_the_pretraining_examples_run(tmp_path, monkeypatch):
    """Their own text, tokenizer and shape where those are small enough, a few steps of it."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    small = [
        "run.steps=2",
        "run.batch_tokens=512",
        "run.micro_batch_tokens=512",
        "run.device=cpu",
        "eval.batches=2",
    ]
    smaller = [
        "model.layers=2",
        "model.d_model=48",
        "model.heads=4",
        "model.tokenizer=bpe:300",
        "data.max_length=65",
    ]
    for name, overrides in (
        ("pretrain-nano", small),
        ("mtp-nano", small),
        ("pretrain-nano-moe", small),
        ("pretrain-gpt2-small", [*small, *smaller, "run.precision=fp32", "run.compile=false"]),
    ):
        result = whet.train(load_config(EXAMPLES / f"{name}.yaml", overrides))
        assert result.steps == 2
        assert 1 < result.metrics["eval_bits_per_byte"] < 9
        model, tokenizer = whet.load(result.directory)
        assert isinstance(whet.generate(model, tokenizer, "The", max_tokens=3), str)


def test_the_probes_example_runs(tmp_path):
    """Its probes and samples, more often than it says and for fewer steps."""
    often = [
        f"log.probes.{name}=2"
        for name in ("gradients", "weights", "activations", "attention", "noise", "rank")
    ]
    small = ["run.steps=4", "run.batch_tokens=512", "run.device=cpu", "eval.every=2", "eval.batches=1"]
    config = load_config(
        EXAMPLES / "probes-nano.yaml", [*small, *often, f"run.dir={tmp_path}", "log.samples.max_tokens=4"]
    )
    result = whet.train(config)
    found = [row for row in result.history if "probe_s" in row]
    assert [row["step"] for row in found] == [2, 4]
    assert all(len(row["exp_grad_norm_layer"]) == 4 for row in found)
    samples = [json.loads(line) for line in (result.directory / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [0, 0, 4, 4]


def witten_bell(train, test, order):
    """Bits per byte of an n-gram model with contexts of up to `order` bytes, interpolated by Witten and Bell's rule."""
    counts = [defaultdict(Counter) for _ in range(order + 1)]
    for place, byte in enumerate(train):
        for size in range(min(order, place) + 1):
            counts[size][train[place - size : place]][byte] += 1
    both, bits = train[-order:] + test, 0.0
    for place in range(order, len(both)):
        chance = 1 / 256
        for size in range(order + 1):
            seen = counts[size].get(both[place - size : place])
            if seen is None:
                break
            total, kinds = sum(seen.values()), len(seen)
            chance = (seen[both[place]] + kinds * chance) / (total + kinds)
        bits -= math.log2(chance)
    return bits / len(test)


@pytest.mark.slow
def test_the_nano_model_beats_an_n_gram_model_of_the_same_text(tmp_path):
    started = time.perf_counter()
    result = whet.train(load_config(EXAMPLES / "pretrain-nano.yaml", [f"run.dir={tmp_path}"]))
    seconds = time.perf_counter() - started
    train, test = (generate(f"synth:python-topics{part}")[0]["text"].encode() for part in ("", "-valid"))
    rival = min(witten_bell(train, test, order) for order in (4, 5))
    found = result.metrics["eval_bits_per_byte"]
    print(f"nano {found:.3f} bits per byte in {seconds:.0f} s, n-gram {rival:.3f}")
    assert found < rival - 0.05
