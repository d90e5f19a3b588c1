"""Records from Python objects: the same records, origins and tokens as from a file."""

import datetime
import decimal
import enum
import json
import subprocess
import sys
import uuid
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import torch.utils.data

from whet.config.load_config import validate_config
from whet.config.placeholder import is_object_name, make_placeholder, parse_placeholder
from whet.data.run_data import Needs, RunData
from whet.data.sources.python_rows import PythonRows
from whet.data.sources.source import open_source
from whet.errors import DataError
from whet.model_io.tokenizer import load_model_tokenizer

ROWS = [
    {"prompt": f"{n}+1=", "completion": f"{n + 1}", "group": "even" if n % 2 == 0 else None} for n in range(7)
]


def source(rows, name="train", **settings):
    given = PythonRows(name, rows)
    return open_source(f"python:{name}", given={name: given}, **settings)


def fields_of(rows, **settings):
    return [record.fields for record in source(rows, **settings)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def factory():
    yield from ROWS


class MapStyle(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        factory,
        lambda: ROWS,
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pd.DataFrame(ROWS),
        MapStyle(),
    ],
    ids=[
        "list",
        "tuple",
        "generator function",
        "function",
        "Dataset",
        "IterableDataset",
        "DataFrame",
        "torch",
    ],
)
def test_records_equal_those_of_a_file(rows, jsonl):
    expected = list(open_source(str(jsonl)))
    for _ in range(2):
        records = list(source(rows))
        assert [record.fields for record in records] == [record.fields for record in expected]
        assert [record.origin for record in records] == [f"train[{index}]" for index in range(7)]
        assert {record.record_format for record in records} == {"completion"}


