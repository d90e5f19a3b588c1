"""Streams of records: every format from every position, mixtures by weight, passes, and cheap identities."""

import csv
import gzip
import json
from collections import Counter

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from whet.config.data import WeightedSource
from whet.data.sources.record_stream import RecordStream, StreamedSource
from whet.data.sources.source import open_source
from whet.data.sources.source_mixing import weight_at
from whet.errors import ConfigError

TEXTS = [f"text {number}" for number in range(40)]


def write_jsonl(path):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    lines[7] += "\n"  # an empty line
    path.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")


def write_gzip(path):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)


def write_zstd(path):
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode())


def write_parquet(path):
    parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=7)


def write_csv(path):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([f"{text}"] for text in TEXTS)])


def write_json(path):
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))


def write_dataset(path):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)


def write_hub(path):
    path.mkdir()
    for shard in range(4):
        rows = TEXTS[shard * 10 : shard * 10 + 10]
        parquet.write_table(pyarrow.table({"text": rows}), path / f"train-{shard:05d}-of-00004.parquet")


FORMATS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gzip,
    "a.jsonl.zst": write_zstd,
    "a.parquet": write_parquet,
    "a.csv": write_csv,
    "a.json": write_json,
    "saved": write_dataset,
    "hub": write_hub,
}


def read(stream, count, step=0):
    return [record.fields["text"] for record in stream.read(count, step=step)]


def open_stream(spec, seed=None, total_steps=100):
    return RecordStream(open_source(spec), seed=seed, total_steps=total_steps)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_continues_from_every_position(tmp_path, name, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    FORMATS[name](tmp_path / name)
    spec = f"hf-stream:{tmp_path / name}" if name == "hub" else str(tmp_path / name)
    stream = open_stream(spec)
    assert read(stream, 100) == TEXTS  # stops at the end of the pass
    stream.close()
    for start in (0, 1, 6, 7, 8, 13, 14, 20, 39):
        first = open_stream(spec)
        assert read(first, start) == TEXTS[:start]
        state = json.loads(json.dumps(first.state()))
        first.close()
        second = open_stream(spec)
        second.seek(state)
        assert read(second, 100) == TEXTS[start:]
        assert read(second, 100) == TEXTS
        second.close()


def test_jsonl_is_not_read_before_its_position(tmp_path):
    """The bytes before a position are skipped: even a bad line among them does no harm."""
    path = tmp_path / "a.jsonl"
    write_jsonl(path)
    stream = open_stream(str(path))
    read(stream, 20)
    state = stream.state()
    offset = state["sources"][0]["position"][0]
    stream.close()
    content = path.read_bytes()
    path.write_bytes(b"x" * offset + content[offset:])
    resumed = open_stream(str(path))
    resumed.seek(state)
    records = list(resumed.read(100, step=0))
    resumed.close()
    assert [record.fields["text"] for record in records] == TEXTS[20:]
    assert records[0].origin == f"{path}:22"  # line 8 is empty


def test_row_groups_before_a_position_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path)
    start = parquet.ParquetFile(path).metadata.row_group(2).column(0).dictionary_page_offset
    stream = open_stream(str(path))
    read(stream, 15)
    state = stream.state()
    stream.close()
    content = bytearray(path.read_bytes())
    content[4:start] = bytes(start - 4)  # the first two row groups
    path.write_bytes(content)
    resumed = open_stream(str(path))
    resumed.seek(state)
    assert read(resumed, 100) == TEXTS[15:]
    resumed.close()


def test_columns_are_renamed_in_streams(tmp_path):
    for name, write in (("a.jsonl", write_jsonl), ("a.csv", write_csv), ("a.parquet", write_parquet)):
        path = tmp_path / name
        write(path)
        content = path.read_bytes()
        if name != "a.parquet":
            path.write_bytes(content.replace(b'"text":', b'"body":').replace(b"text\r\n", b"body\r\n", 1))
        else:
            parquet.write_table(pyarrow.table({"body": TEXTS}), path)
        source = open_source(str(path), columns={"text": "body"})
        stream = RecordStream(source, seed=None, total_steps=1)
        assert read(stream, 100) == TEXTS
        stream.close()
        assert source.identity() != open_source(str(path)).identity()


@pytest.fixture
def weighted(tmp_path):
    """Return a function that opens two sources of different sizes with given weights."""
    for name, count in (("a", 70), ("b", 9)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name}{number}"}) + "\n" for number in range(count)))

    def open_weighted(a, b, **options):
        parts = [
            WeightedSource(source=str(tmp_path / f"{name}.jsonl"), weight=weight)
            for name, weight in (("a", a), ("b", b))
        ]
        return open_stream(parts, **options)

    return open_weighted


