"""Streamed steps: every record once per pass, exact resume, bounded memory, errors and threads."""

import json
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.data.packing import StepSettings, plan_block
from whet.data.sources.python_rows import PythonRows
from whet.data.sources.record_stream import StreamedSource
from whet.data.sources.source import SingleSource, open_source
from whet.data.streamed_batches import StreamedBatches, StreamSettings
from whet.data.tokens.prepare_dataset import Preparation
from whet.errors import CheckpointError, DataError

PACKED = StepSettings(batch_size=None, batch_tokens=100, micro_batch_tokens=60, pack=True)
SIZED = StepSettings(batch_size=5, batch_tokens=None, micro_batch_tokens=200, pack=True)
PADDED = StepSettings(batch_size=5, batch_tokens=None, micro_batch_tokens=200, pack=False)
PADDED_TOKENS = StepSettings(batch_size=None, batch_tokens=100, micro_batch_tokens=200, pack=False)
SEQUENTIAL = StepSettings(
    batch_size=None, batch_tokens=100, micro_batch_tokens=60, pack=True, order="sequential"
)
every_step_size = pytest.mark.parametrize(
    "steps",
    [PACKED, SIZED, PADDED, PADDED_TOKENS, SEQUENTIAL],
    ids=["packed", "sized", "padded", "padded-tokens", "sequential"],
)


@pytest.fixture
def tokenizer(tiny):
    return tiny[1]


def write_texts(path, count, *, start=0):
    """Write texts that all differ, of 8 to 50 characters, each one byte-level token."""
    rows = (f"{path.stem} {number:04d} " + "x" * (number * 7 % 43) for number in range(start, start + count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))


def open_stream(spec, tokenizer, tmp_path, steps=PACKED, *, buffer=12, seed=3, max_length=60, on_bad="error"):
    source = open_source(spec, on_bad=on_bad) if isinstance(spec, str | list) else spec
    preparation = Preparation(tokenizer, cache=tmp_path / "cache", skip_bad=on_bad == "skip")
    settings = StreamSettings("train", buffer, seed, max_length, "truncate")
    streamed = StreamedSource(source, buffer=buffer, skip_bad=on_bad == "skip")
    records = streamed.open(seed=None if steps.order == "sequential" else seed, total_steps=100)
    return StreamedBatches(records, preparation, steps, settings)


def rows_source(rows, name="rows"):
    return SingleSource(name, PythonRows(name, rows).content(), form="auto", on_bad="error")


def origins(step):
    return [origin for batch in step for origin in batch.origins]


def contents(step):
    """Return everything in a step that training reads."""
    return [
        (batch.tokens.tolist(), batch.targets.tolist(), batch.documents, batch.origins, batch.weights)
        for batch in step
    ]


lengths_of_blocks = st.lists(st.lists(st.integers(1, 50), max_size=30), min_size=1, max_size=6)


@every_step_size
@given(blocks=lengths_of_blocks, seed=st.integers(0, 9))
def test_blocks_lose_and_repeat_nothing_and_leave_no_partial_step(steps, blocks, seed):
    carried, used, read = [], [], []
    for block, new in enumerate(blocks):
        pool = [*carried, *((block, index, length) for index, length in enumerate(new))]
        read += [(block, index) for index in range(len(new))]
        lengths = np.array([length for *_, length in pool], dtype=np.int64)
        plan, rest = plan_block(lengths, steps, carried=len(carried), seed=seed, block=block)
        for step in plan:
            assert step
            if steps.batch_size is not None:
                assert len(step) == steps.batch_size
            else:
                assert lengths[step].sum() <= steps.batch_tokens
            used += [pool[index][:2] for index in step]
        left = lengths[rest].sum() if steps.batch_tokens else len(rest)
        assert left < (steps.batch_tokens or steps.batch_size)
        carried = [pool[index] for index in rest]
    assert Counter(used) + Counter(example[:2] for example in carried) == Counter(read)


