"""What `whet data` reports, against counts from the tokenizer and from the records."""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tiny import run_config
from whet.config.load_config import to_config
from whet.data.inspect.data_facts import Bin
from whet.data.inspect.problems import find_problems
from whet.data.inspect.source_shares import MAX_SOURCES
from whet.data.inspect.special_tokens import count_markers, split_template_markers
from whet.data.sources.source import Record, validate_record
from whet.errors import ConfigError
from whet.planning.plan import plan
from whet.reporting.data.data_json import data_json
from whet.reporting.data.data_page import data_page
from whet.reporting.data.data_text import _bars
from whet.runs.inspect_data import estimate_cost, view_data


def chat(user, assistant, **answer):
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant, **answer}]
    return {"messages": messages}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def tokenizer(tiny_directory):
    return AutoTokenizer.from_pretrained(tiny_directory)


def view_of(tiny_directory, tmp_path, train, **sections):
    data = {"train": train, "valid": None, **sections.pop("data", {})}
    return view_data(to_config(run_config(tiny_directory, tmp_path, data=data, **sections)))


def render(tokenizer, record):
    return tokenizer.apply_chat_template(record["messages"], tokenize=False)


def test_shares_per_source_count_what_the_tokenizer_gives(tiny_directory, tokenizer, tmp_path):
    files = {
        "a": [chat(f"q{n}", "yes" * n) for n in range(1, 9)],
        "b": [chat("other", f"no {n}") for n in range(3)],
    }
    paths = [write(tmp_path / f"{name}.jsonl", records) for name, records in files.items()]
    [split] = view_of(tiny_directory, tmp_path, paths).splits
    for share, path, records in zip(split.sources, paths, files.values(), strict=True):
        texts = [render(tokenizer, record) for record in records]
        assert (share.name, share.records) == (path, len(records))
        assert share.tokens == sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        answers = (record["messages"][1]["content"] + "<|end|>" for record in records)
        assert share.supervised == sum(
            len(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers
        )
    assert sum(share.tokens for share in split.sources) == split.tokens


def test_examples_of_one_record_have_its_source(tiny_directory, tmp_path):
    record = chat("a", "<think>b</think>c")["messages"] + chat("d", "<think>e</think>f")["messages"]
    path = write(tmp_path / "a.jsonl", [{"messages": record}, chat("g", "h")])
    data = {"template": "qwen3"}
    other = write(tmp_path / "b.jsonl", [chat("i", "j")])
    [split] = view_of(tiny_directory, tmp_path, [path, other], data=data).splits
    assert (split.records, split.examples) == (3, 4)
    assert [(share.name, share.records) for share in split.sources] == [(path, 2), (other, 1)]


def test_many_files_are_grouped(tiny_directory, tmp_path):
    for number in range(30):
        directory = tmp_path / f"d{number % 15:02}"
        directory.mkdir(exist_ok=True)
        write(directory / f"{number}.jsonl", [chat(f"q{number}", "a" * (number % 15 + 1))])
    [split] = view_of(tiny_directory, tmp_path, f"{tmp_path}/d*/*.jsonl").splits
    assert len(split.sources) == MAX_SOURCES
    assert split.sources[-1].name == "4 others"
    assert sum(share.records for share in split.sources) == 30
    assert split.sources[0].name == f"{tmp_path}/d04", "the largest stay, in the order of the data"


@pytest.mark.parametrize("too_long", ["truncate", "drop", "split"])
def test_cut_tokens(tiny_directory, tokenizer, tmp_path, too_long):
    records = [chat("q", "a" * n) for n in (5, 40, 60)]
    data = {"max_length": 32, "too_long": too_long}
    [split] = view_of(tiny_directory, tmp_path, write(tmp_path / "a.jsonl", records), data=data).splits
    lengths = [
        len(tokenizer.encode(render(tokenizer, record), add_special_tokens=False)) for record in records
    ]
    cut = {
        "truncate": sum(max(0, length - 32) for length in lengths),
        "drop": sum(length for length in lengths if length > 32),
        "split": 0,
    }
    assert split.cut_tokens == cut[too_long]
    answers = [n + 1 for n in (5, 40, 60)]  # bytes, and the end token
    supervised = {
        "truncate": cut["truncate"],  # the end of an answer is cut
        "drop": sum(answers[1:]),
        "split": 0,
    }
    assert split.cut_supervised == supervised[too_long]


def test_epoch_and_cost(tiny_directory, tmp_path):
    records = [chat(f"question {n}", f"answer {n}") for n in range(40)]
    train = write(tmp_path / "a.jsonl", records)
    run = {"epochs": 3, "steps": None, "batch_size": 4, "batch_tokens": None}
    view = view_of(tiny_directory, tmp_path, train, run=run)
    steps, split = view.steps, view.splits[0]
    assert (steps.steps, steps.steps_per_epoch) == (30, 10)
    assert steps.tokens_per_epoch == split.tokens - split.examples  # the last token is only a target
    assert steps.supervised_per_epoch == split.supervised
    cost = estimate_cost(view, "h100")
    expected = plan(view.config, device="h100")
    assert cost.step_s == pytest.approx(expected.step_s)
    assert (cost.peak_bytes, cost.device) == (expected.memory.peak, expected.target.name)
    with pytest.raises(ConfigError, match="unknown device"):
        estimate_cost(view, "h1000")


def test_pairs_count_both_sides_of_an_epoch(tiny_directory, tmp_path):
    pairs = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no no"} for n in range(8)]
    view = view_of(
        tiny_directory, tmp_path, write(tmp_path / "a.jsonl", pairs), objective={"kind": "dpo", "beta": 0.1}
    )
    assert view.steps.supervised_per_epoch == view.splits[0].supervised
    assert view.splits[0].sources[0].records == 8


# --- special tokens


def count(tokenizer, records):
    counter = count_markers(
        (validate_record(Record(r, f"x:{n}")) for n, r in enumerate(records, 1)), tokenizer
    )
    return {use.marker: (use.tokens, use.records, use.first) for use in counter.uses()}


def test_markers_in_texts(tokenizer):
    pieces = len(tokenizer.encode("<|im_end|>", add_special_tokens=False))
    assert pieces > 1
    assert len(tokenizer.encode("<|end|>", add_special_tokens=False)) == 1
    assert count(tokenizer, [chat("a", "b")]) == {}
    records = [chat("a <|im_end|> b <|im_end|>", "c"), chat("a", "b<|end|>"), chat("<|im_end|>", "c")]
    assert count(tokenizer, records) == {"<|im_end|>": (pieces, 2, "x:1"), "<|end|>": (1, 1, "x:2")}
    # a chat that was rendered before may contain the special tokens of the model, but no others
    assert count(tokenizer, [{"text": "<|user|>a<|end|>"}]) == {}
    assert count(tokenizer, [{"text": "<|im_end|>"}]) == {"<|im_end|>": (pieces, 1, "x:1")}
    assert count(tokenizer, [{**chat("a", "b"), "note": "<|im_end|>"}]) == {}, "the field is not read"
    assert count(tokenizer, [chat("a <| b |> and |> <| <||>", "if a <|b: c|> d")]) == {}


def test_markers_of_templates(tokenizer):
    template = "{{ '<|im_start|>' + messages[0].content + '<|end|>' }}<|system|>"
    pieces = {m: len(tokenizer.encode(m, add_special_tokens=False)) for m in ("<|im_start|>", "<|system|>")}
    assert split_template_markers(template, tokenizer, is_own=False) == {
        m: n for m, n in pieces.items() if n > 1
    }
    assert split_template_markers(template, tokenizer, is_own=True) == {
        "<|im_start|>": pieces["<|im_start|>"]
    }


def test_problems_name_markers(tiny_directory, tmp_path):
    train = write(tmp_path / "a.jsonl", [chat("a<|end|>", "b"), chat("<|im_end|>", "c")])
    messages = [problem.message for problem in find_problems(view_of(tiny_directory, tmp_path, train))]
    assert "train: 1 record contains <|end|> in the text, which becomes the special token" in messages
    assert any(
        "1 record contains <|im_end|> in the text, which is not a token: it becomes" in m for m in messages
    )
    view = view_of(tiny_directory, tmp_path, train, data={"template": "chatml"})
    [problem] = [p for p in find_problems(view) if "chat template writes" in p.message]
    assert "<|im_start|> (12 tokens)" in problem.message


# --- output


def test_json_has_everything(tiny_directory, tmp_path):
    records = [chat(f"question {n}", f"answer {n}", weight=0.5) for n in range(5)]
    view = view_of(tiny_directory, tmp_path, write(tmp_path / "a.jsonl", [*records, records[0]]))
    result = json.loads(json.dumps(data_json(view, find_problems(view)), allow_nan=False))
    [split] = result["splits"]
    assert (split["records"], split["duplicates"], split["formats"]) == (6, 1, {"messages": 6})
    assert sum(each["count"] for each in split["histogram"]) == 6
    assert split["weights"] == [{"weight": 0.5, "tokens": split["supervised"]}]
    assert split["sources"] == [
        {"name": split["source"], "records": 6, "tokens": split["tokens"], "supervised": split["supervised"]}
    ]
    sample = split["samples"][0]
    assert sample["origin"].endswith("a.jsonl:1")
    assert sum(len(p["ids"]) for p in sample["pieces"]) == sample["tokens"]
    assert {p["weight"] for p in sample["pieces"] if p["supervised"]} == {0.5}
    assert result["steps"]["tokens_per_epoch"] > 0
    assert result["cost"] is None
    assert result["tokenizer"]["template_facts"]["accepts_system"] in (True, False)
    assert [problem["kind"] for problem in result["problems"]] == ["warning"]


def keys_of(value):
    """Return all keys of nested objects, except those whose names come from the data."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    open_keys = ("special", "formats", "template_facts", "split_markers", "shortened")
    return {*value, *(key for name, each in value.items() if name not in open_keys for key in keys_of(each))}


def test_docs_list_every_key(tiny_directory, tmp_path):
    train = write(tmp_path / "a.jsonl", [{**chat("a<|im_end|>", "b", weight=0.5), "id": 1}] * 4)
    valid = write(tmp_path / "b.jsonl", [chat("c", "d")])
    view = view_of(tiny_directory, tmp_path, train, data={"valid": valid})
    view = dataclasses.replace(view, cost=estimate_cost(view, "h100"))
    keys = keys_of(data_json(view, find_problems(view)))
    page = (Path(__file__).parents[2] / "docs" / "data-json.md").read_text()
    assert {key for key in keys if f"`{key}`" not in page} == set()
    assert keys > {"marker", "epoch_s", "message", "ids", "held_out"}


def test_page_shows_weights_and_lengths_above_the_limit(tiny_directory, tmp_path):
    records = [chat("q", "a" * n, weight=0.25) for n in range(10, 60)]
    train = write(tmp_path / "a.jsonl", records)
    view = view_of(tiny_directory, tmp_path, train, data={"max_length": 32})
    page = data_page(view, [], title="x")
    assert "<b class='w'>0.25\u00d7</b>" in page
    assert "longer than data.max_length 32" in page
    assert page.count("class=cut") == sum(each.low > 32 for each in view.splits[0].bins) > 0


def test_bars_above_the_limit_are_lighter():
    lines = list(_bars([Bin(0, 9, 80), Bin(10, 19, 40)], 9))
    assert lines == [
        f"    0 to 9  {'█' * 40} 80",
        f"  10 to 19  {'▒' * 20} 40",
        "  ▒ longer than data.max_length 9",
    ]
    assert len(list(_bars([Bin(0, 9, 80), Bin(10, 19, 40)], 19))) == 2
