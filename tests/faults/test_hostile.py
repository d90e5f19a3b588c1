"""Hostile files: any content causes an error with exit code 2, needs little memory, and executes nothing."""

import json
import os
import pickle
import re
import shutil
import struct

import pytest

import whet
from faults.harness import whet_process
from tiny import run_config
from whet.errors import WhetError

MIB = 2**20


def safetensors(header, data=b"", length=None):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "header of 2^63 bytes": safetensors({}, length=2**63),
    "header of 99 MB that is not there": safetensors({}, length=99 * 10**6),
    "header longer than the file": safetensors({"a": tensor()}, b"\0" * 4, length=10**4),
    "shape of 2^80 numbers": safetensors({"a": tensor(shape=(2**40, 2**40))}, b"\0" * 4),
    "shape that wraps to zero": safetensors({"a": tensor(shape=(2**32, 2**32))}, b""),
    "negative shape": safetensors({"a": tensor(shape=(-1, -1))}, b"\0" * 4),
    "data of 1 TB that is not there": safetensors({"a": tensor(shape=(2**38,), offsets=(0, 2**40))}),
    "offsets out of the file": safetensors({"a": tensor(offsets=(10**9, 10**9 + 4))}, b"\0" * 4),
    "offsets backwards": safetensors({"a": tensor(offsets=(4, 0))}, b"\0" * 4),
    "overlapping": safetensors({"a": tensor(), "b": tensor()}, b"\0" * 4),
    "an unknown type": safetensors({"a": tensor(dtype="X9")}, b"\0" * 4),
    "header that is no object": safetensors([1, 2]),
    "header nested a thousand deep": safetensors(b'{"a":' * 1000 + b"1" + b"}" * 1000),
    "a pickle": pickle.dumps(Evil()),
    "a zip, as torch.save writes": b"PK\x03\x04" + pickle.dumps(Evil()),
    "nothing": b"",
}


@pytest.fixture
def directory(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(tiny_directory, tmp_path / "model")


def assert_rejected(path):
    with pytest.raises(WhetError) as caught:
        whet.load(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_weights_of_a_model(directory, name, record_property):
    record_property("fault: hostile file refused", 1)
    (directory / "model.safetensors").write_bytes(HOSTILE[name])
    assert "model.safetensors" in assert_rejected(directory)
    assert not (directory.parent / "executed").exists()


@pytest.fixture(scope="module")
def trained(tiny_directory, tmp_path_factory):
    return whet.train(run_config(tiny_directory, tmp_path_factory.mktemp("trained"))).directory


@pytest.mark.parametrize("name", HOSTILE)
def test_weights_of_an_adapter(trained, tmp_path, monkeypatch, name, record_property):
    record_property("fault: hostile file refused", 1)
    monkeypatch.chdir(tmp_path)
    adapter = shutil.copytree(trained / "final", tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes(HOSTILE[name])
    assert "adapter_model.safetensors" in assert_rejected(adapter)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_weights_of_a_checkpoint_with_matching_manifest(
    trained, tmp_path, monkeypatch, name, record_property
):
    """An attacker can also write the manifest, which protects from accidents only."""
    record_property("fault: hostile file refused", 1)
    import hashlib

    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(trained, tmp_path / "run")
    checkpoint = run / "checkpoints" / "step-000004"
    (checkpoint / "weights.safetensors").write_bytes(HOSTILE[name])
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    manifest["files"]["weights.safetensors"] = {
        "bytes": len(HOSTILE[name]),
        "sha256": hashlib.sha256(HOSTILE[name]).hexdigest(),
    }
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "weights.safetensors" in assert_rejected(checkpoint)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "..", "", ".", "a/../../outside.safetensors"]
)
def test_shards_outside_of_the_directory(directory, shard, record_property):
    record_property("fault: hostile file refused", 1)
    shutil.move(directory / "model.safetensors", directory.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not a file in this directory" in assert_rejected(directory)


@pytest.mark.parametrize("sharded", [False, True])
def test_link_out_of_the_directory(directory, sharded, record_property):
    record_property("fault: hostile file refused", 1)
    shutil.move(directory / "model.safetensors", directory.parent / "outside.safetensors")
    (directory / "model.safetensors").symlink_to("../outside.safetensors")
    if sharded:
        index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "leads out of its directory" in assert_rejected(directory)


MODEL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("name", [*MODEL_FILES, "additional_chat_templates/rag.jinja", "vocab.json"])
def test_model_file_that_links_out_of_the_directory(directory, name, record_property):
    record_property("fault: hostile file refused", 1)
    secret = directory.parent / "secret"
    secret.write_text('{"key": "hunter2"}')
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(secret)
    said = assert_rejected(directory)
    assert f"{name} is a symbolic link that leads out of its directory" in said
    assert "hunter2" not in said


def test_template_folder_that_links_out_of_the_model(directory, record_property):
    record_property("fault: hostile file refused", 1)
    (directory.parent / "elsewhere").mkdir()
    (directory / "additional_chat_templates").symlink_to("../elsewhere")
    assert "leads out of its directory" in assert_rejected(directory)


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"]
)
def test_adapter_file_that_links_out_of_the_directory(trained, tmp_path, name, record_property):
    record_property("fault: hostile file refused", 1)
    adapter = shutil.copytree(trained / "final", tmp_path / "adapter")
    shutil.move(adapter / name, tmp_path / "outside")
    (adapter / name).symlink_to("../outside")
    assert f"{name} is a symbolic link that leads out of its directory" in assert_rejected(adapter)


def test_link_to_or_within_the_directory_is_followed(directory):
    shutil.move(directory / "chat_template.jinja", directory / "template")
    (directory / "chat_template.jinja").symlink_to("template")
    (directory.parent / "link").symlink_to(directory)
    assert whet.load(directory.parent / "link", device="cpu")[1].chat_template


def test_links_of_the_hub_cache_are_followed(tiny_directory, tmp_path):
    """models--x/snapshots/REVISION/file -> ../../blobs/HASH"""
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    shutil.copytree(tiny_directory, snapshot)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, blobs / f"hash{number}")
        file.symlink_to(f"../../blobs/hash{number}")
    assert whet.load(snapshot, device="cpu")[1].chat_template


def deep_json():
    """50 MB of numbers, nested ten levels deep: more than a gigabyte as Python objects."""
    return '{"a":' * 10 + "[" + "1," * (25 * MIB) + "1]" + "}" * 10


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "adapter_config.json"])
def test_json_of_50_mb(directory, name, record_property):
    record_property("fault: hostile file refused", 1)
    (directory / name).write_text(deep_json())
    output = directory.parent / "output.txt"
    code = whet_process("generate", directory, "hi", "--max-tokens", 1, output=output)
    said = output.read_text()
    assert code == 2, said
    assert f"{name} has" in said
    assert "bytes, which is too large for this file" in said
    assert int(re.search(r"peak (\d+) MiB", said)[1]) < 700


@pytest.mark.parametrize("name", ["state.json", "MANIFEST.json"])
def test_json_of_50_mb_in_a_checkpoint(trained, tmp_path, name, record_property):
    record_property("fault: hostile file refused", 1)
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "final")
    (run / "checkpoints" / "step-000004" / name).write_text(deep_json())
    output = tmp_path / "output.txt"
    code = whet_process("resume", run, output=output)
    said = output.read_text()
    assert code == 2, said
    assert "checkpoints is valid" in said
    assert int(re.search(r"peak (\d+) MiB", said)[1]) < 700
