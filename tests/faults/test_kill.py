"""A killed and resumed run is bit-identical to an uninterrupted one."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.harness import Case, Fault, assert_same_result, boundaries, distinct_boundaries
from tiny import run_config

# ten examples in steps of four: three steps per epoch, so most of each run is after the first epoch
KINDS = {
    "lora-packed": {"method": {"kind": "lora", "rank": 2, "dropout": 0.1}, "data": {"pack": True}},
    "lora-padded": {"method": {"kind": "lora", "rank": 2}, "data": {"pack": False}},
    "full-packed": {"method": {"kind": "full"}, "data": {"pack": True}, "optim": {"lr": 1e-3}},
    "full-padded": {"method": {"kind": "full"}, "data": {"pack": False}, "optim": {"lr": 1e-3}},
}


def case(kind, tiny_directory, directory, **sections):
    keys = {
        **KINDS[kind],
        "checkpoint": {"every": 2, "keep": 2},
        "eval": {"every": 3},
        "run": {"steps": 8, "batch_size": 4, "micro_batch_tokens": 300},  # several micro-batches per step
    }
    keys["data"] = {"train": "synth:house:10", "valid": "synth:house-valid:3", **keys["data"]}
    for name, values in sections.items():
        keys[name] = {**keys.get(name, {}), **values}
    return Case(directory, run_config(tiny_directory, directory, **keys))


@pytest.fixture(scope="module")
def uninterrupted_run(tiny_directory, tmp_path_factory):
    """Results and file operations of an uninterrupted run of each kind."""
    cache = {}

    def get(kind):
        if kind not in cache:
            uninterrupted = case(kind, tiny_directory, tmp_path_factory.mktemp(kind))
            operations = boundaries(uninterrupted)
            cache[kind] = uninterrupted.result(), operations
        return cache[kind]

    return get


def die_and_finish(kind, boundary, tiny_directory, directory, expected):
    run = case(kind, tiny_directory, directory)
    assert run.run_once(Fault(kill_at=boundary)) == -9, run.output_text()
    run.finish()
    assert_same_result(run.result(), expected)
    hidden = [path.name for path in run.run.rglob(".*") if path.name != ".lock"]
    assert not hidden, "incomplete files are removed"
    assert not list(run.run.parent.glob(".*"))


def test_uninterrupted_run_is_reproducible(uninterrupted_run, tiny_directory, tmp_path):
    """The other tests of this module rely on it."""
    repeated = case("lora-packed", tiny_directory, tmp_path)
    repeated.finish()
    assert_same_result(repeated.result(), uninterrupted_run("lora-packed")[0])


@pytest.mark.parametrize(
    ("operation", "location"),
    [
        ("write", "step-000004/weights.safetensors"),
        ("fsync", "step-000004/MANIFEST.json"),
        ("rename", "checkpoints/step-000004"),
        ("rename", "test/final"),
        ("write", "final/README.md"),
        ("append", "test/metrics.jsonl"),
    ],
)
def test_killed_at_a_file_operation(
    uninterrupted_run, tiny_directory, tmp_path, operation, location, record_property
):
    expected, operations = uninterrupted_run("lora-packed")
    at = [b for b in operations if (b.operation, b.location) == (operation, location)][-1]
    record_property("fault: SIGKILL at a file operation", 1)
    die_and_finish("lora-packed", at, tiny_directory, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora-packed", "full-padded"])
def test_killed_at_every_file_operation(uninterrupted_run, tiny_directory, tmp_path, kind, record_property):
    expected, operations = uninterrupted_run(kind)
    chosen = distinct_boundaries(operations)
    assert len(chosen) > 60
    chosen = chosen if kind == "lora-packed" else chosen[::3]
    record_property("fault: SIGKILL at a file operation", len(chosen))
    for number, boundary in enumerate(chosen):
        die_and_finish(kind, boundary, tiny_directory, tmp_path / str(number), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_repeatedly_at_random_moments(tiny_directory, tmp_path, kind, record_property):
    """Each process is killed after a random time, and the next one resumes the run."""
    sections = {"run": {"steps": 60}, "eval": {"every": 7}}  # long enough to be killed
    uninterrupted = case(kind, tiny_directory, tmp_path / "uninterrupted", **sections)
    uninterrupted.finish()
    rng = random.Random(kind)
    kills = 0
    for number in range(3):
        run = case(kind, tiny_directory, tmp_path / str(number), **sections)
        kills += run.kill_after(rng.uniform(0.0, 1.0), after_first_row=False)
        for _ in range(6):
            kills += run.kill_after(rng.uniform(0.0, 0.3), after_first_row=True)
        run.finish()
        assert_same_result(run.result(), uninterrupted.result())
    record_property("fault: SIGKILL at a random moment", kills)
    assert kills >= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_saving_every_step(tiny_directory, tmp_path, kind, record_property):
    """Save faster than the disk can write, evaluate at every step, and die in the third epoch."""
    sections = {"checkpoint": {"every": 1}, "eval": {"every": 1}}
    uninterrupted = case(kind, tiny_directory, tmp_path / "uninterrupted", **sections)
    operations = [b for b in boundaries(uninterrupted) if b.location.startswith("step-000007/")]
    record_property("fault: SIGKILL at a file operation", 4)
    for number, boundary in enumerate(random.Random(kind).sample(distinct_boundaries(operations), 4)):
        run = case(kind, tiny_directory, tmp_path / str(number), **sections)
        assert run.run_once(Fault(kill_at=boundary)) == -9
        run.finish()
        assert_same_result(run.result(), uninterrupted.result())


@pytest.mark.slow
def test_killed_installed_command(tiny_directory, tmp_path, record_property):
    """Kill the installed command three times, and resume it."""
    sections = {"run": {"steps": 60}}
    uninterrupted = case("lora-packed", tiny_directory, tmp_path / "uninterrupted", **sections)
    uninterrupted.finish()
    run = case("lora-packed", tiny_directory, tmp_path / "parts", **sections)
    whet_command = str(Path(sys.executable).with_name("whet"))
    metrics = run.run / "metrics.jsonl"
    record_property("fault: SIGKILL at a random moment", 3)
    for step in (5, 20, 40):
        with run.output.open("a") as output:
            process = subprocess.Popen([whet_command, *map(str, run.command())], stderr=output, stdout=output)
        try:
            while not (metrics.is_file() and f'"step": {step},' in metrics.read_text()):
                assert process.poll() is None, run.output_text()
                time.sleep(0.001)
        finally:
            process.kill()
            process.wait()
    run.finish()
    assert_same_result(run.result(), uninterrupted.result())
