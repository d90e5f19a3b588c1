"""Every file format gives the same records in order with their origins; errors name file and line."""

import csv
import gzip
import io
import json
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from tiny import read_records
from whet.data.sources import compressed_files, json_array, readers
from whet.data.sources.source import open_source
from whet.errors import DataError

CHAT = [{"role": "user", "content": "Grüße, 你好"}, {"role": "assistant", "content": 'a "b"\n,\tc'}]
RECORDS = [
    {"messages": CHAT, "group": "x"},
    {"messages": CHAT[::-1], "group": ""},
    {"messages": CHAT * 2, "group": "née"},
]


def as_jsonl(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def as_csv(records, delimiter=","):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(records[0])
    for record in records:
        writer.writerow([v if isinstance(v, str) else json.dumps(v) for v in record.values()])
    return text.getvalue().encode()


def as_parquet(records, rows=2):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), sink, row_group_size=rows)
    return sink.getvalue()


FORMATS = {
    ".jsonl": as_jsonl,
    ".ndjson": as_jsonl,
    ".json": lambda records: json.dumps(records).encode(),
    ".csv": as_csv,
    ".tsv": lambda records: as_csv(records, "\t"),
    ".parquet": as_parquet,
}


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def fields(path):
    return [record.fields for record in read_records(path)]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_every_format_gives_the_same_records(tmp_path, suffix, packed):
    content = FORMATS[suffix](RECORDS)
    path = tmp_path / f"DATA{suffix.upper()}{packed}"
    if packed == ".zst":
        if suffix == ".parquet":
            path.write_bytes(b"")
            with pytest.raises(DataError, match=r"Parquet inside .zst cannot be read"):
                read_records(str(path))
            return
        with pyarrow.output_stream(str(path), compression="zstd") as out:
            out.write(content)
    else:
        path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    assert fields(str(path)) == RECORDS


def test_source_can_be_read_again_and_has_a_digest(tmp_path):
    import hashlib

    path = write(tmp_path, "a.jsonl", as_jsonl(RECORDS))
    source = open_source(path)
    first = list(source)
    assert list(source) == first
    assert [record.origin for record in first] == [f"{path}:{n}" for n in (1, 2, 3)]
    assert {record.record_format for record in first} == {"messages"}
    assert source.digest() == hashlib.sha256(as_jsonl(RECORDS)).hexdigest()
    assert source.name == path


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a"}\n{"text": "b"}\n',
        '[{"text": "a"},\n {"text": "b"}]',
        '\n [ {"text": "a"} , {"text": "b"} ] \n',
        '{"data": [{"text": "a"}, {"text": "b"}]}',
        '{\n "version": 1,\n "tags": ["x"],\n "rows": [{"text": "a"}, {"text": "b"}]\n}',
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_file_is_an_array_contains_one_or_is_json_lines(tmp_path, content, mark):
    path = write(tmp_path, "a.json", mark + content.encode())
    assert fields(path) == [{"text": "a"}, {"text": "b"}]


