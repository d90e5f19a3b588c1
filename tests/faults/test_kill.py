"""A run that is killed and resumed is, bit for bit, the run that was never killed."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.harness import Case, Fault, boundaries, interesting, same
from tiny import run_config

# ten examples in steps of four: three steps an epoch, so most of each run is in the second epoch and later
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
        "run": {"steps": 8, "batch_size": 4, "micro_batch_tokens": 300},  # several micro-batches a step
    }
    keys["data"] = {"train": "synth:house:10", "valid": "synth:house-valid:3", **keys["data"]}
    for name, values in sections.items():
        keys[name] = {**keys.get(name, {}), **values}
    return Case(directory, run_config(tiny_directory, directory, **keys))


@pytest.fixture(scope="module")
def whole(tiny_directory, tmp_path_factory):
    """Uninterrupted runs, their results and every file operation they made, one of each kind."""
    made = {}

    def of(kind):
        if kind not in made:
            uninterrupted = case(kind, tiny_directory, tmp_path_factory.mktemp(kind))
            found = boundaries(uninterrupted)
            made[kind] = uninterrupted.result(), found
        return made[kind]

    return of


def die_and_finish(kind, boundary, tiny_directory, directory, expected):
    run = case(kind, tiny_directory, directory)
    assert run.go(Fault(kill_at=boundary)) == -9, run.said()
    run.finish()
    same(run.result(), expected)
    hidden = [path.name for path in run.run.rglob(".*") if path.name != ".lock"]
    assert not hidden, "what was half-written is gone"
    assert not list(run.run.parent.glob(".*"))


def test_an_uninterrupted_run_repeats_itself(whole, tiny_directory, tmp_path):
    """What the other tests compare with would be worthless otherwise."""
    again = case("lora-packed", tiny_directory, tmp_path)
    again.finish()
    same(again.result(), whole("lora-packed")[0])


@pytest.mark.parametrize(
    ("operation", "place"),
    [
        ("write", "step-000004/weights.safetensors"),
        ("fsync", "step-000004/MANIFEST.json"),
        ("rename", "checkpoints/step-000004"),
        ("rename", "test/final"),
        ("append", "test/metrics.jsonl"),
    ],
)
def test_killed_at_a_file_operation(whole, tiny_directory, tmp_path, operation, place, record_property):
    expected, found = whole("lora-packed")
    at = [b for b in found if (b.operation, b.place) == (operation, place)][-1]
    record_property("fault: SIGKILL at a file operation", 1)
    die_and_finish("lora-packed", at, tiny_directory, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora-packed", "full-padded"])
def test_killed_at_every_file_operation(whole, tiny_directory, tmp_path, kind, record_property):
    expected, found = whole(kind)
    chosen = interesting(found)
    assert len(chosen) > 60
    chosen = chosen if kind == "lora-packed" else chosen[::3]
    record_property("fault: SIGKILL at a file operation", len(chosen))
    for number, boundary in enumerate(chosen):
        die_and_finish(kind, boundary, tiny_directory, tmp_path / str(number), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again_at_random_moments(tiny_directory, tmp_path, kind, record_property):
    """Each process lives for a random time, and each resume goes on from wherever the one before died."""
    sections = {"run": {"steps": 60}, "eval": {"every": 7}}  # long enough to be hit
    uninterrupted = case(kind, tiny_directory, tmp_path / "whole", **sections)
    uninterrupted.finish()
    rng = random.Random(kind)
    kills = 0
    for number in range(3):
        run = case(kind, tiny_directory, tmp_path / str(number), **sections)
        kills += run.kill_after(rng.uniform(0.0, 1.0), begun=False)
        for _ in range(6):
            kills += run.kill_after(rng.uniform(0.0, 0.3), begun=True)
        run.finish()
        same(run.result(), uninterrupted.result())
    record_property("fault: SIGKILL at a random moment", kills)
    assert kills >= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_saving_every_step(tiny_directory, tmp_path, kind, record_property):
    """Saves that come faster than they can be written, evaluated at every step, dying in the third epoch."""
    sections = {"checkpoint": {"every": 1}, "eval": {"every": 1}}
    uninterrupted = case(kind, tiny_directory, tmp_path / "whole", **sections)
    found = [b for b in boundaries(uninterrupted) if b.place.startswith("step-000007/")]
    record_property("fault: SIGKILL at a file operation", 4)
    for number, boundary in enumerate(random.Random(kind).sample(interesting(found), 4)):
        run = case(kind, tiny_directory, tmp_path / str(number), **sections)
        assert run.go(Fault(kill_at=boundary)) == -9
        run.finish()
        same(run.result(), uninterrupted.result())


@pytest.mark.slow
def test_killed_as_people_start_it(tiny_directory, tmp_path, record_property):
    """The installed command, killed three times on its way and resumed."""
    sections = {"run": {"steps": 60}}
    uninterrupted = case("lora-packed", tiny_directory, tmp_path / "whole", **sections)
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
                assert process.poll() is None, run.said()
                time.sleep(0.001)
        finally:
            process.kill()
            process.wait()
    run.finish()
    same(run.result(), uninterrupted.result())
