"""`whet data clean`: duplicates against brute force over all pairs, and overlap with evaluation sets against a search."""

import gzip
import json
import random
import sys
import unicodedata

import pytest

import whet
from whet.data.clean.clean_data import clean_data
from whet.data.clean.near_duplicates import choose_bands
from whet.data.clean.record_turns import Turn, record_turns
from whet.data.sources.source import Record
from whet.errors import ConfigError, DataError, WhetError


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def removals(path):
    """Return the removed records by line number."""
    return {int(row["origin"].rpartition(":")[2]): row for row in read(path)}


def chat(user, assistant, *, system=None):
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages]}


def sentence(rng, count):
    return " ".join(f"w{rng.randrange(500)}" for _ in range(count))


def change(rng, text, count):
    words = text.split()
    for _ in range(count):
        words[rng.randrange(len(words))] = f"x{rng.randrange(500)}"
    return " ".join(words)


# --- near duplicates


def shingles(text, size):
    words = text.split()
    size = min(size, len(words))
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def jaccard(one, other, size):
    first, second = shingles(one, size), shingles(other, size)
    return len(first & second) / len(first | second)


def brute_force(rows, threshold, size):
    """Return the records to remove, and the similarities of all pairs: every record against all kept ones."""
    values, kept, removed = {}, [], set()
    for index, row in enumerate(rows):
        for other in range(index):
            parts = [jaccard(row[name], rows[other][name], size) for name in ("prompt", "completion")]
            values[index, other] = min(parts)
        if any(values[index, other] >= threshold for other in kept):
            removed.add(index)
        else:
            kept.append(index)
    return removed, values


@pytest.mark.parametrize(("threshold", "size"), [(0.8, 5), (0.5, 3), (0.9, 1), (1.0, 5)])
def test_near_duplicates_equal_brute_force(tmp_path, threshold, size):
    rng = random.Random(round(100 * threshold))
    rows = [{"prompt": sentence(rng, 30), "completion": sentence(rng, 20)} for _ in range(60)]
    while len(rows) < 240:
        row = rng.choice(rows)
        rows.append({name: change(rng, text, rng.choice([0, 1, 1, 2, 4])) for name, text in row.items()})
    expected, values = brute_force(rows, threshold, size)
    report = clean_data(
        write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", threshold=threshold, shingle=size
    )
    removed = removals(tmp_path / "out.removed.jsonl")
    for line, row in removed.items():
        of = int(row["duplicate_of"].rpartition(":")[2])
        assert of not in removed, "a removed record repeats one that is kept"
        assert values[line - 1, of - 1] >= threshold, "no pair below the threshold is removed"
        if row["reason"] == "near duplicate":
            assert row["similarity"] == pytest.approx(values[line - 1, of - 1], abs=1e-4)
    assert {line - 1 for line in removed} == expected
    assert report.kept == len(rows) - len(expected) < len(rows)


def test_a_near_duplicate_of_a_removed_record_stays(tmp_path):
    """A - B - C, where only neighbors are similar: B goes, C is not similar to what is left."""
    words = [f"w{number}" for number in range(60)]
    rows = [{"text": " ".join(words[start : start + 45])} for start in (0, 5, 10)]
    clean_data(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", threshold=0.75)
    assert read(tmp_path / "out.jsonl") == [rows[0], rows[2]]


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold(threshold):
    bands, rows = choose_bands(threshold)
    assert bands * rows <= 128
    assert bands >= 2
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


LONG = "Read the following review of a product carefully and say in one word whether the customer was happy with it: "


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(LONG + "good", "yes"), chat(LONG + "good", "no")),  # a long prompt hides no other answer
        (chat("Hi there", "Hello", system=LONG * 5), chat("Bye now", "See you", system=LONG * 5)),
        (chat("Hi", "Hello", system=LONG), chat("Hi", "Hello", system="Be brief.")),
        ({"input": LONG, "label": "a"}, {"input": LONG, "label": "b"}),
        ({"input": LONG, "label": 0}, {"input": LONG + "now", "label": 1}),
        ({"prompt": LONG, "chosen": LONG, "rejected": "no"}, {"prompt": LONG, "chosen": "no", "rejected": LONG}),
        ({"features": [1, 2], "target": 1}, {"features": [1, 3], "target": 1}),
        (chat("Hi", "Hello") | {"label": True}, chat("Hi", "Hello") | {"label": False}),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [1, 2, 3]}),
        ({"prompt": "2+2", "completion": "4"}, {"prompt": "2*2", "completion": "4"}),
        ({"prompt": "Name a prime.", "answer": "2"}, {"prompt": "Name a prime.", "answer": "3"}),
        ({"text": "今日は天気がいいですね"}, {"text": "明日は雨が降るでしょう"}),
    ],
)  # fmt: skip
def test_records_that_differ_stay(tmp_path, one, other):
    report = clean_data(write(tmp_path / "in.jsonl", [one, other]))
    assert (report.records, report.kept) == (2, 2)


# --- exact duplicates

