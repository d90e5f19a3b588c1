"""Sets of the datasets library: saved ones, ones by name, and streamed ones."""

import json

import datasets
import pytest

from whet.data.sources.hf_datasets import Name, parse_name
from whet.data.sources.source import holds_split, open_source
from whet.errors import DataError

ROWS = [{"text": "a", "note": None}, {"text": "b", "note": {"deep": [1]}}, {"text": "c", "note": None}]
FIELDS = [{"text": "a"}, {"text": "b", "note": {"deep": [1]}}, {"text": "c"}]


@pytest.fixture(autouse=True)
def _quiet_and_at_home(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def by_name(tmp_path):
    """A directory that load_dataset opens as it opens a repository of the hub."""
    directory = tmp_path / "named"
    directory.mkdir()
    for split in ("train", "validation"):
        rows = [{**row, "split": split} for row in ROWS]
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def test_a_saved_set_gives_its_rows_whatever_the_split(tmp_path):
    directory = str(tmp_path / "saved")
    datasets.Dataset.from_list(ROWS).save_to_disk(directory)
    for split in ("train", "valid"):
        source = open_source(directory, split=split)
        assert [record.fields for record in source] == FIELDS
        assert [record.fields for record in source] == FIELDS
    assert [record.origin for record in source] == [f"{directory}#{n}" for n in (1, 2, 3)]
    assert not holds_split(directory, "valid")
    other = str(tmp_path / "other")
    datasets.Dataset.from_list(ROWS[:2]).save_to_disk(other)
    assert open_source(directory).digest() == open_source(directory).digest() != open_source(other).digest()


def test_a_saved_set_with_splits_gives_the_one_asked_for(tmp_path):
    directory = str(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(directory)
    assert len(list(open_source(directory))) == 3
    assert len(list(open_source(directory, split="valid"))) == 1
    assert holds_split(directory, "valid")
    assert not holds_split(directory, "test")
    with pytest.raises(DataError, match=r"has no test split\n  hint: it has train, validation"):
        list(open_source(directory, split="test"))


def test_a_saved_set_that_is_damaged_is_named(tmp_path):
    directory = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(directory)
    for file in directory.glob("*.arrow"):
        file.write_bytes(b"torn")
    with pytest.raises(DataError, match="saved cannot be read by datasets"):
        list(open_source(str(directory)))


@pytest.mark.parametrize("scheme", ["hf", "hf-stream"])
def test_a_set_by_name_is_read_like_a_file(by_name, scheme):
    source = open_source(f"{scheme}:{by_name}", split="valid")
    for _ in range(2):
        assert [record.fields for record in source] == [{**row, "split": "validation"} for row in FIELDS]
    assert next(iter(source)).origin == f"{scheme}:{by_name}#1"
    assert source.digest() != open_source(f"{scheme}:{by_name}").digest()
    assert source.digest() == open_source(f"{scheme}:{by_name}:validation").digest()


def test_a_slice_of_a_split_is_another_source(by_name):
    some, everything = open_source(f"hf:{by_name}:train[:2]"), open_source(f"hf:{by_name}:train")
    assert [record.fields["text"] for record in some] == ["a", "b"]
    assert some.digest() != everything.digest()


def test_what_is_not_there_is_named(by_name, monkeypatch):
    with pytest.raises(DataError, match=r"has no test split\n.*it has train, validation"):
        list(open_source(f"hf:{by_name}", split="test"))
    with pytest.raises(DataError, match=r"hf:nobody/nothing cannot be read by datasets"):
        list(open_source("hf:nobody/nothing"))
    with pytest.raises(DataError, match=r"cannot be read by datasets.*\n.*check its name"):
        list(open_source(f"hf:{by_name}::nosuch"))
    monkeypatch.setenv("WHET_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(DataError, match="WHET_OFFLINE is set"):
        list(open_source("hf:nobody/nothing"))


def test_what_is_asked_of_the_library_is_what_the_name_says(monkeypatch):
    asked = []

    def load_dataset(*arguments, **settings):
        asked.append((arguments, settings))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "dev"])
    assert len(list(open_source("hf-stream:who/what:main", split="valid"))) == 3
    assert asked == [(("who/what", "main"), {"split": "dev", "streaming": True})]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:a/b", Name("a/b", None, None)),
        ("hf:a/b:main", Name("a/b", "main", None)),
        ("hf:a/b:validation", Name("a/b", None, "validation")),
        ("hf:a/b:main:train", Name("a/b", "main", "train")),
        ("hf:a/b::extra", Name("a/b", None, "extra")),
        ("hf-stream:a/b:main:train[10:20]", Name("a/b", "main", "train[10:20]")),
        ("hf:a/b:train[:5%]", Name("a/b", None, "train[:5%]")),
    ],
)
def test_names_have_parts(spec, expected):
    assert parse_name(spec) == expected


@pytest.mark.parametrize("spec", ["hf:", "hf:a:b:c:d"])
def test_names_with_other_parts_are_refused(spec):
    with pytest.raises(DataError, match="is no Hugging Face dataset"):
        open_source(spec)


def test_a_streamed_set_that_has_changed_is_another(by_name, tmp_path):
    before = open_source(f"hf-stream:{by_name}").digest()
    assert open_source(f"hf-stream:{by_name}").digest() == before
    (tmp_path / "named" / "train.jsonl").write_text('{"text": "new"}\n')
    assert open_source(f"hf-stream:{by_name}").digest() != before
