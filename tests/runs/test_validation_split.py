"""Runs that hold out validation records: every kind of objective, resume, plans, `whet data`, Python objects."""

import copy
import json
import logging
from pathlib import Path

import pytest
from tools.golden import config_of, stop_half_way, write_inputs

import whet
from tiny import run_config
from whet.config.load_config import validate_config
from whet.errors import ConfigError
from whet.planning.dataset_count import count_small_dataset
from whet.recipes.registry import recipe_for
from whet.runs.inspect_data import view_data
from whet.studies.ablation import arm_config

KINDS = {
    "sft": "sft-lora",
    "dpo": "dpo",
    "distrust": "distrust",
    "classify": "classify",
    "grpo": "grpo",
    "mix": "mix",
    "regression": "quality-sgd",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kinds")
    write_inputs(directory)
    return directory


def configure(kind, directory, name, valid=0.25):
    config = copy.deepcopy(config_of(KINDS[kind]))
    sections = [part["data"] for part in config["objective"]["parts"]] if kind == "mix" else [config["data"]]
    for data in sections:
        data["valid"] = valid
    config["run"] |= {"name": name, "dir": str(directory)}
    return config


def metrics(directory):
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name.endswith("loss")} for line in lines
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_holds_out_the_same_records_when_resumed(kind, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    result = whet.train(configure(kind, tmp_path, "once"), verbose=0)
    provenance = json.loads((result.directory / "provenance.json").read_text())
    digests = provenance["data_sha256"]
    assert any(name.endswith("valid") for name in digests)
    assert len(set(digests.values())) == len(digests)
    stop_half_way(configure(kind, tmp_path, "resumed"))
    resumed = whet.resume(tmp_path / "resumed", verbose=0)
    assert metrics(resumed.directory) == metrics(result.directory)
    summary = json.loads((result.directory / "metrics.jsonl").read_text().splitlines()[-1])["summary"]
    assert any(name.startswith(("eval_", "exact_match")) for name in summary["final"])


def chat(question, answer, **fields):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **fields}


RECORDS = [chat(f"question {n // 2}", f"answer {n}", user=f"u{n % 8}") for n in range(40)]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def config(tiny_directory, tmp_path):
    def build(records=RECORDS, run=None, **data):
        train = write(tmp_path / "train.jsonl", records)
        values = run_config(tiny_directory, tmp_path, data={"train": train, "valid": None, **data})
        return values | {"run": {**values["run"], **(run or {})}}

    return build


def sides(values):
    sources = recipe_for(validate_config(values)).open_data().sources
    return [[record.fields for record in sources[name]] for name in ("train", "valid")]


def test_prompts_are_not_shared_and_the_share_is_kept(config):
    train, valid = sides(config(valid=0.1))
    assert (len(train), len(valid)) == (36, 4)
    assert {row["messages"][0]["content"] for row in train}.isdisjoint(
        {row["messages"][0]["content"] for row in valid}
    )
    train, valid = sides(config(valid=10, group="user"))
    assert (len(train), len(valid)) == (30, 10)
    assert {row["user"] for row in train}.isdisjoint({row["user"] for row in valid})
    assert sides(config(valid=0.1, run={"seed": 1})) != sides(config(valid=0.1))


def test_whet_data_shows_the_split(config):
    values = validate_config(config(valid=0.1, group="user", ignore=[]))
    view = view_data(values)
    assert [(split.name, split.records) for split in view.splits] == [("train", 35), ("valid", 5)]
    assert view.splits[1].source.endswith("train.jsonl (held out)")
    assert not view.errors
    assert not any(split.unread_fields for split in view.splits)  # the group is read


def test_plan_counts_the_remaining_records(config):
    run = {"steps": None, "epochs": 1, "batch_size": 4}
    whole = count_small_dataset(validate_config(config(run=run)))
    part = count_small_dataset(validate_config(config(valid=0.2, run=run)))
    assert (whole.steps, part.steps) == (10, 8)


def test_log_says_what_is_held_out(config, caplog):
    with caplog.at_level(logging.INFO, "whet"):
        whet.train(config(valid=0.1), verbose=0)
    assert "valid: held out 4 of 40 examples of data.train, grouped by prompt (seed 0)" in caplog.text
    assert "no validation data" not in caplog.text


def test_run_without_validation_warns_once(config, caplog):
    with caplog.at_level(logging.WARNING, "whet"):
        whet.train(config(ignore=["user"]), verbose=0)
    warnings = [record.getMessage() for record in caplog.records if "validation" in record.getMessage()]
    assert warnings == ["no validation data: set data.valid to a source, or to a share such as 0.05"]


def test_python_records_are_split_and_mapped(config):
    rows = [{"question": f"q{n // 2}", "answer": f"a{n}"} for n in range(40)]
    values = config(valid=0.1, columns={"prompt": "question", "completion": "answer"})
    del values["data"]["train"]
    result = whet.train(values, data=rows, verbose=0)
    assert "eval_loss" in result.metrics
    stored = json.loads((result.directory / "provenance.json").read_text())["data_sha256"]
    assert stored["train"] != stored["valid"]


def classes(count):
    return [{"input": f"text {n // 2}", "label": n // 2 % 2, "user": n // 4} for n in range(count)]


def test_classifier_is_split_by_class_and_group(config):
    objective = {"kind": "classify", "classes": 2}
    for data in ({"valid": 0.2}, {"valid": 8}, {"group": "user"}, {"valid": 0.2, "group": "user"}):
        train, valid = sides(config(classes(40), **data) | {"objective": objective})
        key = "user" if "group" in data else "input"
        assert {row[key] for row in train}.isdisjoint({row[key] for row in valid})
        assert len(valid) == 8
        if "group" not in data:
            assert sum(row["label"] for row in valid) == 4


def test_ablation_refuses_a_split_that_depends_on_the_seed():
    config = copy.deepcopy(config_of("quality-sgd"))
    config["data"]["valid"] = 0.2
    with pytest.raises(ConfigError, match="a split by data.valid depends on the seed"):
        arm_config(validate_config(config), "dense", 0)