HI = chat("Hi", "Hello.")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (HI, {"prompt": "Hi", "completion": "Hello."}),
        (HI, {"instruction": "Hi", "output": " Hello.\n"}),
        (HI, {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}),
        (HI, {**HI, "id": 17, "source": "web"}),
        ({"text": "caf\u00e9"}, {"text": "cafe\u0301"}),
        ({"text": "a\tb\n\nc"}, {"text": " a b c "}),
        ({"input": "Great!", "label": "good"}, {"input": "Great!", "label": "good", "id": 1}),
        ({"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}),
        ({"features": [1, 2], "target": 1}, {"features": [1.0, 2.0], "target": 1.0}),
        ({"question": "Who?", "reply": "Me"}, {"question": "Who?", "reply": "Me"}),  # of no known format
    ],
)
def test_exact_duplicates_in_any_format(tmp_path, one, other):
    report = clean_data(write(tmp_path / "in.jsonl", [one, other]), tmp_path / "out.jsonl", near=False)
    assert report.removed == {"exact duplicate": 1}
    assert read(tmp_path / "out.jsonl") == [one]


def test_case_matters_for_exact_duplicates_only(tmp_path):
    rows = [
        {"text": "Polish the furniture in the large room"},
        {"text": "polish the furniture in the large room"},
    ]
    source = write(tmp_path / "in.jsonl", rows)
    assert clean_data(source, near=False).kept == 2
    assert clean_data(source).removed == {"near duplicate": 1}