def test_json_file_may_be_one_record(tmp_path):
    path = write(tmp_path, "a.json", json.dumps({"messages": CHAT}, indent=1))
    assert [(r.fields, r.origin) for r in read_records(path)] == [({"messages": CHAT}, f"{path}#1")]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_array_is_read_equally_with_any_chunk_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(json_array, "CHUNK", chunk)
    records = [
        {"text": text, "n": n} for n, text in enumerate(["", "a]b", '"},{', "é你\U0001f600", "\\", "x" * 300])
    ]
    for indent in (None, 2):
        path = write(tmp_path, "a.json", json.dumps(records, indent=indent, ensure_ascii=False))
        assert fields(path) == records


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'[{"text": "a"}]\n', r"a.jsonl:1: a record must be a JSON object, not list\n.*needs the suffix .json"),
        ("a.jsonl", b'\n\n"text"\n', r"a.jsonl:3: a record must be a JSON object, not str"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl:1: not UTF-8 text \(invalid start byte at byte 11\)"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1: not UTF-8 text \(lone surrogate"),
        ("a.jsonl", b'{"text": "a\tb"}\n', r"not valid JSON \(Invalid control character at column 12\)"),
        ("a.jsonl", b'{"text": "a\0b"}\n', r"a.jsonl:1: not valid JSON \(it contains null bytes\)"),
        ("a.jsonl", b'{"text": "a", "n": NaN}\n', r"a.jsonl:1: not valid JSON \(NaN is not a JSON number\)"),
        ("a.jsonl", b'{"text": "a", "n": -Infinity}\n', r"a.jsonl:1: not valid JSON \(-Infinity is no"),
        ("a.jsonl", b'{"text": "a", "n": 1e999}\n', r"a.jsonl:1: .*the number 1e999 is too large"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", r"a.jsonl:1: not valid JSON \(Exceeds"),
        ("a.jsonl", b'{"text": ' + b"[" * 200 + b"]" * 200 + b"}\n", r"a.jsonl:1: nested too deeply"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1: nested too deeply"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), r"a.jsonl is UTF-16 text\n.*convert it to UTF-8"),
        ("a.jsonl", b"", "a.jsonl contains no records"),
        ("a.jsonl", b"\n \n", "a.jsonl contains no records"),
        ("a.json", b"", "a.json contains no records"),
        ("a.json", b"[]", "a.json contains no records"),
        ("a.json", b'[{"text": "a"},\n{"text" "b"}]', r"a.json:2: not valid JSON"),
        ("a.json", b'[{"text": "a"},\n]', r"a.json:2: not valid JSON"),
        ("a.json", b'[{"text": "a"}\n', r"a.json:2: not valid JSON"),
        ("a.json", b'[{"text": "a"}] x', r"a.json:1: .*extra data after the end of the array"),
        ("a.json", b'[{"text": "a"}, 3]', r"a.json#2: a record must be a JSON object, not int"),
        ("a.json", b'[{"text": "a"}, {"text": NaN}]', r"a.json:1: not valid JSON \(NaN"),
        ("a.json", b'[{"text": "a"}, {"text": "\xff"}]', r"a.json#2: not UTF-8"),
        ("a.json", b'{"question": "x"}', r"a.json#1: a record with the fields 'question' matches no known record format"),
        ("a.json", b"3", "a.json: a record must be a JSON object, not int"),
        ("a.json", b"{", "a.json: not valid JSON"),
        ("a.csv", b"", "a.csv contains no records"),
        ("a.csv", b"text\n", "a.csv contains no records"),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: the header must name each column exactly once"),
        ("a.csv", b"text,\na,b\n", "a.csv:1: the header must name each column exactly once"),
        ("a.csv", b'text,n\n"a\nb",1\nc\n', r"a.csv:4: the row has 1 cells, but the header names 2 columns"),
        ("a.csv", b"text,n\na,b,1\n", r"a.csv:2: the row has 3 cells, but the header names 2 columns\n.*double quotes"),
        ("a.csv", b'text\n"a" b\n', r"a.csv:2: not valid CSV"),
        ("a.csv", b'text\na\n"b\nc\n', r"a.csv:3: not valid CSV \(unexpected end of data\)"),
        ("a.csv", b'"text\n', r"a.csv:1: not valid CSV"),
        ("a.csv", b"text\n\xff\n", r"a.csv:2: column text is not UTF-8 text"),
        ("a.csv", b"text\na\0\n", r"a.csv:2: column text contains a null byte"),
        ("a.csv", b"messages\nhello\n", r"a.csv:2: messages: not valid JSON"),
        ("a.csv", b"text,auth_weight,prov_entropy\na,much,0\n", r"a.csv:2: auth_weight must be a number, not 'much'"),
        ("a.txt", b"\xff", "a.txt: not UTF-8 text"),
        ("a.txt", b" \n", "a.txt contains no records"),
        ("a.parquet", b"PAR1 but not really", "a.parquet cannot be read"),
        ("a.parquet", b"", "a.parquet cannot be read"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12], "a.jsonl.gz cannot be read: Compressed file ended"),
        ("a.jsonl.zst", b"not zstd", "a.jsonl.zst cannot be read"),
        ("a.xlsx", b"", r"a.xlsx: whet cannot read .xlsx files\n.*supported: .jsonl"),
        ("records", b"", r"records: whet cannot read files without a suffix"),
    ],
)  # fmt: skip
def test_error_names_broken_file_and_location(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read_records(write(tmp_path, name, content))
    assert caught.value.exit_code == 2


def test_truncated_zst_file_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    with pyarrow.output_stream(str(path), compression="zstd") as out:
        out.write(b"".join(b'{"text": "%d"}\n' % n for n in range(50_000)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="cannot be read: Truncated"):
        read_records(str(path))


def test_line_beyond_the_limit_is_an_error_and_reading_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed_files, "MAX_RECORD_BYTES", 40)
    lines = ['{"text": "a"}', '{"text": "' + "b" * 60 + '"}', '{"text": "c"}']
    for name, head in (("a.jsonl", []), ("a.csv", ["text"])):
        path = write(tmp_path, name, "\n".join([*head, *lines]))
        line = 2 + len(head)
        with pytest.raises(DataError, match=rf"{name}:{line}: the line has more than 40 bytes"):
            read_records(path)
        source = open_source(path, on_bad="skip")
        assert len(list(source)) == 2
        assert source.skipped.count == 1


def test_cells_are_text_except_in_typed_columns(tmp_path):
    path = write(tmp_path, "a.csv", 'input,label,id\nx,3,007\ny,03,\nz,-1,"1,2"\n')
    assert fields(path) == [
        {"input": "x", "label": 3, "id": "007"},
        {"input": "y", "label": "03", "id": ""},
        {"input": "z", "label": "-1", "id": "1,2"},
    ]
    path = write(tmp_path, "b.csv", 'features,target\n"[1, 2.5]",3\n')
    assert fields(path) == [{"features": [1.0, 2.5], "target": 3.0}]
    path = write(tmp_path, "c.tsv", "text\tauth_weight\tprov_entropy\na\t0.5\t1e-3\nb\t\t\n")
    assert fields(path) == [{"text": "a", "auth_weight": 0.5, "prov_entropy": 0.001}, {"text": "b"}]
    path = write(
        tmp_path, "d.csv", 'prompt,n\n[1] Introduction,1\n"[{""role"": ""user"", ""content"": ""hi""}]",2\n'
    )
    assert [f["prompt"] for f in fields(path)] == ["[1] Introduction", [{"role": "user", "content": "hi"}]]


def test_table_rows_are_json_without_nulls(tmp_path):
    import datetime
    import decimal

    rows = [
        {"text": "a", "when": datetime.date(2024, 1, 2), "price": decimal.Decimal("1.50"), "raw": b"\xff", "note": None},
        {"text": "b", "when": None, "price": None, "raw": None, "note": {"deep": [datetime.date(2024, 1, 3)]}},
    ]  # fmt: skip
    path = write(tmp_path, "a.parquet", as_parquet(rows))
    assert fields(path) == [
        {"text": "a", "when": "2024-01-02", "price": "1.50"},
        {"text": "b", "note": {"deep": ["2024-01-03"]}},
    ]
    assert [record.origin for record in read_records(path)] == [f"{path}#1", f"{path}#2"]


def test_objects_of_a_table_have_only_their_own_keys(tmp_path):
    def chat(**arguments):
        call = {"type": "function", "function": {"name": "tool", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]}

    rows = [chat(city="Paris"), chat(lamp="hall", levels=[1, None, 3])]
    assert fields(write(tmp_path, "a.parquet", as_parquet(rows))) == rows


def test_error_names_table_row_with_broken_text(tmp_path):
    good = pyarrow.array(["a", "bad", "c"])
    buffers = good.buffers()
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(),
        3,
        [None, buffers[1], pyarrow.py_buffer(buffers[2].to_pybytes().replace(b"bad", b"b\xffd"))],
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"), on_bad="skip")
    assert [record.fields["text"] for record in source] == ["a", "c"]
    assert "a.parquet#2: not UTF-8 text" in source.skipped.reasons[0]


def test_table_with_a_date_beyond_python_range_is_read(tmp_path):
    seconds = pyarrow.array([0, 10030 * 365 * 86400]).cast(pyarrow.timestamp("s"))
    deep = pyarrow.StructArray.from_arrays([seconds], ["when"])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "when": seconds}), tmp_path / "a.parquet")
    assert fields(str(tmp_path / "a.parquet")) == [
        {"text": "a", "when": "1970-01-01 00:00:00"},
        {"text": "b", "when": "11993-05-05 00:00:00.000"},
    ]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "deep": deep}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet#2: cannot be read"):
        fields(str(tmp_path / "b.parquet"))


