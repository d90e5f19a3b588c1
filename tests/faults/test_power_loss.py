"""A run that loses power at any moment and is resumed equals the run that did not."""

import json
import random
from types import SimpleNamespace

import pytest

import whet
from faults.harness import same, timeless
from faults.power import Disk, Link, Move, Sync
from tiny import run_config
from whet.errors import CheckpointError

CLASSES = {"kind": "classify", "classes": ["no", "yes"]}
KINDS = {
    "lora": {"method": {"kind": "lora", "rank": 2, "dropout": 0.1}},
    "full-samples-probes": {
        "method": {"kind": "full"},
        "optim": {"lr": 1e-3},
        "log": {
            "samples": {"prompts": ["Hello"], "every": 2, "max_tokens": 4},
            "probes": {"weights": 3, "gradients": 3, "activations": None, "attention": None},
        },
        "checkpoint": {"every": 2, "keep": 1, "async": False},
    },
    "early-stop": {"eval": {"every": 2, "early_stop": {"metric": "eval_loss", "patience": 1}}},
    "classify": {"objective": CLASSES, "data": {"train": "{labels}", "valid": "{labels}"}},
    "scratch": {
        "model": {"preset": "nano", "tokenizer": "bpe:300"},
        "method": {"kind": "full"},
        "data": {"train": "{texts}", "valid": None},
        "eval": {},
    },
}


class Player:
    """Runs of one kind, in directories of their own, that can lose power."""

    def __init__(self, kind, tiny_directory, directory, monkeypatch):
        self.monkeypatch = monkeypatch
        self.directory = directory
        labels = directory / "labels.jsonl"
        labels.write_text("".join(json.dumps({"text": f"{n} x", "label": n % 2}) + "\n" for n in range(10)))
        texts = directory / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": f"{n} sharp knives"}) + "\n" for n in range(10)))
        keys = json.dumps(KINDS[kind]).replace("{labels}", str(labels)).replace("{texts}", str(texts))
        self.keys = json.loads(keys)
        self.tiny_directory = tiny_directory

    def config(self, root):
        keys = {
            "checkpoint": {"every": 2, "keep": 2},
            "eval": {"every": 3},
            "run": {"steps": 6, "batch_size": 4},
            "data": {"train": "synth:house:10", "valid": "synth:house-valid:3"},
        } | self.keys
        model = keys.pop("model", str(self.tiny_directory))
        return {**run_config(self.tiny_directory, root, **keys), "model": model}

    def go(self, root):
        """Train, or resume where there is something to resume."""
        self.monkeypatch.setenv("WHET_TOKENS", str(root / "tokens"))
        run = root / "runs" / "test"
        if not (run / "config.yaml").is_file():
            whet.train(self.config(root))
            return
        try:
            whet.resume(run)
        except CheckpointError as error:
            if "has finished" not in error.message:
                raise

    def record(self, root):
        """Do the same on a disk that remembers how it was done."""
        root.mkdir(parents=True, exist_ok=True)
        disk = Disk(root)
        with disk.recording(self.monkeypatch):
            self.go(root)
        return disk

    def result(self, root):
        run = root / "runs" / "test"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        files = {p.name: p.read_bytes() for p in sorted((run / "final").iterdir()) if p.is_file()}
        if (samples := run / "samples.jsonl").is_file():
            files["samples.jsonl"] = samples.read_bytes()
        return [timeless(row) for row in rows], files


def lose_power(player, cuts, *, seed):
    """Cut the power at random moments of a run, and at some of the resume that follows."""
    rng = random.Random(seed)
    whole = player.directory / "whole"
    disk = player.record(whole)
    expected = player.result(whole)
    assert len([o for o in disk.operations if isinstance(o, Sync)]) > 10
    for number in range(cuts):
        root = player.directory / f"cut-{number}"
        disk.after_a_cut(rng.randrange(1, len(disk.operations) + 1), rng, root)
        if number % 4 == 3:
            again = player.record(root)
            root = player.directory / f"cut-{number}-again"
            again.after_a_cut(rng.randrange(again.began, len(again.operations) + 1), rng, root)
        player.go(root)
        same(player.result(root), expected)