def test_an_example_is_never_left_over_again_while_steps_fill_up():
    """Repeatedly the longest, the shortest or an odd example would otherwise wait forever."""
    for steps in (PACKED, SIZED, PADDED, PADDED_TOKENS):
        carried = [50]  # longer than all others
        for block in range(4):
            lengths = np.array([*carried, *[10 + (block * 31 + index * 17) % 20 for index in range(40)]])
            plan, rest = plan_block(lengths, steps, carried=len(carried), seed=1, block=block)
            assert len(plan) > 3
            carried = lengths[rest].tolist()
        assert 50 not in carried


@every_step_size
def test_a_pass_reads_every_record_once_in_steps_that_are_full(tokenizer, tmp_path, steps):
    for shard in range(3):
        write_texts(tmp_path / f"s{shard}.jsonl", 30)
    stream = open_stream(str(tmp_path / "s*.jsonl"), tokenizer, tmp_path, steps)
    drawn, count = Counter(), 0
    while sum(drawn.values()) < 4 * 90:
        step = next(stream)
        count += 1
        drawn.update(origins(step))
        if steps.batch_size is not None:
            assert len(origins(step)) == steps.batch_size
    stream.close()
    assert len(drawn) == 90
    assert set(drawn.values()) <= {3, 4, 5}  # blocks of later passes have been started
    if steps is SEQUENTIAL:
        return
    again = open_stream(str(tmp_path / "s*.jsonl"), tokenizer, tmp_path, steps)
    other = open_stream(str(tmp_path / "s*.jsonl"), tokenizer, tmp_path, steps, seed=4)
    first = [contents(next(again)) for _ in range(8)]
    assert first != [contents(next(other)) for _ in range(8)]
    again.close()
    other.close()


def test_shards_come_in_another_order_in_each_pass(tokenizer, tmp_path):
    for shard in range(6):
        write_texts(tmp_path / f"s{shard}.jsonl", 5)
    stream = open_stream(str(tmp_path / "s*.jsonl"), tokenizer, tmp_path, SIZED, buffer=5)
    passes = [[origins(next(stream))[0].partition(":")[0] for _ in range(6)] for _ in range(3)]
    stream.close()
    assert all(len(set(shards)) == 6 for shards in passes)
    assert len({tuple(shards) for shards in passes}) == 3


@every_step_size
def test_a_stream_continues_exactly_from_every_position(tokenizer, tmp_path, steps):
    write_texts(tmp_path / "a.jsonl", 25)
    write_texts(tmp_path / "b.jsonl", 20)
    spec = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    stream = open_stream(spec, tokenizer, tmp_path, steps)
    states, expected = [], []
    for _ in range(24):
        states.append(json.loads(json.dumps(stream.state())))
        expected.append(contents(next(stream)))
    stream.close()
    assert states[-1]["block"] >= 4
    for start in range(0, 22):
        resumed = open_stream(spec, tokenizer, tmp_path, steps)
        resumed.seek(states[start])
        assert resumed.state() == states[start]
        assert [contents(next(resumed)) for _ in range(2)] == expected[start : start + 2]
        resumed.close()


def test_steps_can_be_put_back_across_blocks(tokenizer, tmp_path):
    """A trainer draws a step early and puts it back for a checkpoint."""
    write_texts(tmp_path / "a.jsonl", 40)
    stream = open_stream(str(tmp_path / "a.jsonl"), tokenizer, tmp_path)
    reference = open_stream(str(tmp_path / "a.jsonl"), tokenizer, tmp_path)
    for _ in range(20):
        before = stream.state()
        peeked = contents(stream.peek())
        assert stream.state() == before
        two_back = [contents(next(stream)) for _ in range(2)]
        stream.seek(json.loads(json.dumps(before)))
        assert peeked == two_back[0] == contents(next(stream)) == contents(next(reference))
    stream.close()
    reference.close()


def test_loss_weights_survive_being_carried(tokenizer, tmp_path):
    rows = [{"text": "x" * (10 + index % 20), "weight": 0.5 if index % 3 else 1} for index in range(40)]
    path = tmp_path / "weights.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = open_stream(str(path), tokenizer, tmp_path)
    for _ in range(12):
        state = json.loads(json.dumps(stream.state()))
        step = next(stream)
        resumed = open_stream(str(path), tokenizer, tmp_path)
        resumed.seek(state)
        for batch, same in zip(step, next(resumed), strict=True):
            assert torch.equal(batch.weights, same.weights)
            expected = [0.5 if (int(origin.rpartition(":")[2]) - 1) % 3 else 1 for origin in batch.origins]
            assert batch.supervised_weights.tolist() == [expected[index] for index in batch.examples.tolist()]
        resumed.close()
    stream.close()