def test_digest_depends_on_records_only():
    digest = PythonRows("train", ROWS).digest()
    # the formula in another process, with another hash seed
    script = f"""
import hashlib, json
rows = {ROWS!r}
text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + chr(10) for row in rows)
print(hashlib.sha256(text.encode()).hexdigest())
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert digest == printed.stdout.strip()
    assert PythonRows("other", factory).digest() == digest, "neither the name nor the kind of object counts"
    assert PythonRows("train", ROWS[:-1]).digest() != digest
    assert PythonRows("train", ROWS[::-1]).digest() != digest
    assert source(ROWS).digest() != source(ROWS, ignore=["group"]).digest()


def test_digest_needs_one_pass():
    calls = []

    def counted():
        calls.append(1)
        return ROWS

    rows = PythonRows("train", counted)
    assert rows.digest() == rows.digest()
    assert len(calls) == 1


def test_records_that_change_between_passes_are_rejected():
    rows = [dict(row) for row in ROWS]
    changing = source(rows)
    list(changing)
    rows[2]["prompt"] = "other"
    with pytest.raises(DataError, match="the records of data 'train' have changed since the first pass"):
        list(changing)
    count = iter(range(100))
    changing = source(lambda: [{"text": str(next(count))}])
    list(changing)
    with pytest.raises(DataError, match="must yield the same records at each call"):
        list(changing)


class Role(str, enum.Enum):  # noqa: UP042 # whose str() is not its value
    USER = "user"


def test_values_are_converted_to_json():
    odd = {
        "text": np.str_("a"),
        "integer": np.int64(3),
        "float": np.float32(0.5),
        "double": np.float64(0.25),
        "yes": np.bool_(True),
        "array": np.array([[1, 2], [3, 4]]),
        "tuple": (1, ("b", None)),
        "enum": {"role": Role.USER},
        "when": datetime.datetime(2024, 1, 2, 3, 4),
        "day": datetime.date(2024, 1, 2),
        "stamp": pd.Timestamp("2024-01-02"),
        "moment": np.datetime64("2024-01-02"),
        "exact": decimal.Decimal("0.10"),
        "id": uuid.UUID(int=1),
    }
    [fields] = fields_of([odd])
    assert fields == {
        "text": "a",
        "integer": 3,
        "float": 0.5,
        "double": 0.25,
        "yes": True,
        "array": [[1, 2], [3, 4]],
        "tuple": [1, ["b", None]],
        "enum": {"role": "user"},
        "when": "2024-01-02 03:04:00",
        "day": "2024-01-02",
        "stamp": "2024-01-02 00:00:00",
        "moment": "2024-01-02",
        "exact": "0.10",
        "id": "00000000-0000-0000-0000-000000000001",
    }
    assert json.loads(json.dumps(fields)) == fields
    assert {type(value) for value in fields.values()} == {str, int, float, bool, list, dict}


def test_missing_value_of_a_data_frame_is_a_missing_field():
    frame = pd.DataFrame(
        {
            "text": ["a", "b", "c"],
            "score": [1.0, np.nan, 2.0],
            "count": pd.array([1, None, 3], dtype="Int64"),
            "when": [pd.Timestamp("2024-01-02"), pd.NaT, None],
            "tags": [["x"], None, ["y", "z"]],
        }
    )
    first, second, third = fields_of(frame)
    assert first == {"text": "a", "score": 1.0, "count": 1, "when": "2024-01-02 00:00:00", "tags": ["x"]}
    assert second == {"text": "b"}
    assert third == {"text": "c", "score": 2.0, "count": 3, "tags": ["y", "z"]}


def test_transform_of_a_dataset_creates_its_rows():
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    upper = rows.with_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    assert fields_of(upper) == [{"text": "A"}, {"text": "B"}]


deep: list = []
for _ in range(200):
    deep = [deep]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "x": float("nan")}, r"train\[1\]: x is nan, which is not a number"),
        ({"text": "a", "x": [1, {"y": b"z"}]}, r"train\[1\]: x\[1\].y is an object of type bytes.*decode it"),
        ({"text": "a", "x": {1, 2}}, r"train\[1\]: x is an object of type set, which is not a JSON value"),
        ({"text": "a", "x": object()}, r"train\[1\]: x is an object of type object"),
        ({"text": "a", 7: "b"}, r"train\[1\]: the record has the key 7: keys must be texts"),
        ({"text": "a", "x": {7: "b"}}, r"train\[1\]: x has the key 7: keys must be texts"),
        ({"text": "a\ud800"}, r"train\[1\]: not UTF-8 text \(half of a character"),
        ({"text": "a", "x": deep}, r"train\[1\]: nested too deeply"),
        ({"text": "a", "x": 10**5000}, r"train\[1\]: not a JSON value"),
        ("a", r"train\[1\]: a record must be a dict, not str"),
        ({"note": "a"}, r"train\[1\]: a record with the fields 'note' matches no known record format"),
    ],
    ids=["nan", "bytes", "set", "object", "key", "inner key", "surrogate", "deep", "huge", "text", "shape"],
)
def test_bad_record_is_named_and_can_be_skipped(row, message):
    rows = [{"text": "good"}, row, {"text": "better"}]
    with pytest.raises(DataError, match=message):
        list(source(rows))
    lenient = source(rows, on_bad="skip")
    assert [record.origin for record in lenient] == ["train[0]", "train[2]"]
    assert lenient.skipped.count == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((row for row in ROWS), "can be read only once.*\n.*pass the function that creates it"),
        (iter(ROWS), "can be read only once"),
        ("train.jsonl", r"is a string \('train.jsonl'\), not records\n.*data.train: PATH"),
        ({"prompt": ["a"], "completion": ["b"]}, "is a mapping, not a list of records"),
        (SimpleNamespace(), r"is an object of type SimpleNamespace, not records\n.*list of dicts"),
        (list, "is an object of type type, not records"),
        (3, "is an object of type int"),
    ],
    ids=["generator", "iterator", "path", "columns", "object", "class", "number"],
)
def test_unreadable_object_is_rejected_immediately(rows, message):
    with pytest.raises(DataError, match=message):
        PythonRows("train", rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda path: ROWS, "cannot be called without arguments"),
        (lambda: {"text": "a"}, "the function passed as data 'train' returned an object of type dict"),
        (lambda: None, "returned an object of type NoneType"),
        (pd.DataFrame([[1, 2]]), "the column name 0 is not a string"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns are named 'a'"),
        ([], "contains no records"),
    ],
    ids=["argument", "dict", "none", "unnamed", "twice", "empty"],
)
def test_unreadable_object_is_rejected_on_first_pass(rows, message):
    with pytest.raises(DataError, match=message):
        list(source(rows))


def test_error_names_placeholder_without_object():
    with pytest.raises(
        DataError,
        match=r"python:train:0{16} is a placeholder for records from Python.*\n.*data=\{'train': rows\}",
    ):
        open_source("python:train:" + "0" * 16)


def test_placeholders_round_trip():
    digest = PythonRows("train", ROWS).digest()
    assert make_placeholder("train", digest) == f"python:train:{digest[:16]}"
    assert parse_placeholder(make_placeholder("a.b-c_1", digest)) == ("a.b-c_1", digest[:16])
    assert parse_placeholder("python:train") == ("train", None)
    for text in ("python:", "python:a:b", "train", "python:a b", "python:a:" + "0" * 17, 3, None):
        assert parse_placeholder(text) is None
    assert is_object_name("short")
    assert not is_object_name("a:0123456789abcdef")


def test_files_and_objects_are_mixed_by_weight(jsonl):
    given = {"extra": PythonRows("extra", [{"text": "x"}, {"text": "y"}])}
    records = list(open_source([str(jsonl), "python:extra"], given=given))
    assert [record.origin for record in records[-2:]] == ["extra[0]", "extra[1]"]
    assert len(records) == 9


@pytest.mark.parametrize("kind", ["list", "Dataset", "DataFrame"])
def test_tokens_masks_and_columns_equal_those_of_the_file(kind, jsonl, tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_TOKENS", str(tmp_path / "tokens"))
    rows = {"list": list, "Dataset": datasets.Dataset.from_list, "DataFrame": pd.DataFrame}[kind](ROWS)
    stores = []
    for spec in (str(jsonl), "python:train"):
        config = validate_config(
            {
                "model": str(tiny_directory),
                "data": {"train": spec, "max_length": 64},
                "run": {"name": "x", "steps": 1, "batch_size": 1},
            }
        )
        data = RunData(config, Needs(), given={"train": PythonRows("train", rows)})
        data.set_tokenizer(load_model_tokenizer(str(tiny_directory)))
        stores.append(data.prepare_source("train").store)
    file, objects = stores
    assert objects.digest == file.digest
    assert len(objects) == len(file) == 7
    assert objects.notes["unread"] == file.notes["unread"]
    assert objects.origin(3) == "train[3]"
    assert (np.asarray(objects.bounds) == np.asarray(file.bounds)).all()