def test_table_with_duplicate_column_names_is_rejected(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: two columns are named 'text'"):
        fields(str(tmp_path / "a.parquet"))


def test_plain_text_is_one_record(tmp_path):
    path = write(tmp_path, "a.txt", "\ufeffOnce upon\na time\n")
    assert [(r.fields, r.origin) for r in read_records(path)] == [({"text": "Once upon\na time\n"}, path)]


def test_long_plain_text_is_split_between_lines(tmp_path):
    lines = [f"line {n} " + "x" * 500 + "\n" for n in range(1, 5000)]
    path = write(tmp_path, "a.txt", "".join(lines))
    records = read_records(path)
    assert len(records) == 3
    assert "".join(record.fields["text"] for record in records) == "".join(lines)
    assert all(len(record.fields["text"]) <= 2**20 for record in records)
    for record in records:
        number = int(record.origin.rpartition(":")[2])
        assert record.fields["text"].startswith(f"line {number} ")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    records = [{"text": f"{n} " + "word " * 400} for n in range(15_000)]  # 30 MB
    content = as_parquet(records, 15_000) if suffix == ".parquet" else FORMATS[suffix](records)
    path = write(tmp_path, f"a{suffix}", content)
    del content
    count = len(records)
    del records
    tracemalloc.start()
    assert sum(1 for _ in open_source(path)) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


@pytest.mark.parametrize(
    ("module", "name"), [("pyarrow", "a.parquet"), ("pyarrow", "a.jsonl.zst"), ("datasets", "hf:x")]
)
def test_error_names_missing_package_and_extra(tmp_path, monkeypatch, module, name):
    import sys

    path = name if name.startswith("hf:") else write(tmp_path, name, b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf'{module}.*\n.*pip install "whet\[data\]"'):
        read_records(path)


def test_json_object_size_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_OBJECT_BYTES", 30)
    with pytest.raises(DataError, match=r"one JSON object of more than 30 bytes\n.*JSON Lines"):
        read_records(write(tmp_path, "a.json", '{"data": [{"text": "aaaaaaaaaaaaaaaaaaaaaa"}]}'))
