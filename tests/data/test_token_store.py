"""The token store: round trips, exact truncation, and reuse of existing stores."""

import itertools
import json
import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whet
from tiny import random_examples, run_config
from whet import storage
from whet.data.sources.source import open_source
from whet.data.tokens import eos_check
from whet.data.tokens.examples import Example, build_examples
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.token_store import open_store, write_store
from whet.errors import DataError


def example(length, supervised, origin="here:1"):
    return Example(list(range(100, 100 + length)), [index in supervised for index in range(length)], origin)


def test_examples_round_trip(tmp_path):
    examples = random_examples(20, seed=3)
    examples.append(Example([2**31 - 1, 0], [False, True], "größter/日本.jsonl:9"))
    store = write_store(tmp_path / "store", examples, notes=lambda: {"a": 1})
    again = open_store(tmp_path / "store")
    assert again.notes == {"a": 1}
    assert again.largest == 2**31 - 1
    for record, expected in enumerate(examples):
        tokens, marks = again.read(int(store.bounds[record]), int(store.bounds[record + 1]))
        assert tokens.tolist() == list(expected.tokens)
        assert marks.tolist() == list(expected.supervised)
        assert again.origin(record) == expected.origin
        assert again.supervised_counts[record] == expected.supervised_count


@pytest.mark.parametrize("spoil", ["short", "missing", "meta", "empty"])
def test_incomplete_store_is_not_opened(tmp_path, spoil):
    write_store(tmp_path / "store", random_examples(5))
    tokens = tmp_path / "store" / "tokens.bin"
    if spoil == "short":
        tokens.write_bytes(tokens.read_bytes()[:-4])
    elif spoil == "missing":
        tokens.unlink()
    elif spoil == "meta":
        (tmp_path / "store" / "meta.json").write_text("{")
    assert open_store(tmp_path / ("nowhere" if spoil == "empty" else "store")) is None


def test_failed_writer_leaves_no_files(tmp_path):
    def broken():
        yield random_examples(1)[0]
        raise DataError("here:2: bad")

    with pytest.raises(DataError):
        write_store(tmp_path / "store", broken())
    assert list(tmp_path.iterdir()) == []


def write_together(directory, barrier, errors):
    try:
        for number in range(60):
            if number % 2:  # an incomplete store
                (directory / str(number)).mkdir(exist_ok=True)
                (directory / str(number) / "meta.json").write_text("{")
            barrier.wait()
            assert len(write_store(directory / str(number), random_examples(5))) == 5
    except BaseException as error:
        barrier.abort()
        errors.put(repr(error))
        raise


@pytest.mark.parametrize("count", [2, 4])
def test_concurrent_writers_all_get_the_store(tmp_path, count):
    context = multiprocessing.get_context("fork")
    barrier, errors = context.Barrier(count), context.Queue()
    writers = [context.Process(target=write_together, args=(tmp_path, barrier, errors)) for _ in range(count)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=120)
    assert [writer.exitcode for writer in writers] == [0] * count, errors.get(timeout=1)
    assert sum(path.name.isdigit() for path in tmp_path.iterdir()) == 60


def test_store_written_by_another_process_is_kept(tmp_path):
    def slow():
        yield from random_examples(5)
        write_store(tmp_path / "store", random_examples(5))
        seen.append((tmp_path / "store").stat().st_ino)

    seen = []
    with pytest.MonkeyPatch.context() as patch:  # simulates another process
        numbers = itertools.count()
        patch.setattr(storage.os, "getpid", lambda: next(numbers))
        write_store(tmp_path / "store", slow())
    assert [(tmp_path / "store").stat().st_ino] == seen
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def cut_lengths(tmp_path, examples, **how):
    stored = build_examples(write_store(tmp_path / "store", examples), **how)
    return [len(stored[index].tokens) for index in range(len(stored))], stored


def test_long_records_are_truncated_dropped_split_or_rejected(tmp_path):
    records = [example(10, {9}), example(19, {16, 17}, "here:2"), example(59, {57, 58}, "here:3")]
    lengths, stored = cut_lengths(tmp_path, records, max_length=17, too_long="truncate")
    # the second keeps some supervised tokens; the third would keep none, and is dropped
    assert lengths == [10, 17]
    assert stored.summary().endswith("1 record truncated, 1 record dropped")
    lengths, stored = cut_lengths(tmp_path, records, max_length=17, too_long="drop")
    assert (lengths, stored.length_counts["dropped"]) == ([10], 2)
    lengths, stored = cut_lengths(tmp_path, records, max_length=17, too_long="split")
    # windows without supervised tokens are dropped: only the last window of the third remains
    assert lengths == [10, 17, 3, 11]
    assert [stored[index].origin for index in range(4)] == ["here:1", "here:2", "here:2", "here:3"]
    assert stored.supervised == 5
    with pytest.raises(DataError, match=r"here:2: the record has 19 tokens, but data.max_length is 17"):
        cut_lengths(tmp_path, records, max_length=17, too_long="error")
    with pytest.raises(DataError, match="no example is left: all 2 records were dropped"):
        cut_lengths(tmp_path, records[1:], max_length=3, too_long="truncate")


