"""Hugging Face datasets: saved to disk, by name, and streamed."""

import json

import datasets
import pytest

from whet.data.sources.hf_datasets import HubDataset, parse_hub_spec
from whet.data.sources.source import directory_has_split, open_source
from whet.errors import DataError

ROWS = [{"text": "a", "note": None}, {"text": "b", "note": {"deep": [1]}}, {"text": "c", "note": None}]
FIELDS = [{"text": "a"}, {"text": "b", "note": {"deep": [1]}}, {"text": "c"}]


@pytest.fixture(autouse=True)
def _no_progress_bars_and_local_cache(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def by_name(tmp_path):
    """A directory that load_dataset opens like a repository on the hub."""
    directory = tmp_path / "named"
    directory.mkdir()
    for split in ("train", "validation"):
        rows = [{**row, "split": split} for row in ROWS]
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def test_saved_dataset_without_splits_serves_any_split(tmp_path):
    directory = str(tmp_path / "saved")
    datasets.Dataset.from_list(ROWS).save_to_disk(directory)
    for split in ("train", "valid"):
        source = open_source(directory, split=split)
        assert [record.fields for record in source] == FIELDS
        assert [record.fields for record in source] == FIELDS
    assert [record.origin for record in source] == [f"{directory}#{n}" for n in (1, 2, 3)]
    assert not directory_has_split(directory, "valid")
    other = str(tmp_path / "other")
    datasets.Dataset.from_list(ROWS[:2]).save_to_disk(other)
    assert open_source(directory).digest() == open_source(directory).digest() != open_source(other).digest()


def test_saved_dataset_returns_the_requested_split(tmp_path):
    directory = str(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(directory)
    assert len(list(open_source(directory))) == 3
    assert len(list(open_source(directory, split="valid"))) == 1
    assert directory_has_split(directory, "valid")
    assert not directory_has_split(directory, "test")
    with pytest.raises(DataError, match=r"has no test split\n  hint: it has train, validation"):
        list(open_source(directory, split="test"))


def test_error_names_damaged_saved_dataset(tmp_path):
    directory = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(directory)
    for file in directory.glob("*.arrow"):
        file.write_bytes(b"torn")
    with pytest.raises(DataError, match="saved cannot be read by datasets"):
        list(open_source(str(directory)))


@pytest.mark.parametrize("scheme", ["hf", "hf-stream"])
def test_named_dataset_is_read_like_a_file(by_name, scheme):
    source = open_source(f"{scheme}:{by_name}", split="valid")
    for _ in range(2):
        assert [record.fields for record in source] == [{**row, "split": "validation"} for row in FIELDS]
    assert next(iter(source)).origin == f"{scheme}:{by_name}#1"
    assert source.digest() != open_source(f"{scheme}:{by_name}").digest()
    assert source.digest() == open_source(f"{scheme}:{by_name}:validation").digest()


def test_slice_of_a_split_is_a_different_source(by_name):
    some, everything = open_source(f"hf:{by_name}:train[:2]"), open_source(f"hf:{by_name}:train")
    assert [record.fields["text"] for record in some] == ["a", "b"]
    assert some.digest() != everything.digest()


def test_error_names_missing_dataset_or_split(by_name, monkeypatch):
    with pytest.raises(DataError, match=r"has no test split\n.*it has train, validation"):
        list(open_source(f"hf:{by_name}", split="test"))
    with pytest.raises(DataError, match=r"hf:nobody/nothing cannot be read by datasets"):
        list(open_source("hf:nobody/nothing"))
    with pytest.raises(
        DataError, match=r"cannot be read by datasets.*\n.*check the name, the configuration, the split"
    ):
        list(open_source(f"hf:{by_name}::nosuch"))
    monkeypatch.setenv("WHET_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(DataError, match="WHET_OFFLINE is set"):
        list(open_source("hf:nobody/nothing"))


def test_arguments_of_load_dataset_match_the_spec(monkeypatch):
    calls = []

    def load_dataset(*arguments, **settings):
        calls.append((arguments, settings))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "dev"])
    assert len(list(open_source("hf-stream:who/what:main", split="valid"))) == 3
    assert calls == [(("who/what", "main"), {"split": "dev", "streaming": True})]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:a/b", HubDataset("a/b", None, None)),
        ("hf:a/b:main", HubDataset("a/b", "main", None)),
        ("hf:a/b:validation", HubDataset("a/b", None, "validation")),
        ("hf:a/b:main:train", HubDataset("a/b", "main", "train")),
        ("hf:a/b::extra", HubDataset("a/b", None, "extra")),
        ("hf-stream:a/b:main:train[10:20]", HubDataset("a/b", "main", "train[10:20]")),
        ("hf:a/b:train[:5%]", HubDataset("a/b", None, "train[:5%]")),
    ],
)
def test_hub_spec_is_parsed(spec, expected):
    assert parse_hub_spec(spec) == expected


@pytest.mark.parametrize("spec", ["hf:", "hf:a:b:c:d"])
def test_invalid_hub_spec_is_rejected(spec):
    with pytest.raises(DataError, match="is not a valid Hugging Face dataset spec"):
        open_source(spec)


def test_changed_streamed_dataset_has_another_digest(by_name, tmp_path):
    before = open_source(f"hf-stream:{by_name}").digest()
    assert open_source(f"hf-stream:{by_name}").digest() == before
    (tmp_path / "named" / "train.jsonl").write_text('{"text": "new"}\n')
    assert open_source(f"hf-stream:{by_name}").digest() != before
