"""`whet data` and `whet train` report the same counts for classification and preference data."""

import json
import re

import pytest
import yaml
from transformers import AutoTokenizer

from tiny import run_config


@pytest.fixture
def write(tiny_directory, tmp_path):
    """Writes records and a config that reads them; returns the path of the config."""

    def written(records, **sections):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        data = {"train": str(path), "valid": None, **sections.pop("data", {})}
        config = tmp_path / "run.yaml"
        settings = run_config(tiny_directory, tmp_path, data=data, **sections)
        config.write_text(yaml.safe_dump(settings))
        return config

    return written


def lengths(text):
    """Return the smallest and largest length that `whet train` or `whet data` printed."""
    match = re.search(r"min/median/p95/max (\d+)/\d+/\d+/(\d+)", text) or re.search(
        r"lengths +min (\d+), .* max (\d+) tokens", text
    )
    return tuple(map(int, match.groups()))


TEXTS = [{"input": "x" * (3 + n), "label": "long" if n > 20 else "short"} for n in range(30)]
CLASSIFY = {"kind": "classify", "classes": ["short", "long"]}


def test_classification_lengths_and_classes_match_between_data_and_train(cli, write, tiny_directory):
    path = write(TEXTS, objective=CLASSIFY, run={"epochs": 1, "steps": None})
    code, shown, _ = cli("data", path, "--samples", 1)
    assert code == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    sizes = sorted(len(tokenizer(record["input"])["input_ids"]) for record in TEXTS)
    assert f"examples       30, {sum(sizes):,} tokens\n" in shown
    assert "classes        short 21, long 9" in shown
    assert "train.jsonl:1, label short: 3 tokens\n" in shown
    code, _, err = cli("train", path)
    assert code == 0
    assert lengths(err) == lengths(shown) == (sizes[0], sizes[-1])
    assert f"30 examples, {sum(sizes):,} tokens, length" in err
    remaining = re.search(r"\nclasses: (.*)\n", err)[1]
    assert f"for validation; remaining: {remaining}\n" in shown


def test_multi_and_soft_labels_are_shown(cli, write):
    records = [{"input": f"text {n}", "labels": [1, 0.25 * (n % 2)]} for n in range(8)]
    path = write(records, objective={**CLASSIFY, "multi_label": True, "valid_share": 0})
    _, shown, _ = cli("data", path, "--samples", 2)
    assert "train.jsonl:1, labels short: 6 tokens" in shown
    assert "train.jsonl:2, labels short, long 0.25: 6 tokens" in shown
    assert "classes        short 8, long 1" in shown


PAIRS = [{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": "bad"} for n in range(12)]
DPO = {"kind": "dpo"}


def test_preferences_are_counted_as_pairs_by_data_and_train(cli, write):
    path = write(PAIRS, objective=DPO, run={"steps": 3, "batch_size": 2})
    code, shown, _ = cli("data", path, "--samples", 1, "--check")
    assert code == 0
    assert "pairs          12 (preference, with the chat template)" in shown
    assert "3 of at most 2 pairs: 0.5 epochs" in shown
    assert "per step       2.0 pairs" in shown
    chosen, rejected = shown.index("train.jsonl:1, chosen: "), shown.index("train.jsonl:1, rejected: ")
    assert chosen < shown.index("⟦good 0⟨") < rejected < shown.index("⟦bad⟨")
    code, _, err = cli("train", path)
    assert code == 0
    assert "12 pairs of chosen and rejected, " in err
    assert "steps: 3, each of at most 2 pairs, in micro-batches" in err
    assert lengths(err) == lengths(shown)


def test_pair_is_duplicate_if_both_completions_are(cli, write):
    """An answer that several pairs reject is none."""
    alike = [{"prompt": "q", "chosen": f"good {n}", "rejected": "bad"} for n in range(12)]
    code, shown, _ = cli("data", write(alike, objective=DPO), "--check")
    assert (code, "duplicates     none" in shown) == (0, True)
    code, shown, _ = cli("data", write([*alike, alike[3]], objective=DPO), "--check")
    assert code == 2
    assert re.search(r"duplicates +1, such as \S*train.jsonl:4 = \S*train.jsonl:13\n", shown)


def test_fully_truncated_completions_are_reported(cli, write):
    records = [{"prompt": "q", "completion": "answer " * 20} for _ in range(3)]
    records = [{**record, "prompt": f"q{n}"} for n, record in enumerate(records)]
    path = write(records, data={"max_length": 40})
    code, _, err = cli("train", path)
    assert code == 0
    assert "warning: train: 100% of the records are truncated or dropped (more than 10%): raise" in err
    assert re.search(r"warning: train: .* none of 3 examples teaches the model to stop", err)
    assert "3 records truncated" in err
    code, _, err = cli("train", path, "data.max_length=4", "run.name=other")
    assert code == 2
    assert "no example is left: all 3 records were dropped" in err
    pairs = [{"prompt": f"q{n}", "chosen": "a" * 90, "rejected": "b" * 90} for n in range(3)]
    code, shown, _ = cli("data", write(pairs, objective=DPO, data={"max_length": 40}))
    assert "100% of the records are truncated" in shown
    assert "too_long to split" not in shown


def test_rejected_pairs_are_counted_as_pairs(cli, write):
    pairs = [{"prompt": f"q{n}", "chosen": "a" * 90, "rejected": "b" * (9 if n else 90)} for n in range(3)]
    path = write(pairs, objective=DPO, data={"max_length": 40, "too_long": "error"})
    _, _, err = cli("train", path)
    hint = re.search("hint: (.*)", err)[1]
    _, shown, _ = cli("data", path)
    assert "3 records longer than data.max_length" in shown
    assert f"hint: {hint}\n" in shown
    assert re.search(r"too long +3 rejected", shown)


def test_split_records_are_counted_once(cli, write):
    path = write([{"text": "abc " * 100}, {"text": "short"}], data={"max_length": 64, "too_long": "split"})
    code, _, err = cli("train", path)
    assert code == 0
    assert ", 1 record split\n" in err


def test_unused_packing_capacity_is_explained(cli, write):
    _, shown, _ = cli("data", write([{"text": f"text {n}"} for n in range(9)]))
    assert re.search(
        r"packing +\d+ tokens per micro-batch \(.*% of its limit; unused capacity costs nothing\)", shown
    )


def test_eval_warns_about_unread_record_fields(cli, tiny_directory, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "a", "group": "g", "score": 3}) + "\n")
    code, _, err = cli("eval", tiny_directory, "--data", path)
    assert code == 0
    assert "field score of 1 record is not tokenized" in err
    assert "field group" not in err