def test_eos_check_samples_examples_evenly(tmp_path, monkeypatch):
    """Token 119 ends records of 20 tokens."""
    unfinished, complete = example(10, {9}), example(20, {18, 19})
    how = {"max_length": 17, "too_long": "split"}
    monkeypatch.setattr(eos_check, "_MAX_INSPECTED", 4)
    for records, ends, inspected in (
        ([unfinished] * 9, {119}, 4),
        ([unfinished] * 2, {119}, 2),
        ([*[unfinished] * 8, complete], {119}, 0),  # in the second window
        ([*[unfinished] * 8, complete], {7, 119}, 0),
        ([*[unfinished] * 8, complete], {100}, 4),  # the first token, which is never a target
        ([*[unfinished] * 7, complete, unfinished], {119}, 4),
    ):
        _, stored = cut_lengths(tmp_path, records, **how)
        assert eos_check.count_without_eos(stored, ends) == inspected


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 60), min_size=1, max_size=6),
    max_length=st.integers(2, 70),
    seed=st.integers(0, 99),
    everything=st.booleans(),
)
def test_split_predicts_every_supervised_token_exactly_once(
    tmp_path_factory, sizes, max_length, seed, everything
):
    rng = np.random.default_rng(seed)
    examples = []
    for number, size in enumerate(sizes):
        marks = np.ones(size, bool) if everything else rng.random(size) < 0.4
        marks[-1] = True
        examples.append(Example(rng.integers(0, 1000, size), marks, f"here:{number}"))
    store = write_store(tmp_path_factory.mktemp("s") / "store", examples)
    stored = build_examples(store, max_length=max_length, too_long="split")
    targets = [
        (piece.origin, int(token))
        for piece in stored
        for token, mark in zip(piece.tokens[1:], piece.supervised[1:], strict=True)
        if mark
    ]
    expected = [
        (example.origin, int(token))
        for example in examples
        for token, mark in zip(example.tokens[1:], example.supervised[1:], strict=True)
        if mark
    ]
    assert targets == expected
    assert stored.supervised == len(expected)
    assert max(len(piece.tokens) for piece in stored) <= max_length
    assert all(piece.supervised_count for piece in stored)


def write_chats(path, count=50):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_store_is_reused_until_anything_changes(tiny, tmp_path):
    path = tmp_path / "chats.jsonl"
    write_chats(path)

    def prepared(**settings):
        return Preparation(tiny[1], cache=tmp_path / "cache", **settings)

    first = prepared().store(open_source(str(path)))
    assert len(first) == 50

    class Unreadable:
        name, digest = str(path), staticmethod(open_source(str(path)).digest)

        def __iter__(self):
            raise AssertionError("the records were read again")

    assert prepared().store(Unreadable()).directory == first.directory
    assert prepared(skip_bad=True).store(Unreadable()).directory == first.directory
    assert prepared(supervise="all").store(open_source(str(path))).directory != first.directory
    template = tiny[1].chat_template
    tiny[1].chat_template = template.replace("<|end|>", "<|end|> ")
    assert prepared().store(open_source(str(path))).directory != first.directory
    tiny[1].chat_template = template
    tiny[1].add_tokens(["forty"])
    assert prepared().store(open_source(str(path))).directory != first.directory
    write_chats(path, 49)
    assert len(prepared().store(open_source(str(path)))) == 49


def test_bad_records_stop_the_run_or_are_counted(tiny, tmp_path):
    path = tmp_path / "mixed.jsonl"
    good = {"prompt": "2+2?", "completion": "4"}
    bad = [{"messages": [{"role": "user", "content": "no answer"}]}, {"note": "?"}]
    path.write_text("\n".join(map(json.dumps, [good, *bad, good])))
    with pytest.raises(DataError, match=r"mixed.jsonl:[23]: "):
        Preparation(tiny[1], cache=tmp_path / "cache").store(open_source(str(path)))
    lenient = Preparation(tiny[1], cache=tmp_path / "cache", skip_bad=True)
    store = lenient.store(open_source(str(path), on_bad="skip"))
    assert len(store) == 2
    assert store.notes["skipped"] == 2
    with pytest.raises(DataError, match=r"mixed.jsonl:[23]: "):  # although a store exists now
        Preparation(tiny[1], cache=tmp_path / "cache").store(open_source(str(path)))
    for line, reason in ((2, "no token"), (3, "matches no known record format")):
        assert any(f"mixed.jsonl:{line}" in each and reason in each for each in store.notes["reasons"])


def test_another_format_creates_a_new_store(tiny_directory, tmp_path):
    from transformers import AutoTokenizer

    from whet.config.load_config import validate_config
    from whet.data.run_data import Needs, RunData

    path = tmp_path / "both.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "text": "another text"}))

    def tokens(form):
        data = {"train": str(path), "valid": None, "format": form}
        run = RunData(validate_config(run_config(tiny_directory, tmp_path, data=data)), Needs())
        run.prepare(AutoTokenizer.from_pretrained(tiny_directory))
        return len(run.examples["train"][0].tokens)

    assert tokens("auto") == len("ab") + 4
    assert tokens("text") == len("another text") + 1


def test_error_names_tokens_outside_the_vocabulary(tiny_directory, tmp_path):
    from tiny import write_tiny_model

    write_tiny_model(tmp_path / "small", vocab_size=258)
    config = run_config(tmp_path / "small", tmp_path)
    with pytest.raises(
        DataError,
        match=r"#1: token 258 \('<\|assistant\|>'\) is outside .* vocab_size=258, but the tokenizer has 260 tokens",
    ):
        whet.train(config)


def test_memory_stays_flat_during_tokenization(tiny, tmp_path):
    """Tokenize 24 MB with a small fraction of it in memory."""
    import tracemalloc

    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for number in range(6000):
            file.write(json.dumps({"text": f"{number} " + "lorem ipsum dolor " * 220}) + "\n")
    tracemalloc.start()
    store = Preparation(tiny[1], cache=tmp_path / "cache").store(open_source(str(path)))
    build_examples(store, max_length=128, too_long="split")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == 6000
    assert peak < path.stat().st_size  # the tokens alone need four times as much
