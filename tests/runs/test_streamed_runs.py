"""Runs with data.stream: exact resume at every step, signals, two processes, and settings that are refused."""

import hashlib
import json
import os
import signal
import threading
from itertools import chain
from pathlib import Path

import pytest
import yaml

import whet
from distributed.harness import run_world
from tiny import run_config
from whet.config.load_config import validate_config
from whet.data.run_data import RunData
from whet.errors import CheckpointError, ConfigError, DataError
from whet.recipes.registry import record_needs
from whet.reporting.data.data_wording import step_rows
from whet.runs.inspect_data import view_data
from whet.training.callbacks import Callback, StopRun

STEPS = 9


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("enough", unfinished=True) if step == self.step else None


class Interrupt(Callback):
    """Sends the signal of Ctrl-C after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def texts(tmp_path):
    """A glob of three files with 11 records each."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for shard in range(3):
        rows = ({"text": f"shard {shard}, record {n}: " + "ab" * (n * 5 % 17)} for n in range(11))
        (directory / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory / "*.jsonl")


def streamed(tiny_directory, directory, source, *, data=None, run=None, **sections):
    data = {"train": source, "valid": None, "max_length": 64, "stream": {"buffer": 13}, **(data or {})}
    run = {"steps": STEPS, "batch_size": None, "batch_tokens": 160, "micro_batch_tokens": 100, **(run or {})}
    checkpoint = {"every": 1, "keep": 99}
    return run_config(tiny_directory, directory, data=data, run=run, checkpoint=checkpoint, **sections)


