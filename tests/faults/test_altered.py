"""A torn or altered checkpoint is skipped with the reason, and the previous one is used."""

import json
import shutil

import pytest
import torch

import whet
from tiny import run_config
from whet.errors import CheckpointError
from whet.storage import MANIFEST, check_manifest, remove_temporary_files
from whet.training.callbacks import Callback, StopRun
from whet.training.checkpoint import load_checkpoint, newest_valid_checkpoint

FILES = ["weights.safetensors", "optimizer.safetensors", "state.json", MANIFEST]


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("test", unfinished=True) if step == self.step else None


@pytest.fixture(scope="module")
def stopped(tiny_directory, tmp_path_factory):
    """A run stopped after step 3, with a checkpoint of each step, and its final result."""
    directory = tmp_path_factory.mktemp("stopped")
    sections = {"checkpoint": {"every": 1, "keep": 5}, "method": {"kind": "lora", "rank": 2, "dropout": 0.2}}
    run = whet.train(run_config(tiny_directory, directory, **sections), [StopAt(3)]).directory
    uninterrupted = whet.train(run_config(tiny_directory, directory / "uninterrupted", **sections)).directory
    return run, (uninterrupted / "final" / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped[0], tmp_path / "runs" / "test")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def empty(path):
    path.write_bytes(b"")


def link_out(path):
    outside = path.parents[3] / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def become_directory(path):
    path.unlink()
    path.mkdir()


ALTERATIONS = [flip, truncate, empty, lambda path: path.unlink(), link_out, become_directory]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "alter", ALTERATIONS, ids=["flip", "truncate", "empty", "remove", "link", "directory"]
)
def test_altered_file_makes_resume_use_the_previous_checkpoint(
    run, stopped, caplog, name, alter, record_property
):
    record_property("fault: newest checkpoint torn or altered", 1)
    newest = run / "checkpoints" / "step-000003"
    alter(newest / name)
    with pytest.raises(CheckpointError):
        check_manifest(newest)
    caplog.set_level("INFO", logger="whet")
    result = whet.resume(run)
    assert "skipping damaged checkpoint step-000003: " in caplog.text
    assert "resuming after step 2" in caplog.text
    assert (result.directory / "final" / "adapter_model.safetensors").read_bytes() == stopped[1]
    assert (run / "checkpoints" / "broken-step-000003").is_dir(), "set aside, not thrown away"


def test_flipped_bytes_of_manifest_and_state_are_detected_or_harmless(run):
    """Flip every byte, one at a time; a change of the manifest's whitespace is harmless."""
    newest = run / "checkpoints" / "step-000003"
    original = (newest / MANIFEST).read_bytes()
    meaning = json.loads(original)
    for index in range(len(original)):
        data = bytearray(original)
        data[index] ^= 1
        (newest / MANIFEST).write_bytes(data)
        try:
            check_manifest(newest)
        except CheckpointError:
            continue
        assert json.loads(bytes(data)) == meaning


def manifest_of(run, files):
    (run / "checkpoints" / "step-000003" / MANIFEST).write_text(json.dumps(files))


@pytest.mark.parametrize(
    "content",
    [
        {"files": {"../step-000002/weights.safetensors": {"bytes": 1, "sha256": "0"}}},
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": "0"}}},
        {"files": {}},
        {"files": []},
        {"files": {"weights.safetensors": 3}},
        {"files": {"weights.safetensors": {"bytes": "many", "sha256": "0"}}},
        [],
        {},
    ],
    ids=str,
)
def test_invalid_manifest_is_rejected(run, content, record_property):
    record_property("fault: newest checkpoint torn or altered", 1)
    manifest_of(run, content)
    assert newest_valid_checkpoint(run).name == "step-000002"


def test_manifest_of_another_run_is_rejected(run, tiny_directory, tmp_path):
    other = whet.train(run_config(tiny_directory, tmp_path / "other", run={"seed": 5}), [StopAt(3)]).directory
    shutil.copy(
        other / "checkpoints" / "step-000003" / MANIFEST, run / "checkpoints" / "step-000003" / MANIFEST
    )
    assert newest_valid_checkpoint(run).name == "step-000002"


def test_valid_checkpoint_of_another_run_is_rejected(run, tiny_directory, tmp_path):
    sections = {"run": {"seed": 5}, "method": {"kind": "lora", "rank": 2, "dropout": 0.2}}
    other = whet.train(run_config(tiny_directory, tmp_path / "other", **sections), [StopAt(3)]).directory
    shutil.rmtree(run / "checkpoints" / "step-000003")
    shutil.copytree(other / "checkpoints" / "step-000003", run / "checkpoints" / "step-000003")
    with pytest.raises(CheckpointError, match="run.seed: 5 became 0"):
        whet.resume(run)


def test_unlisted_file_invalidates_a_checkpoint(run):
    (run / "checkpoints" / "step-000003" / "extra.pkl").write_bytes(b"\x80\x04K\x01.")
    assert newest_valid_checkpoint(run).name == "step-000002"


def test_no_valid_checkpoint_is_an_error_and_changes_nothing(run):
    for path in run.rglob("weights.safetensors"):
        truncate(path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints is valid"):
        whet.resume(run)
    assert {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"
    } == before


def test_mismatching_checkpoint_leaves_model_and_optimizer_unchanged(run, tiny):
    model, _ = tiny
    whet.attach_lora(model, rank=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match="does not match this model"):
        load_checkpoint(run / "checkpoints" / "step-000003", model, optimizer)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not optimizer.state


def test_checkpoint_moved_aside_at_power_loss_is_restored(run):
    """When a checkpoint is replaced, only the old one exists between the two renames."""
    checkpoints = run / "checkpoints"
    (checkpoints / "step-000003").rename(checkpoints / ".step-000003.old-999")
    shutil.copytree(checkpoints / "step-000002", checkpoints / ".step-000003.writing-999")
    shutil.copytree(checkpoints / "step-000002", checkpoints / ".step-000001.removed-999")
    remove_temporary_files(checkpoints)
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "step-000001",
        "step-000002",
        "step-000003",
    ]
    assert newest_valid_checkpoint(run).name == "step-000003"