def test_copies_of_a_near_duplicate_repeat_the_kept_record(tmp_path):
    text = sentence(random.Random(0), 60)
    rows = [{"text": text}, {"text": f"{text} x"}, {"text": f"{text} x"}]
    clean_data(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert [row["duplicate_of"] for row in read(tmp_path / "out.removed.jsonl")] == [
        f"{tmp_path}/in.jsonl:1"
    ] * 2


# --- evaluation sets


@pytest.mark.parametrize("ngram", [3, 13])
def test_contaminated_records_equal_a_search_in_the_text(tmp_path, ngram):
    rng = random.Random(ngram)
    tests = [sentence(rng, rng.randint(5, 40)) for _ in range(30)]
    rows = []
    for _ in range(120):
        start, piece = rng.randrange(20), rng.choice(tests).split()
        shared = piece[start : start + rng.randint(1, 20)] if rng.random() < 0.5 else []
        rows.append(f"{sentence(rng, 10)} {' '.join(shared)} {sentence(rng, 10)}")

    def contains(text, test):
        words = test.split()
        pieces = (" ".join(words[at : at + ngram]) for at in range(len(words) - ngram + 1))
        return any(f" {piece} " in f" {text} " for piece in pieces)

    source = write(tmp_path / "in.jsonl", [{"text": text.upper().replace(" ", ", ", 3)} for text in rows])
    test = write(tmp_path / "test.jsonl", [{"text": text} for text in tests])
    clean_data(source, tmp_path / "out.jsonl", against=[test], ngram=ngram, near=False)
    removed = removals(tmp_path / "out.removed.jsonl")
    texts = [" ".join(text.split()) for text in rows]
    expected = {
        line for line, text in enumerate(texts, start=1) if any(contains(text, each) for each in tests)
    }
    assert {line for line, row in removed.items() if row["reason"] == "contaminated"} == expected
    assert expected
    for line, row in removed.items():
        item = tests[int(row["duplicate_of"].rpartition(":")[2]) - 1]
        assert len(row["overlap"].split()) == ngram
        assert row["overlap"] in item
        assert row["overlap"] in texts[line - 1]


def test_the_same_question_is_contamination_in_any_format(tmp_path):
    test = write(tmp_path / "test.jsonl", [{"prompt": "17+25=", "completion": "42"}, {"text": "Yes"}])
    rows = [chat("17+25=", "It is 42."), chat("17-25=", "-8"), {"text": "yes"}, {"text": "Yes, he said."}]
    report = clean_data(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", against=[test])
    assert report.removed == {"contaminated": 2}
    assert read(tmp_path / "out.jsonl") == [rows[1], rows[3]]
    assert report.evaluation_records == {str(test): 2}


def test_a_shared_system_prompt_is_not_contamination(tmp_path):
    test = write(tmp_path / "test.jsonl", [chat("Hi", "Hello", system=LONG)])
    report = clean_data(write(tmp_path / "in.jsonl", [chat("Bye", "Later", system=LONG)]), against=[test])
    assert report.kept == 1


def test_warns_of_a_template(tmp_path):
    test = write(tmp_path / "test.jsonl", [{"text": LONG + "abc"}])
    rows = [{"text": f"{LONG} {number}"} for number in range(12)] + [{"text": "other"}]
    report = clean_data(write(tmp_path / "in.jsonl", rows), against=[test])
    assert "12 of the 12 contaminated records share the same words" in report.warning()
    assert report.to_json()["common_overlap"]["records"] == 12


# --- files


def test_records_keep_their_fields_and_order_in_every_file_format(tmp_path):
    """Every reader gives the same result, and values that JSON can hold survive."""
    rng = random.Random(3)
    rows = [{"id": n, "text": sentence(rng, 30), "x": {"a": [1.5, None, "é"]}} for n in range(20)]
    rows = [*rows, rows[4], {**rows[7], "id": 99}]
    write(tmp_path / "in.jsonl", rows)
    (tmp_path / "in.json").write_text(json.dumps(rows))
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "a.jsonl", rows[:9])
    write(tmp_path / "parts" / "b.ndjson", rows[9:])
    for number, source in enumerate(("in.jsonl", "in.json", "in.jsonl.gz", "parts", "parts/*")):
        out = tmp_path / f"out{number}.jsonl"
        report = clean_data(tmp_path / source, out)
        assert read(out) == rows[:20]
        assert report.removed == {"exact duplicate": 2}


def test_parquet_and_csv(tmp_path):
    from pyarrow import parquet

    rows = [{"prompt": f"question number {n}", "completion": f"answer {n}", "score": n / 2} for n in range(5)]
    rows[2]["note"] = "späť"
    source = write(tmp_path / "in.jsonl", [*rows, rows[0]])
    clean_data(source, tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [{k: v for k, v in row.items() if v is not None} for row in table] == rows
    clean_data(tmp_path / "out.parquet", tmp_path / "again.jsonl")
    assert read(tmp_path / "again.jsonl") == rows
    (tmp_path / "in.csv").write_text('prompt,completion\n"a, b",c\n"a, b",c\n')
    clean_data(tmp_path / "in.csv", tmp_path / "csv.jsonl")
    assert read(tmp_path / "csv.jsonl") == [{"prompt": "a, b", "completion": "c"}]
    mixed = write(tmp_path / "mixed.jsonl", [{"text": "a b", "x": 1}, {"text": "c d", "x": "one"}])
    with pytest.raises(DataError, match="do not fit into one table"):
        clean_data(mixed, tmp_path / "mixed.parquet")
    assert sorted(path.name for path in tmp_path.glob("*mixed*")) == ["mixed.jsonl"]


def test_nothing_is_overwritten_and_nothing_is_left_after_an_error(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"text": "a b c"}])
    before = {"in.jsonl"}
    for arguments, words in (
        ({"output": source}, "already exists"),
        ({"output": tmp_path / "out.txt"}, "JSON Lines or Parquet"),
        ({"output": tmp_path / "out.jsonl", "removed": tmp_path / "out.jsonl"}, "file of their own"),
        ({"output": tmp_path / "out.jsonl", "removed": source}, "already exists"),
        ({"output": tmp_path / "out.jsonl", "against": [source]}, "no record would be kept"),
        ({"output": tmp_path / "out.jsonl", "against": [tmp_path / "tets.jsonl"]}, "does not exist"),
        ({"threshold": 0.0}, "threshold must be above 0"),
        ({"shingle": 0}, "shingle must be at least 1"),
        ({"ngram": 0, "against": [source]}, "ngram must be at least 1"),
    ):
        with pytest.raises(WhetError, match=words):
            clean_data(source, **arguments)
        assert {path.name for path in tmp_path.iterdir()} == before
    (tmp_path / "bad.jsonl").write_text('{"text": "a b c"}\n{"text": 1}\nx\n{"text": "d e f"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: .*text"):
        clean_data(tmp_path / "bad.jsonl", tmp_path / "out.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "bad.jsonl"}
    report = clean_data(tmp_path / "bad.jsonl", tmp_path / "out.jsonl", skip_bad=True)
    assert report.removed == {"bad record": 2}
    assert [row["origin"] for row in read(tmp_path / "out.removed.jsonl")] == [
        f"{tmp_path}/bad.jsonl:2", f"{tmp_path}/bad.jsonl:3",
    ]  # fmt: skip


def test_result_is_deterministic(tmp_path):
    rng = random.Random(5)
    rows = [{"text": sentence(rng, 40)} for _ in range(50)]
    rows += [{"text": change(rng, rng.choice(rows)["text"], 1)} for _ in range(50)]
    source = write(tmp_path / "in.jsonl", rows)
    for name in ("a", "b"):
        whet.clean_data(source, tmp_path / f"{name}.jsonl")
    for suffix in (".jsonl", ".removed.jsonl"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    source = write(tmp_path / "in.jsonl", [{"text": "a b c"}])
    with pytest.raises(DataError) as raised:
        clean_data(source)
    assert 'pip install "whet[clean]"' in raised.value.hint
    assert clean_data(source, near=False).kept == 1


def test_turns_leave_out_fields_that_are_not_read():
    fields = {
        **chat("Hi", "Hello.", system="Be kind."),
        "id": 1,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    roles = [turn.role for turn in record_turns(Record(fields, "x:1"))]
    assert roles == ["tools", "system", "user", "assistant"]
    decomposed = unicodedata.normalize("NFD", "é")
    assert record_turns(Record({"text": decomposed}, "x:1")) == [Turn("text", decomposed)]
    with pytest.raises(DataError, match="x:1"):
        record_turns(Record({"messages": []}, "x:1"))


def test_settings_are_checked_before_files_are_read(tmp_path):
    with pytest.raises(ConfigError, match="threshold"):
        clean_data(write(tmp_path / "in.jsonl", [{"text": "a"}]), threshold=1.5)