def result_of(directory):
    """Return the losses and the hash of the final weights."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    files = sorted((directory / "final").glob("*.safetensors"))
    assert len(losses) == STEPS
    assert files
    return losses, [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize("pack", [True, False])
def test_run_stopped_after_every_step_equals_an_uninterrupted_one(tiny_directory, tmp_path, texts, pack):
    settings = {"data": {"pack": pack}}
    expected = whet.train(streamed(tiny_directory, tmp_path / "one", texts, **settings), verbose=0)
    first = whet.train(
        streamed(tiny_directory, tmp_path / "parts", texts, **settings), [StopAt(1)], verbose=0
    )
    for step in range(2, STEPS):
        assert whet.resume(first.directory, [StopAt(step)], verbose=0).unfinished
    whet.resume(first.directory, verbose=0)
    assert result_of(first.directory) == result_of(expected.directory)
    state = json.loads((first.directory / f"checkpoints/step-{STEPS:06d}/state.json").read_text())["data"]
    assert state["block"] >= 3
    assert not any("whet-stream" in thread.name for thread in threading.enumerate())


def test_interrupted_run_equals_an_uninterrupted_one(tiny_directory, tmp_path, texts):
    expected = whet.train(streamed(tiny_directory, tmp_path / "one", texts), verbose=0)
    config = streamed(tiny_directory, tmp_path / "parts", texts)
    first = whet.train(config, [Interrupt(4)], verbose=0)
    assert first.unfinished
    assert 4 <= first.steps < STEPS
    whet.resume(first.directory, verbose=0)
    assert result_of(first.directory) == result_of(expected.directory)


def test_micro_batches_do_not_change_a_streamed_run(tiny_directory, tmp_path, texts):
    losses = [
        result_of(
            whet.train(
                streamed(tiny_directory, tmp_path / str(size), texts, run={"micro_batch_tokens": size}),
                verbose=0,
            ).directory
        )[0]
        for size in (63, 160)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_train_the_same_streamed_run(tiny_directory, tmp_path, texts):
    one = result_of(whet.train(streamed(tiny_directory, tmp_path / "one", texts), verbose=0).directory)[0]
    config = streamed(tiny_directory, tmp_path / "two", texts) | {"parallel": {"kind": "ddp"}}
    ranks = run_world(2, "train_or_resume", out=tmp_path / "world", timeout=120, config=config, stop_at=5)
    again = str(tmp_path / "two" / "runs" / "test")
    rest = run_world(2, "train_or_resume", out=tmp_path / "world", timeout=120, resume_from=again)
    losses = [*ranks[0]["losses"], *rest[0]["losses"]]
    assert losses == pytest.approx(one, rel=1e-5)
    assert [*ranks[1]["losses"], *rest[1]["losses"]] == losses
    records = [[sorted(chain(*batches)) for batches in rank["records"]] for rank in ranks]
    assert all(records[0])
    assert records[0] != records[1]  # each rank computes its part of a step


def test_weights_that_change_resume_exactly(tiny_directory, tmp_path, texts):
    train = [
        {"source": texts, "weight": {0: 1, STEPS: 0}},
        {"source": "synth:house:20", "weight": {0: 0, STEPS: 1}},
    ]
    settings = {"data": {"max_length": 101, "stream": {"buffer": 4}}}
    expected = whet.train(streamed(tiny_directory, tmp_path / "one", train, **settings), verbose=0)
    first = whet.train(streamed(tiny_directory, tmp_path / "two", train, **settings), [StopAt(4)], verbose=0)
    whet.resume(first.directory, verbose=0)
    assert result_of(first.directory) == result_of(expected.directory)


@pytest.mark.parametrize("kind", [{"kind": "mtp", "n_predict": 1}, {"kind": "distill", "teacher": "TINY"}])
def test_other_objectives_stream(tiny_directory, tmp_path, texts, kind):
    objective = {key: str(tiny_directory) if value == "TINY" else value for key, value in kind.items()}
    config = streamed(tiny_directory, tmp_path, texts, run={"steps": 2}, objective=objective)
    assert whet.train(config, verbose=0).steps == 2


def test_parts_of_a_mix_stream(tiny_directory, tmp_path, texts):
    config = streamed(tiny_directory, tmp_path, texts, run={"steps": 3})
    data = config.pop("data")
    parts = [
        {"name": name, "objective": {"kind": "sft"}, "data": {**data, "stream": stream}, "weight": 1}
        for name, stream in (("streamed", True), ("stored", False))
    ]
    config["objective"] = {"kind": "mix", "parts": parts}
    assert whet.train(config, verbose=0).steps == 3
    assert not any("whet-stream" in thread.name for thread in threading.enumerate())


REFUSED = {
    "run.steps instead of run.epochs": {"run": {"steps": None, "epochs": 2}},
    "data.valid as a number": {"data": {"valid": 0.1}},
    "data.curriculum": {"data": {"curriculum": {"kind": "length"}}},
    "data.order: mlx": {
        "data": {"order": "mlx", "pack": False},
        "run": {"batch_size": 4, "batch_tokens": None},
    },
    "epochs of a source": {"data": {"train": [{"source": "a.jsonl", "epochs": 2}]}},
    "objective.kind: dpo": {"objective": {"kind": "dpo"}},
    "objective.kind: grpo": {"objective": {"kind": "grpo", "rewards": ["length"]}},
    "objective.kind: distrust": {"objective": {"kind": "distrust"}},
    "objective.kind: classify": {"objective": {"kind": "classify", "classes": ["a", "b"]}},
    "objective.offline": {"objective": {"kind": "distill", "teacher": "x", "offline": {"top_k": 2}}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_need_all_records_are_refused(tiny_directory, tmp_path, key):
    with pytest.raises(ConfigError, match=key):
        validate_config(streamed(tiny_directory, tmp_path, "a.jsonl", **REFUSED[key]))


def test_examples_that_may_not_fit_are_refused_before_training(tiny_directory, tmp_path, texts):
    config = streamed(tiny_directory, tmp_path, texts, data={"max_length": 300})
    with pytest.raises(ConfigError, match=r"(?s)max_length=300 .* run\.batch_tokens=160.*lower"):
        whet.train(config, verbose=0)
    config = streamed(
        tiny_directory,
        tmp_path,
        texts,
        data={"max_length": 600},
        run={"batch_tokens": 999, "micro_batch_tokens": 999},
    )
    with pytest.raises(ConfigError, match="512 positions"):
        whet.train(config, verbose=0)


def test_bad_record_in_a_later_block_stops_the_run_with_its_origin(tiny_directory, tmp_path):
    path = tmp_path / "bad.jsonl"
    rows = [json.dumps({"text": f"record {number} " + "x" * 20}) for number in range(40)]
    path.write_text("\n".join([*rows[:30], "{", *rows[31:]]) + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:31: "):
        whet.train(streamed(tiny_directory, tmp_path, str(path)), verbose=0)
    assert not any("whet-stream" in thread.name for thread in threading.enumerate())


def test_changed_records_are_noticed_on_resume(tiny_directory, tmp_path, texts):
    first = whet.train(streamed(tiny_directory, tmp_path, texts), [StopAt(2)], verbose=0)
    path = tmp_path / "texts" / "2.jsonl"
    path.write_text(path.read_text().replace("record 3", "record x"))
    with pytest.raises(CheckpointError, match=r"data\.train: the records are not the ones"):
        whet.resume(first.directory, verbose=0)


def test_nothing_is_stored_on_disk(tiny_directory, tmp_path, texts, monkeypatch):
    monkeypatch.setenv("WHET_TOKENS", str(tmp_path / "tokens"))
    whet.train(streamed(tiny_directory, tmp_path, texts, run={"steps": 1}), verbose=0)
    assert not list((tmp_path / "tokens").rglob("*.bin"))


def test_whet_data_shows_the_first_block_only(tiny_directory, tmp_path, texts):
    config = validate_config(streamed(tiny_directory, tmp_path, texts))
    view = view_data(config)
    assert not view.errors
    [split] = view.splits
    assert split.records == 13
    assert view.steps.steps == STEPS
    assert view.steps.is_streamed
    wording = dict(step_rows(view))
    assert wording["stream"] == "all of the above was measured on the first 13 records"
    assert "epoch" not in wording


def test_a_new_tokenizer_is_trained_on_the_first_block(tiny_directory, tmp_path, texts):
    config = validate_config(streamed(tiny_directory, tmp_path, texts))
    assert len(list(RunData(config, record_needs(config)).training_texts())) == 13


def endless_rows():
    """An endless function, which must never be read to its end."""
    number = 0
    while True:
        yield {"text": f"record {number}: " + "ab" * (number * 5 % 17)}
        number += 1


def iterable_dataset():
    import datasets

    def generate(shards):
        for shard in shards:
            yield from ({"text": f"shard {shard}, record {n}: " + "ab" * (n * 5 % 17)} for n in range(11))

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2]})


@pytest.mark.parametrize("rows", [endless_rows, iterable_dataset], ids=["function", "IterableDataset"])
def test_python_objects_without_a_length_stream_and_resume_exactly(tiny_directory, tmp_path, rows):
    def given():
        return {"train": rows if rows is endless_rows else rows()}

    def config(name):
        values = streamed(tiny_directory, tmp_path / name, None)
        del values["data"]["train"]
        return values

    expected = whet.train(config("one"), data=given(), verbose=0)
    first = whet.train(config("two"), [StopAt(4)], data=given(), verbose=0)
    whet.resume(first.directory, data=given(), verbose=0)
    assert result_of(first.directory) == result_of(expected.directory)
    if rows is endless_rows:
        return
    third = whet.train(config("three"), [StopAt(1)], data=given(), verbose=0)
    with pytest.raises(CheckpointError, match="data 'train' has changed"):
        whet.resume(third.directory, data={"train": endless_rows}, verbose=0)


def test_mixed_python_objects_stream(tiny_directory, tmp_path, texts):
    train = [{"source": "python:more", "weight": 1}, {"source": texts, "weight": 2}]
    result = whet.train(
        streamed(tiny_directory, tmp_path, train, run={"steps": 2}), data={"more": endless_rows}, verbose=0
    )
    assert result.steps == 2


def test_the_example_of_a_stream_trains(tiny_directory, tmp_path):
    config = yaml.safe_load((Path(__file__).parents[2] / "examples" / "stream-house.yaml").read_text())
    config["model"] = str(tiny_directory)
    config["data"]["max_length"] = 256
    config["run"] |= {"steps": 2, "dir": str(tmp_path), "device": "cpu"}
    assert whet.train(config, verbose=0).steps == 2