def test_read_ahead_is_bounded_by_the_buffer(tokenizer, tmp_path):
    """Of an endless source, at most the block in use and the next one are in memory."""
    read = []

    def endless():
        for number in range(10**9):
            read.append(number)
            yield {"text": f"record {number}"}

    stream = open_stream(rows_source(endless), tokenizer, tmp_path, SIZED, buffer=100)
    for step in range(1, 101):
        next(stream)
        assert len(read) <= (step * 5 // 100 + 2) * 100
    stream.close()


def test_an_error_in_the_background_is_raised_at_its_step_with_its_origin(tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    write_texts(path, 40)
    lines = path.read_text().splitlines()
    lines[30] = '{"text": 5}'
    path.write_text("\n".join(lines) + "\n")
    stream = open_stream(str(path), tokenizer, tmp_path, SIZED, buffer=20)
    for _ in range(4):
        next(stream)
    with pytest.raises(DataError, match=r"bad\.jsonl:31: "):
        next(stream)
    stream.close()


def test_bad_records_are_skipped_and_reported(tokenizer, tmp_path, caplog):
    path = tmp_path / "bad.jsonl"
    write_texts(path, 40)
    lines = path.read_text().splitlines()
    lines[30] = lines[35] = "{"
    path.write_text("\n".join(lines) + "\n")
    stream = open_stream(str(path), tokenizer, tmp_path, SIZED, buffer=20, on_bad="skip")
    drawn = Counter(origin for _ in range(7) for origin in origins(next(stream)))
    stream.close()
    assert len(drawn) == 35
    assert "2 bad records skipped" in caplog.text
    assert "bad.jsonl:31" in caplog.text


@pytest.mark.parametrize("content", ["", '{"text": 5}\n{"text": 6}\n'])
def test_a_source_without_usable_records_is_an_error(tokenizer, tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        open_stream(str(path), tokenizer, tmp_path, on_bad="skip").first_block()


def test_records_that_are_all_dropped_are_an_error(tokenizer, tmp_path):
    write_texts(tmp_path / "a.jsonl", 10)
    source = open_source(str(tmp_path / "a.jsonl"))
    settings = StreamSettings("train", 4, 0, 5, "drop")
    records = StreamedSource(source, buffer=4, skip_bad=False).open(seed=0, total_steps=1)
    stream = StreamedBatches(records, Preparation(tokenizer, cache=tmp_path), SIZED, settings)
    with pytest.raises(DataError, match=r"(?s)no example is left.*raise data\.max_length"):
        stream.first_block()
    with pytest.raises(DataError, match="a pass over all records gave no example"):
        next(stream)
    stream.close()


def test_no_thread_is_left_after_closing(tokenizer, tmp_path):
    """Also while a block is being read from a slow source."""
    blocked, release = threading.Event(), threading.Event()

    def slow():
        for number in range(10**9):
            if number == 30:
                blocked.set()
                release.wait(60)
            yield {"text": f"record {number}"}

    before = set(threading.enumerate())
    stream = open_stream(rows_source(slow), tokenizer, tmp_path, SIZED, buffer=20)
    next(stream)
    assert blocked.wait(60)
    assert any("whet-stream" in thread.name for thread in threading.enumerate())
    release.set()
    stream.close()
    assert not any("whet-stream" in thread.name for thread in set(threading.enumerate()) - before)


def test_another_step_size_cannot_continue_a_stream(tokenizer, tmp_path):
    write_texts(tmp_path / "a.jsonl", 20)
    state = open_stream(str(tmp_path / "a.jsonl"), tokenizer, tmp_path).state()
    for changes in ({"steps": SIZED}, {"buffer": 13}, {"seed": 4}):
        with pytest.raises(CheckpointError, match="size or order of the steps or blocks has changed"):
            open_stream(str(tmp_path / "a.jsonl"), tokenizer, tmp_path, **changes).seek(state)
