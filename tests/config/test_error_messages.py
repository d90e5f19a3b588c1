"""What a wrong config is told: the key that was meant, also in the words of other tools, and never a wall of text."""

import re

import pytest

from whet.config.checks.error_messages import _paths
from whet.config.checks.other_tools import OTHER_TOOLS
from whet.config.load_config import make_config
from whet.config.optim import Optim
from whet.config.run import Run
from whet.config.run_config import RunConfig
from whet.errors import ConfigError, WhetError, shorten

GOOD = {"model": "m", "data": {"train": "a.jsonl"}, "run": {"steps": 3, "batch_size": 4}}


def refusal(values):
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
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
        ("warmup_ratio", "optim.warmup counts steps"),
        ("base_model", "`model`"),
        ("lr", "'optim.lr'"),
        ("seed", "'run.seed'"),
    ],
)
def test_keys_of_other_tools_get_the_key_of_whet(key, meant):
    message = refusal({**GOOD, key: 1})
    assert f"unknown key {key!r}" in message
    assert meant in message


def test_a_pasted_config_of_another_tool_is_sent_to_the_page_that_maps_it():
    pasted = {
        "base_model": "m",
        "adapter": "qlora",
        "sequence_len": 2048,
        "micro_batch_size": 2,
        "lora_r": 32,
    }
    message = refusal(pasted)
    assert "docs/coming-from.md" in message
    assert "did you mean 'data'" not in message


def test_each_key_that_is_named_for_another_tools_exists():
    known = set(_paths(RunConfig, depth=3)) | {"parallel", "model", "method"}
    named = {path for text in OTHER_TOOLS.values() for path in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)}
    assert len(named) > 30
    assert not named - known


@pytest.mark.parametrize("records", [[{"prompt": "p", "completion": "c"}] * 2000, {"prompt": ["p"] * 3000}])
def test_records_in_memory_are_refused_in_a_few_words(records):
    message = refusal({**GOOD, "data": {"train": records}})
    assert "data.train" in message
    assert len(message) < 1000


def test_a_part_of_a_mixture_under_another_key_says_what_a_part_is():
    message = refusal({**GOOD, "data": {"train": [{"path": "a.jsonl", "type": "alpaca"}]}})
    assert "an item is a name or {source: NAME, weight: NUMBER}" in message


def test_an_object_that_is_not_a_source_is_named_by_its_type():
    class DataFrame:
        pass

    assert "an object of type DataFrame is not a source" in refusal({**GOOD, "data": {"train": DataFrame()}})


def test_a_share_where_steps_belong_says_what_is_counted():
    assert "steps of linear warm-up" in refusal({**GOOD, "optim": {"warmup": 0.1}})


def test_an_unknown_objective_lists_the_kinds_there_are():
    message = refusal({**GOOD, "objective": {"kind": "kto"}})
    assert "objective: there is no kind 'kto'; known are sft, dpo" in message
    assert "did you mean 'grpo'?" in refusal({**GOOD, "objective": {"kind": "grp"}})


def test_a_value_where_a_section_belongs_says_so():
    assert "optim: this is a section with keys of its own" in refusal({**GOOD, "optim": "adamw_torch"})


def test_every_key_of_a_pasted_config_of_usual_length_is_explained():
    pasted = dict.fromkeys(("base_model", "datasets", "adapter", "lora_r", "lora_alpha", "lora_dropout"), 1)
    pasted |= dict.fromkeys(("sequence_len", "sample_packing", "micro_batch_size", "num_epochs"), 1)
    pasted |= dict.fromkeys(("optimizer", "lr_scheduler", "warmup_steps", "weight_decay", "learning_rate"), 1)
    message = refusal(pasted)
    assert "unknown key 'learning_rate': in whet, it is optim.lr" in message
    assert "more problems" not in message


def test_many_problems_are_cut_to_a_screen():
    message = refusal({**GOOD, **{f"key{number}": "x" * 5000 for number in range(500)}})
    assert "more problems" in message
    assert len(message.splitlines()) <= 40
    assert len(message) < 10_000


@pytest.mark.parametrize("make", [lambda: Optim(name="foo"), Run, lambda: RunConfig(model=3, rum={})])
def test_sections_made_in_python_raise_the_errors_of_whet(make):
    with pytest.raises(WhetError):
        make()


def test_all_problems_of_nested_sections_are_still_found_at_once():
    with pytest.raises(ConfigError) as caught:
        RunConfig(model="m", data={"train": "a"}, run={"steps": 0, "batch_size": 0}, optim={"lr": -1})
    assert all(key in str(caught.value) for key in ("run.steps", "run.batch_size", "optim.lr"))


def test_long_values_are_cut_in_the_middle():
    assert shorten("short") == "short"
    cut = shorten("a" * 3_000_000 + "z")
    assert len(cut) < 200
    assert "3000001 characters" in cut
    assert cut.endswith("z")
