"""A run that loses power at any moment and is resumed equals an uninterrupted one."""

import json
import random
from types import SimpleNamespace

import pytest

import whet
from faults.harness import assert_same_result, without_times
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
    """Runs of one kind, each in its own directory, that can lose power."""

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

    def run_once(self, root):
        """Train, or resume if the run exists."""
        self.monkeypatch.setenv("WHET_TOKENS", str(root / "tokens"))
        run = root / "runs" / "test"
        if not (run / "config.yaml").is_file():
            whet.train(self.config(root))
            return
        try:
            whet.resume(run)
        except CheckpointError as error:
            if "has already finished" not in error.message:
                raise

    def record(self, root):
        """Train or resume on a recording disk, and return the disk."""
        root.mkdir(parents=True, exist_ok=True)
        disk = Disk(root)
        with disk.recording(self.monkeypatch):
            self.run_once(root)
        return disk

    def result(self, root):
        run = root / "runs" / "test"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        files = {p.name: p.read_bytes() for p in sorted((run / "final").iterdir()) if p.is_file()}
        if (samples := run / "samples.jsonl").is_file():
            files["samples.jsonl"] = samples.read_bytes()
        return [without_times(row) for row in rows], files


def lose_power(player, cuts, *, seed):
    """Cut the power at random moments of a run, and of some of its resumes."""
    rng = random.Random(seed)
    uninterrupted = player.directory / "uninterrupted"
    disk = player.record(uninterrupted)
    expected = player.result(uninterrupted)
    assert len([o for o in disk.operations if isinstance(o, Sync)]) > 10
    for number in range(cuts):
        root = player.directory / f"cut-{number}"
        disk.write_state_after_cut(rng.randrange(1, len(disk.operations) + 1), rng, root)
        if number % 4 == 3:
            second_disk = player.record(root)
            root = player.directory / f"cut-{number}-again"
            second_disk.write_state_after_cut(
                rng.randrange(second_disk.start_index, len(second_disk.operations) + 1), rng, root
            )
        player.run_once(root)
        assert_same_result(player.result(root), expected)


@pytest.mark.parametrize("kind", ["lora", "scratch"])
def test_power_loss_at_a_few_moments(tiny_directory, tmp_path, monkeypatch, kind, record_property):
    record_property("fault: power lost at a random moment", 6)
    lose_power(Player(kind, tiny_directory, tmp_path, monkeypatch), 6, seed=kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_at_many_moments(tiny_directory, tmp_path, monkeypatch, kind, seed, record_property):
    record_property("fault: power lost at a random moment", 40)
    lose_power(Player(kind, tiny_directory, tmp_path, monkeypatch), 40, seed=f"{kind} {seed}")


def written(root, monkeypatch, work):
    disk = Disk(root)
    with disk.recording(monkeypatch):
        work()
    return disk


def states(disk, tmp_path, times=40):
    """Return possible states of the disk after a power loss, as {path: content}."""
    rng, results = random.Random(0), []
    for number in range(times):
        target = tmp_path / f"state-{number}"
        disk.write_state_after_cut(len(disk.operations), rng, target)
        results.append({str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()})
    return results


def test_simulator_loses_unsynced_changes(tmp_path, monkeypatch):
    """The other tests rely on it: every kind of loss occurs, and synced data remains."""
    root = tmp_path / "root"
    root.mkdir()

    def write_without_sync():
        (root / "a").write_bytes(b"0123456789")
        (root / "b").write_bytes(b"old")
        with (root / "b").open("rb") as file:
            import os

            os.fsync(file.fileno())
        (root / "a").rename(root / "c")

    results = states(written(root, monkeypatch, write_without_sync), tmp_path)
    assert {} in results, "no name was synced"
    assert any(set(each) == {"a", "b"} for each in results), "a rename is undone"
    assert all(each.get("b", b"old") == b"old" for each in results), "its bytes were synced"
    assert len({each["c"] for each in results if "c" in each}) > 3, "bytes are lost, torn or zero"
    disk = written(root, monkeypatch, lambda: (root / "c").rename(root / "d"))
    assert [type(o) for o in disk.operations[disk.start_index :]] == [Move]
    assert all(isinstance(o, Link) or hasattr(o, "content") for o in disk.operations[: disk.start_index])


def test_storage_writes_survive_power_loss(tmp_path, monkeypatch):
    from whet.storage import create_directory_atomically, remove_directory, replace_text, write_text

    root = tmp_path / "root"
    root.mkdir()

    def careful():
        with create_directory_atomically(root / "deep" / "er" / "model") as staging:
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
        assert left in (set(), set(kept) - {"text"}), "complete or absent"


def test_checkpoint_implies_all_earlier_rows(tiny_directory, tmp_path, monkeypatch):
    """At any moment of power loss, a checkpoint on the disk has all its rows in metrics.jsonl."""
    player = Player("lora", tiny_directory, tmp_path, monkeypatch)
    disk = player.record(tmp_path / "uninterrupted")
    rng = random.Random(1)
    seen = SimpleNamespace(checkpoints=0)
    for number in range(60):
        root = tmp_path / f"cut-{number}"
        disk.write_state_after_cut(rng.randrange(1, len(disk.operations) + 1), rng, root)
        run = root / "runs" / "test"
        steps = [int(p.parent.name[5:]) for p in run.glob("checkpoints/step-*/MANIFEST.json")]
        if steps:
            seen.checkpoints += 1
            lines = (run / "metrics.jsonl").read_bytes().split(b"\n") if run.is_dir() else []
            rows = [json.loads(line) for line in lines if line.endswith(b"}") and line.startswith(b"{")]
            assert {*range(1, max(steps) + 1)} <= {row.get("step") for row in rows}
    assert seen.checkpoints > 10
