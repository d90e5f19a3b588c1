"""whet plan on the command line: lines for people, JSON for programs, one message for mistakes."""

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


def test_every_part_is_shown(config):
    found = run(config, "--device", "a100")
    assert found.exit_code == 0, found.output
    for name in ("model", "trains", "device", "FLOPs", "steps", "memory", "fits", "time"):
        assert re.search(rf"^{name} ", found.output, re.MULTILINE), name
    for part in (
        "weights",
        "adapters",
        "optimizer state",
        "gradients",
        "activations",
        "loss chunks",
        "generating",
    ):
        assert part in found.output
    assert "with run.grad_checkpoint" in found.output
    assert not (config.parent / "runs").exists()


def test_json_adds_up(config):
    found = json.loads(run(config, "--device", "a100", "--json", "method.rank=2").stdout)
    parameters = found["parameters"]
    assert parameters["total"] == sum(n for part, n in parameters.items() if part not in ("total", "trained"))
    assert found["flops_per_token"]["computed"] > 4 * (parameters["attention"] + parameters["feedforward"])
    assert found["bytes"]["adapters"] == 4 * parameters["trained"]
    assert found["bytes"]["peak"] > found["bytes"]["weights"]
    assert found["seconds"] == pytest.approx(found["steps"] * found["step_s"])


def test_steps_are_counted_where_the_records_are_at_hand(config):
    """As `whet train` counts them: 24 records, four to a step, twice."""
    found = json.loads(run(config, "--json", "run.steps=null", "run.epochs=2").stdout)
    assert found["steps"] == 12
    assert 4 < found["tokens_a_step"] < 4 * 255
    assert load_config(config, ["run.steps=null", "run.epochs=2"]).run.steps is None


def test_records_that_are_not_there_are_no_obstacle(config):
    found = run(config, "data.train=missing.jsonl", "--json")
    assert json.loads(found.stdout)["steps"] == 4


def test_a_cluster_is_planned(config):
    found = run(config, "--device", "h100", "--gpus", "64", "parallel.kind=fsdp")
    assert found.exit_code == 0, found.output
    assert "64 x h100" in found.output
    assert "gradients added up" in found.output
    assert "on each device" in found.output


def test_the_example_of_405_billion_parameters():
    arguments = ["--device", "h100", "--gpus", "1024", "parallel.tensor=8", "--json"]
    found = json.loads(run(EXAMPLES / "plan-405b.yaml", *arguments).stdout)
    assert found["parameters"]["total"] == 405_853_388_800
    assert found["bytes"]["weights"] == pytest.approx(4 * 405_853_388_800 / 1024, rel=1e-6)
    assert found["largest_micro_batch_tokens"] == 8191
    assert 0.8 < found["efficiency"] < 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "h1000"], "unknown device 'h1000'"),
        (["--gpus", "0"], "--gpus 0: there must be at least one"),
        (["--utilisation", "1.5"], "--utilisation 1.5: it is a share"),
        (["--gpus", "2"], "2 processes but parallel.kind is none"),
        (["--network", "-1", "--gpus", "2", "parallel.kind=ddp"], "--network -1: it must be positive"),
        (["--network", "nan", "--gpus", "2", "parallel.kind=ddp"], "--network nan: it must be positive"),
        (["model=nowhere/at-all"], "no config.json of 'nowhere/at-all' on this machine"),
        (["method.targets=nonsense"], "adapter target 'nonsense' matches no linear layer"),
    ],
)
def test_mistakes_get_one_message(config, arguments, said):
    found = run(config, *arguments)
    assert found.exit_code != 0
    assert isinstance(found.exception, WhetError)
    assert said in str(found.exception)
