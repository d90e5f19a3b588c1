"""Every example works: configs are valid and short runs on a tiny model succeed."""

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


CONFIGS = sorted(path for path in EXAMPLES.glob("*.yaml") if not path.stem.endswith("-task"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_are_valid(path):
    load_config(path)


def test_demo_runs_twice_and_suggests_next_steps(tiny_directory, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    config = run_config(tiny_directory, tmp_path, run={"steps": 2, "name": "demo"})
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(demo, "CONFIG", tmp_path / "demo.yaml")
    monkeypatch.setattr(demo, "TEST", "synth:house-test:10")
    for directory in ("demo", "demo-2"):
        demo.main()
        output = capsys.readouterr().out
        assert output.count("exact match on 10 test commands") == 2
        assert f"whet chat {tmp_path}/runs/{directory}" in output
        assert (tmp_path / "runs" / directory / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["house-styles", "dpo-house", "distrust", "distill-nano", "mix-sft-dpo"])
def test_objective_examples_run(name, tmp_path, tiny_directory):
    """Run two steps of each on a tiny model."""
    config = load_config(EXAMPLES / f"{name}.yaml").model_dump(mode="json", by_alias=True)
    if name == "distill-nano":
        config["model"] |= {"tokenizer": str(tiny_directory), "vocab_size": 260}
        config["objective"]["teacher"] = str(tiny_directory)
    else:
        config["model"] = str(tiny_directory)
    config["run"] |= {"dir": str(tmp_path), "steps": 2, "device": "cpu", "precision": "fp32"}
    assert whet.train(config).steps == 2


def test_quality_examples_run(tmp_path, monkeypatch):
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


def test_pretraining_examples_run(tmp_path, monkeypatch):
    """Run a few steps of each, with smaller models and data if needed."""
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


def test_probes_example_runs(tmp_path):
    """Run its probes and samples more often and for fewer steps."""
    intervals = [
        f"log.probes.{name}=2"
        for name in ("gradients", "weights", "activations", "attention", "noise", "rank")
    ]
    small = ["run.steps=4", "run.batch_tokens=512", "run.device=cpu", "eval.every=2", "eval.batches=1"]
    config = load_config(
        EXAMPLES / "probes-nano.yaml", [*small, *intervals, f"run.dir={tmp_path}", "log.samples.max_tokens=4"]
    )
    result = whet.train(config)
    probed = [row for row in result.history if "probe_s" in row]
    assert [row["step"] for row in probed] == [2, 4]
    assert all(len(row["exp_grad_norm_layer"]) == 4 for row in probed)
    samples = [json.loads(line) for line in (result.directory / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [0, 0, 4, 4]


def witten_bell(train, test, order):
    """Return the bits per byte of an n-gram model with up to `order` bytes of context and Witten-Bell smoothing."""
    counts = [defaultdict(Counter) for _ in range(order + 1)]
    for position, byte in enumerate(train):
        for size in range(min(order, position) + 1):
            counts[size][train[position - size : position]][byte] += 1
    text, bits = train[-order:] + test, 0.0
    for position in range(order, len(text)):
        probability = 1 / 256
        for size in range(order + 1):
            following = counts[size].get(text[position - size : position])
            if following is None:
                break
            total, distinct = sum(following.values()), len(following)
            probability = (following[text[position]] + distinct * probability) / (total + distinct)
        bits -= math.log2(probability)
    return bits / len(test)


@pytest.mark.slow
def test_nano_model_beats_an_n_gram_model(tmp_path):
    started = time.perf_counter()
    result = whet.train(load_config(EXAMPLES / "pretrain-nano.yaml", [f"run.dir={tmp_path}"]))
    seconds = time.perf_counter() - started
    train, test = (generate(f"synth:python-topics{part}")[0]["text"].encode() for part in ("", "-valid"))
    baseline = min(witten_bell(train, test, order) for order in (4, 5))
    bits_per_byte = result.metrics["eval_bits_per_byte"]
    print(f"nano {bits_per_byte:.3f} bits per byte in {seconds:.0f} s, n-gram {baseline:.3f}")
    assert bits_per_byte < baseline - 0.05
