"""The GRPO examples run, and grpo-sums reaches its documented accuracy."""

from pathlib import Path

import pytest

import whet
from whet.config.load_config import load_config

EXAMPLES = Path(__file__).parents[1] / "examples"


def train(name, directory, *overrides):
    return whet.train(load_config(EXAMPLES / f"{name}.yaml", [f"run.dir={directory}", *overrides]))


def test_sums_examples_run(tmp_path):
    train("grpo-sums-sft", tmp_path, "run.steps=2", "data.valid=synth:sums-valid:4")
    base = f"model={tmp_path}/grpo-sums-sft"
    result = train(
        "grpo-sums", tmp_path, base, "run.steps=2", "run.batch_size=2", "data.valid=synth:sums-valid:4"
    )
    assert result.steps == 2
    assert 0 <= result.metrics["exact_match"] <= 1


def test_house_examples_run(tmp_path, tiny_directory):
    small = ["run.device=cpu", "run.precision=fp32", "data.valid=synth:house-valid:2"]
    train("grpo-house-sft", tmp_path, f"model={tiny_directory}", "run.steps=2", *small)
    base = f"model={tmp_path}/grpo-house-sft"
    fewer = ["run.steps=2", "run.batch_size=2", "objective.group_size=2", "data.test=synth:house-test:2"]
    result = train("grpo-house", tmp_path, base, *fewer, *small)
    assert result.steps == 2
    assert result.summary["test"].keys() >= {
        "reward",
        "reward_exact_match",
        "reward_json_schema",
        "exact_match",
    }


@pytest.mark.slow
def test_grpo_raises_exact_match_on_sums(tmp_path):
    before = train("grpo-sums-sft", tmp_path)
    assert 0.35 < before.metrics["exact_match"] < 0.7
    after = train("grpo-sums", tmp_path, f"model={tmp_path}/grpo-sums-sft")
    print(f"{before.metrics['exact_match']:.3f} -> {after.metrics['exact_match']:.3f}")
    assert after.metrics["exact_match"] >= 0.9