@pytest.mark.parametrize("kind", ["lora", "scratch"])
def test_power_is_lost_at_a_few_moments(tiny_directory, tmp_path, monkeypatch, kind, record_property):
    record_property("fault: power lost at a random moment", 6)
    lose_power(Player(kind, tiny_directory, tmp_path, monkeypatch), 6, seed=kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_power_is_lost_at_many_moments(tiny_directory, tmp_path, monkeypatch, kind, seed, record_property):
    record_property("fault: power lost at a random moment", 40)
    lose_power(Player(kind, tiny_directory, tmp_path, monkeypatch), 40, seed=f"{kind} {seed}")


def written(root, monkeypatch, work):
    disk = Disk(root)
    with disk.recording(monkeypatch):
        work()
    return disk


def states(disk, tmp_path, times=40):
    """What may be left of a finished piece of work, as sets of paths with their contents."""
    rng, found = random.Random(0), []
    for number in range(times):
        target = tmp_path / f"state-{number}"
        disk.after_a_cut(len(disk.operations), rng, target)
        found.append({str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()})
    return found


def test_the_simulator_loses_what_was_not_synced(tmp_path, monkeypatch):
    """What the other tests rest on: each kind of loss is played, and what was synced stays."""
    root = tmp_path / "root"
    root.mkdir()

    def careless():
        (root / "a").write_bytes(b"0123456789")
        (root / "b").write_bytes(b"old")
        with (root / "b").open("rb") as file:
            import os

            os.fsync(file.fileno())
        (root / "a").rename(root / "c")

    found = states(written(root, monkeypatch, careless), tmp_path)
    assert {} in found, "no name was synced"
    assert any(set(each) == {"a", "b"} for each in found), "a renaming is undone"
    assert all(each.get("b", b"old") == b"old" for each in found), "its bytes were synced"
    assert len({each["c"] for each in found if "c" in each}) > 3, "bytes are lost, torn or zero"
    disk = written(root, monkeypatch, lambda: (root / "c").rename(root / "d"))
    assert [type(o) for o in disk.operations[disk.began :]] == [Move]
    assert all(isinstance(o, Link) or hasattr(o, "content") for o in disk.operations[: disk.began])


def test_the_one_writer_keeps_what_it_returned_from(tmp_path, monkeypatch):
    from whet.storage import new_directory, remove_directory, replace_text, write_text

    root = tmp_path / "root"
    root.mkdir()

    def careful():
        with new_directory(root / "deep" / "er" / "model") as staging:
            (staging / "inner").mkdir()
            (staging / "inner" / "by-a-library").write_text("library")
            write_text(staging / "own", "own")
        replace_text(root / "text", "new")

    kept = {"deep/er/model/inner/by-a-library": b"library", "deep/er/model/own": b"own", "text": b"new"}
    assert all(each == kept for each in states(written(root, monkeypatch, careful), tmp_path / "1"))

    def remove():
        remove_directory(root / "deep" / "er" / "model")

    for each in states(written(root, monkeypatch, remove), tmp_path / "2"):
        left = {name for name in each if name.startswith("deep/er/model/")}
        assert left in (set(), set(kept) - {"text"}), "whole or not at all"


def test_a_checkpoint_vouches_for_the_rows_before_it(tiny_directory, tmp_path, monkeypatch):
    """Wherever the power goes off, a checkpoint on the disk has all its rows beside it."""
    player = Player("lora", tiny_directory, tmp_path, monkeypatch)
    disk = player.record(tmp_path / "whole")
    rng = random.Random(1)
    seen = SimpleNamespace(checkpoints=0)
    for number in range(60):
        root = tmp_path / f"cut-{number}"
        disk.after_a_cut(rng.randrange(1, len(disk.operations) + 1), rng, root)
        run = root / "runs" / "test"
        steps = [int(p.parent.name[5:]) for p in run.glob("checkpoints/step-*/MANIFEST.json")]
        if steps:
            seen.checkpoints += 1
            lines = (run / "metrics.jsonl").read_bytes().split(b"\n") if run.is_dir() else []
            rows = [json.loads(line) for line in lines if line.endswith(b"}") and line.startswith(b"{")]
            assert {*range(1, max(steps) + 1)} <= {row.get("step") for row in rows}
    assert seen.checkpoints > 10
