"""Error messages of invalid configs: suggestions for unknown keys, including those of other tools, and bounded length."""

import re

import pytest

from whet.config.checks.error_messages import _paths
from whet.config.checks.other_tools import OTHER_TOOLS
from whet.config.load_config import validate_config
from whet.config.optim import Optim
from whet.config.run import Run
from whet.config.run_config import RunConfig
from whet.errors import ConfigError, WhetError, shorten

GOOD = {"model": "m", "data": {"train": "a.jsonl"}, "run": {"steps": 3, "batch_size": 4}}


def error_message(values):
    with pytest.raises(ConfigError) as caught:
        validate_config(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("learning_rate", "optim.lr"),
        ("lora_r", "method.rank"),
        ("per_device_train_batch_size", "run.batch_size"),
        ("gradient_accumulation_steps", "run.batch_size"),
        ("adapter", "method.kind"),
        ("use_peft", "method.kind"),
        ("output_dir", "run.dir"),
        ("num_train_epochs", "run.epochs"),
        ("sequence_len", "data.max_length"),
        ("warmup_ratio", "optim.warmup: a number below 1 is a fraction"),
        ("base_model", "`model`"),
        ("lr", "'optim.lr'"),
        ("seed", "'run.seed'"),
    ],
)
def test_keys_of_other_tools_are_mapped_to_those_of_whet(key, suggestion):
    message = error_message({**GOOD, key: 1})
    assert f"unknown key {key!r}" in message
    assert suggestion in message


def test_pasted_config_of_another_tool_links_to_the_migration_page():
    pasted = {
        "base_model": "m",
        "adapter": "qlora",
        "sequence_len": 2048,
        "micro_batch_size": 2,
        "lora_r": 32,
    }
    message = error_message(pasted)
    assert "docs/coming-from.md" in message
    assert "did you mean 'data'" not in message


def test_suggested_keys_exist():
    known = set(_paths(RunConfig, depth=3)) | {"parallel", "model", "method"}
    suggested = {path for text in OTHER_TOOLS.values() for path in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)}
    assert len(suggested) > 30
    assert not suggested - known


@pytest.mark.parametrize("records", [[{"prompt": "p", "completion": "c"}] * 2000, {"prompt": ["p"] * 3000}])
def test_records_in_a_config_are_rejected_with_a_short_message(records):
    message = error_message({**GOOD, "data": {"train": records}})
    assert "data.train" in message
    assert len(message) < 1000


def test_mixture_item_without_source_explains_its_keys():
    message = error_message({**GOOD, "data": {"train": [{"path": "a.jsonl", "type": "alpaca"}]}})
    assert "an item is a name or {source: NAME, weight: NUMBER}" in message


def test_object_that_is_not_a_source_is_named_by_its_type():
    class DataFrame:
        pass

    assert "an object of type DataFrame is not a source" in error_message(
        {**GOOD, "data": {"train": DataFrame()}}
    )


def test_fraction_instead_of_steps_shows_the_description_of_the_key():
    assert "number of optimizer steps" in error_message({**GOOD, "run": {"steps": 1.5, "batch_size": 4}})


def test_warmup_is_steps_or_a_fraction():
    message = error_message({**GOOD, "optim": {"warmup": 1.5}})
    assert "optim.warmup: must be an integer number of steps, or a fraction of the run below 1" in message


def test_unknown_objective_kind_lists_known_kinds():
    message = error_message({**GOOD, "objective": {"kind": "kto"}})
    assert "objective: unknown kind 'kto' (known: sft, dpo" in message
    assert "did you mean 'grpo'?" in error_message({**GOOD, "objective": {"kind": "grp"}})


def test_value_instead_of_a_section_is_rejected():
    assert "optim: this must be a section with keys, not a value (given: 'adamw_torch')" in error_message(
        {**GOOD, "optim": "adamw_torch"}
    )


def test_every_key_of_a_typical_pasted_config_is_explained():
    pasted = dict.fromkeys(("base_model", "datasets", "adapter", "lora_r", "lora_alpha", "lora_dropout"), 1)
    pasted |= dict.fromkeys(("sequence_len", "sample_packing", "micro_batch_size", "num_epochs"), 1)
    pasted |= dict.fromkeys(("optimizer", "lr_scheduler", "warmup_steps", "weight_decay", "learning_rate"), 1)
    message = error_message(pasted)
    assert "unknown key 'learning_rate': in whet, it is optim.lr" in message
    assert "more problems" not in message


def test_list_of_problems_is_limited():
    message = error_message({**GOOD, **{f"key{number}": "x" * 5000 for number in range(500)}})
    assert "more problems" in message
    assert len(message.splitlines()) <= 40
    assert len(message) < 10_000


@pytest.mark.parametrize("make", [lambda: Optim(name="foo"), Run, lambda: RunConfig(model=3, rum={})])
def test_invalid_section_in_python_raises_whet_error(make):
    with pytest.raises(WhetError):
        make()


def test_all_problems_of_nested_sections_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        RunConfig(model="m", data={"train": "a"}, run={"steps": 0, "batch_size": 0}, optim={"lr": -1})
    assert all(key in str(caught.value) for key in ("run.steps", "run.batch_size", "optim.lr"))


def test_shorten_removes_the_middle_of_long_text():
    assert shorten("short") == "short"
    shortened = shorten("a" * 3_000_000 + "z")
    assert len(shortened) < 200
    assert "3000001 characters" in shortened
    assert shortened.endswith("z")
