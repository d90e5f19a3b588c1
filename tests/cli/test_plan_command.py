"""whet plan on the command line: text and JSON output, and errors."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tiny import run_config, write_tiny_model
from whet.cli.app import app
from whet.config.load_config import load_config
from whet.errors import WhetError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def config(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(run_config(tmp_path / "tiny", tmp_path)))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_plan_shows_all_components(config):
    result = run(config, "--device", "a100")
    assert result.exit_code == 0, result.output
    for name in ("model", "trainable", "device", "FLOPs", "steps", "memory", "fits", "time"):
        assert re.search(rf"^{name} ", result.output, re.MULTILINE), name
    for part in (
        "weights",
        "adapters",
        "optimizer state",
        "gradients",
        "activations",
        "loss chunks",
        "generation",
    ):
        assert part in result.output
    assert "with run.grad_checkpoint" in result.output
    assert not (config.parent / "runs").exists()


def test_plan_json_is_consistent(config):
    result = json.loads(run(config, "--device", "a100", "--json", "method.rank=2").stdout)
    parameters = result["parameters"]
    assert parameters["total"] == sum(n for part, n in parameters.items() if part not in ("total", "trained"))
    assert result["flops_per_token"]["computed"] > 4 * (parameters["attention"] + parameters["feedforward"])
    assert result["bytes"]["adapters"] == 4 * parameters["trained"]
    assert result["bytes"]["peak"] > result["bytes"]["weights"]
    assert result["seconds"] == pytest.approx(result["steps"] * result["step_s"])


def test_plan_counts_steps_if_records_are_available(config):
    """As `whet train` counts them: 24 records, four to a step, twice."""
    result = json.loads(run(config, "--json", "run.steps=null", "run.epochs=2").stdout)
    assert result["steps"] == 12
    assert 4 < result["tokens_a_step"] < 4 * 255
    assert load_config(config, ["run.steps=null", "run.epochs=2"]).run.steps is None


def test_plan_works_without_records(config):
    result = run(config, "data.train=missing.jsonl", "--json")
    assert json.loads(result.stdout)["steps"] == 4


def test_plan_for_a_cluster(config):
    result = run(config, "--device", "h100", "--gpus", "64", "parallel.kind=fsdp")
    assert result.exit_code == 0, result.output
    assert "64 x h100" in result.output
    assert "reduction of gradients" in result.output
    assert "peak per device" in result.output


def test_plan_405b_example():
    arguments = ["--device", "h100", "--gpus", "1024", "parallel.tensor=8", "--json"]
    result = json.loads(run(EXAMPLES / "plan-405b.yaml", *arguments).stdout)
    assert result["parameters"]["total"] == 405_853_388_800
    assert result["bytes"]["weights"] == pytest.approx(4 * 405_853_388_800 / 1024, rel=1e-6)
    assert result["largest_micro_batch_tokens"] == 8191
    assert 0.8 < result["efficiency"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h1000"], "unknown device 'h1000'"),
        (["--gpus", "0"], "--gpus 0: it must be at least 1"),
        (["--utilisation", "1.5"], "--utilisation 1.5: must be above 0 and at most 1"),
        (["--gpus", "2"], "2 processes but parallel.kind is none"),
        (["--network", "-1", "--gpus", "2", "parallel.kind=ddp"], "--network -1: it must be positive"),
        (["--network", "nan", "--gpus", "2", "parallel.kind=ddp"], "--network nan: it must be positive"),
        (["model=nowhere/at-all"], "no config.json of 'nowhere/at-all' on this machine"),
        (["method.targets=nonsense"], "adapter target 'nonsense' matches no linear layer"),
    ],
)
def test_invalid_input_prints_one_message(config, arguments, message):
    result = run(config, *arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, WhetError)
    assert message in str(result.exception)
