"""data.columns maps the columns of any source to whet's field names."""

import json

import datasets
import pandas
import pytest

from whet.config.data import WeightedSource
from whet.config.placeholder import make_placeholder
from whet.data.sources.python_rows import PythonRows
from whet.data.sources.source import open_source
from whet.errors import DataError

ROWS = [{"question": "1+1?", "answer": "2", "id": "a"}, {"question": "2+2?", "answer": "4", "id": "b"}]
COLUMNS = {"prompt": "question", "completion": "answer"}
EXPECTED = [
    {"prompt": "1+1?", "completion": "2", "id": "a"},
    {"prompt": "2+2?", "completion": "4", "id": "b"},
]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_source(kind, tmp_path):
    if kind == "jsonl":
        return write_jsonl(tmp_path / "a.jsonl")
    if kind == "folder":
        for index, row in enumerate(ROWS):
            write_jsonl(tmp_path / f"part{index}.jsonl", [row])
        return str(tmp_path)
    if kind == "glob":
        write_source("folder", tmp_path)
        return f"{tmp_path}/part*.jsonl"
    if kind in ("csv", "tsv"):
        path = tmp_path / f"a.{kind}"
        pandas.DataFrame(ROWS).to_csv(path, index=False, sep="," if kind == "csv" else "\t")
        return str(path)
    if kind == "parquet":
        pandas.DataFrame(ROWS).to_parquet(tmp_path / "a.parquet")
        return str(tmp_path / "a.parquet")
    if kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        return str(tmp_path / "saved")
    directory = tmp_path / "named"
    directory.mkdir()
    for split in ("train", "validation"):
        write_jsonl(directory / f"{split}.jsonl")
    return f"{kind}{directory}"


@pytest.mark.parametrize(
    "kind", ["jsonl", "folder", "glob", "csv", "tsv", "parquet", "saved", "hf:", "hf://", "hf-stream:"]
)
def test_columns_apply_to_every_kind_of_source(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    spec = write_source(kind, tmp_path)
    source = open_source(spec, columns=COLUMNS)
    assert [record.fields for record in source] == EXPECTED
    assert {record.record_format for record in source} == {"completion"}
    assert source.digest() != open_source(spec).digest()
    with pytest.raises(DataError, match=r"set data.columns: \{prompt: question, completion: answer\}"):
        list(open_source(spec))


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pandas.DataFrame(ROWS),
        lambda: iter(ROWS),
    ],
    ids=["list", "Dataset", "IterableDataset", "DataFrame", "function"],
)
def test_columns_apply_to_python_objects(rows):
    given = {"train": PythonRows("train", rows)}
    source = open_source(make_placeholder("train", "0" * 64), columns=COLUMNS, given=given)
    assert [record.fields for record in source] == EXPECTED


def test_cells_are_read_under_their_new_name(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('says,kind,label\n"hello, you",3,ignored\n')
    [record] = open_source(str(path), columns={"input": "says", "label": "kind"}, form="classification")
    assert record.fields == {"input": "hello, you", "label": 3}  # a number, and the old label is gone
    path.write_text('chat\n"[{""role"": ""user"", ""content"": ""q""}]"\n')
    [record] = open_source(str(path), columns={"messages": "chat"})
    assert record.fields["messages"] == [{"role": "user", "content": "q"}]


def test_columns_can_be_swapped(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "q"}])
    [record] = open_source(path, columns={"prompt": "completion", "completion": "prompt"})
    assert record.fields == {"prompt": "q", "completion": "a"}


def test_optional_column_may_be_missing_in_some_records(tmp_path):
    rows = [{"q": "a", "a": "b", "sys": "s"}, {"q": "a", "a": "b"}, {"q": "a", "a": "b", "sys": None}]
    columns = {"instruction": "q", "output": "a", "system": "sys"}
    source = open_source(write_jsonl(tmp_path / "a.jsonl", rows), columns=columns)
    assert [record.record_format for record in source] == ["messages", "completion", "completion"]


def test_column_that_no_record_has_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=r"no record has the column 'sys' that data.columns names for system"):
        list(open_source(path, columns={"system": "sys"}))
    assert len(list(open_source(path, columns={"text": "body"}))) == 1  # the file already has whet's name


def test_weighted_sources_can_have_their_own_columns(tmp_path):
    parts = [
        WeightedSource(source=write_jsonl(tmp_path / "a.jsonl"), weight=1),
        WeightedSource(
            source=write_jsonl(tmp_path / "b.jsonl", [{"q": "x", "r": "y"}]),
            weight=1,
            columns={"prompt": "q", "completion": "r"},
        ),
    ]
    records = [record.fields for record in open_source(parts, columns=COLUMNS)]
    assert {record["prompt"] for record in records} == {"1+1?", "2+2?", "x"}