def test_weights_hold_at_every_point_also_across_small_blocks(weighted):
    stream = weighted(0.97, 0.03, seed=0)
    drawn = ""
    for block in range(200):
        drawn += "".join(text[0] for text in read(stream, 3, step=block))
        assert abs(drawn.count("b") - 0.03 * len(drawn)) < 2
    stream.close()


@pytest.mark.parametrize(
    ("weight", "points"),
    [
        ({0: 0.8, 50: 0.2}, {0: 0.8, 25: 0.5, 50: 0.2, 80: 0.2}),
        ({0.5: 0.4, 0.75: 0.1}, {0: 0.4, 50: 0.4, 60: 0.28, 75: 0.1, 99: 0.1}),
        ({10: 1, 20: 0, 0.3: 1}, {0: 1, 15: 0.5, 20: 0, 25: 0.5, 30: 1}),
        (0.3, {0: 0.3, 99: 0.3}),
    ],
)
def test_weights_change_linearly_between_steps(weight, points):
    for step, expected in points.items():
        assert weight_at(weight, step, total_steps=100) == pytest.approx(expected, abs=1e-12)


def test_shares_follow_the_schedule_within_binomial_bounds(weighted):
    """The expectation is summed in float64; the draws are far closer to it than independent ones would be."""
    stream = weighted({0: 0.9, 100: 0.1}, {0: 0.1, 0.5: 0.9, 100: 0.9}, seed=5)
    drawn, expected, variance = 0, 0.0, 0.0
    for step in range(0, 120, 4):
        texts = read(stream, 25, step=step)
        a = np.interp(step, [0, 100], [0.9, 0.1])
        b = np.interp(step, [0, 50, 100], [0.1, 0.9, 0.9])
        share = a / (a + b)
        drawn += sum(text[0] == "a" for text in texts)
        expected += 25 * share
        variance += 25 * share * (1 - share)
        assert abs(drawn - expected) <= min(2.0, 4 * variance**0.5)
    stream.close()


@pytest.mark.parametrize("weights", [({0: 0, 10: 1}, {0: 0, 5: 1}), ({0: 1, 0.355: 0}, {0: 1, 0.2: 0})])
def test_weights_that_are_all_zero_at_a_step_are_refused(weighted, weights):
    with pytest.raises(ConfigError, match="weights of all sources are 0 at step"):
        weighted(*weights)


def test_a_schedule_continues_exactly_and_is_deterministic(weighted):
    options = {"a": {0: 0.9, 100: 0.1}, "b": 0.5, "seed": 5}
    stream = weighted(**options)
    states, texts = [], []
    for step in range(20):
        states.append(json.loads(json.dumps(stream.state())))
        texts.append(read(stream, 7, step=step * 5))
    stream.close()
    for start in range(20):
        resumed = weighted(**options)
        resumed.seek(states[start])
        assert [read(resumed, 7, step=step * 5) for step in range(start, 20)] == texts[start:]
        resumed.close()


def test_a_mixture_repeats_each_source_in_passes(weighted):
    stream = weighted(1, 1, seed=2)
    counts = Counter(read(stream, 180))
    stream.close()
    assert sum(count for text, count in counts.items() if text[0] == "b") == 90
    assert {count for text, count in counts.items() if text[0] == "b"} == {10}
    assert {count for text, count in counts.items() if text[0] == "a"} == {1, 2}


def test_iterating_over_a_streamed_source_gives_its_first_records(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    source = open_source(str(tmp_path / "a.jsonl"))
    assert len(list(StreamedSource(source, buffer=15, skip_bad=False))) == 15
    assert len(list(StreamedSource(source, buffer=100, skip_bad=False))) == 40


def test_identity_notices_changes_without_reading_everything(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": f"{number:06d}" * 20}) + "\n" for number in range(5000)]
    path.write_text("".join(rows))

    def identity():
        return StreamedSource(open_source(str(path)), buffer=1, skip_bad=False).digest()

    before = identity()
    assert identity() == before
    for changed in ([*rows, rows[0]], [rows[1], *rows[1:]], [*rows[:-1], rows[0]]):
        path.write_text("".join(changed))
        assert identity() != before
    path.write_text("".join(rows))
    path.rename(tmp_path / "moved.jsonl")
    path = tmp_path / "moved.jsonl"
    assert identity() == before
