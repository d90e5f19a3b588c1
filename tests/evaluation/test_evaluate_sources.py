"""Several sources and data options of an evaluation, against transformers in float64."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import whet
from tiny import run_config
from whet.cli.app import main
from whet.errors import ConfigError, DataError
from whet.evaluation.data_options import parse_columns, parse_format, parse_template_args

FIRST = ["the lamp is on", "a", "where is the door of the garage?"]
SECOND = ["kitchen"] * 2 + ["turn off every light in the house, please, and lock it"] * 3


@pytest.fixture
def paths(tmp_path):
    files = {"a.jsonl": FIRST, "b.jsonl": SECOND}
    for name, texts in files.items():
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [str(tmp_path / name) for name in files]


@pytest.fixture(scope="module")
def float64_model(tiny_directory):
    return AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)


def plain_loss(model, tokenizer, texts):
    """Return the sum of the losses in float64, the number of tokens and the number of bytes."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits
        total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total, count


@pytest.fixture
def model(tiny_directory):
    return whet.load(tiny_directory, dtype=torch.float64, device="cpu")


def test_metrics_per_source_and_in_total_equal_float64(model, float64_model, paths):
    metrics = whet.evaluate(model, paths)
    sums = [plain_loss(float64_model, model[1], texts) for texts in (FIRST, SECOND)]
    for path, (total, count) in zip(paths, sums, strict=True):
        ours = metrics["sources"][path]
        assert ours["eval_loss"] == pytest.approx(total / count, rel=1e-7)
        assert ours["eval_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
        assert ours["supervised_tokens"] == count
    mean = sum(total for total, _ in sums) / sum(count for _, count in sums)
    assert metrics["eval_loss"] == pytest.approx(mean, rel=1e-7)  # a mean over tokens, not over sources
    parts = [
        metrics["sources"][path]["eval_loss"] * count for path, (_, count) in zip(paths, sums, strict=True)
    ]
    assert metrics["eval_loss"] == pytest.approx(sum(parts) / sum(count for _, count in sums), rel=1e-14)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
    one_file = whet.evaluate(model, [paths[0]])
    assert "sources" not in one_file
    assert one_file["eval_loss"] == metrics["sources"][paths[0]]["eval_loss"]


def test_bits_per_byte_and_the_total_equal_those_of_one_file(model, paths, tmp_path):
    both = tmp_path / "both.jsonl"
    both.write_text("".join(Path(path).read_text() for path in paths))
    expected, metrics = whet.evaluate(model, both), whet.evaluate(model, paths)
    for name in ("eval_loss", "eval_perplexity", "eval_bits_per_byte"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-7)


def test_weighted_sources_are_a_mixture(model, float64_model, paths):
    mixture = [{"source": paths[0], "weight": 1}, {"source": paths[1], "weight": 1}]
    metrics = whet.evaluate(model, mixture)
    # equal weights: the shorter source of 3 records repeats until the other's 5 records were read
    repeated = [FIRST[index % 3] for index in range(5)]
    total, count = plain_loss(float64_model, model[1], [*repeated, *SECOND])
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-7)
    first, count = plain_loss(float64_model, model[1], FIRST)
    assert metrics["sources"][paths[0]]["eval_loss"] == pytest.approx(first / count, rel=1e-7)


def test_responses_are_counted_per_source_and_in_total(model, tmp_path):
    specs = ["synth:house-test:3", "synth:house:5"]
    metrics = whet.evaluate(model, specs, generate=True, max_tokens=3, checks=["regex=."])
    rates = [metrics["sources"][spec]["regex"] for spec in specs]
    assert metrics["regex"] == pytest.approx((3 * rates[0] + 5 * rates[1]) / 8)
    assert "exact_match" in metrics


def test_a_source_given_twice_is_rejected(model, paths):
    with pytest.raises(ConfigError, match="given twice"):
        whet.evaluate(model, [paths[0], paths[0]])


QUESTIONS = [{"question": "2+2", "answer": "4"}, {"question": "3+3", "answer": "six"}]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    renamed = tmp_path / "renamed.jsonl"
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in QUESTIONS]
    renamed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, renamed


COLUMNS = {"prompt": "question", "completion": "answer"}


def test_hint_for_other_columns_names_the_option(tiny_directory, tmp_path, monkeypatch, capsys):
    path = tmp_path / "qa.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    monkeypatch.setattr(sys, "argv", ["whet", "eval", str(tiny_directory), "--data", str(path)])
    with pytest.raises(SystemExit):
        main()
    assert "hint: add --columns prompt=question,completion=answer" in capsys.readouterr().err


def test_columns_rename_fields(model, questions):
    path, renamed = questions
    ours, expected = whet.evaluate(model, path, columns=COLUMNS), whet.evaluate(model, renamed)
    assert ours["eval_loss"] == expected["eval_loss"]
    as_text = whet.evaluate(model, path, columns={"text": "question"}, record_format="text")
    assert as_text["eval_loss"] != ours["eval_loss"]


def test_settings_of_a_run_are_the_default(tiny_directory, questions, paths, tmp_path):
    path, renamed = questions
    data = {"train": str(path), "valid": None, "columns": COLUMNS, "supervise": "all"}
    run = whet.train(run_config(tiny_directory, tmp_path, data=data, run={"steps": 1}), verbose=0).directory
    expected = whet.evaluate(whet.load(run), renamed, supervise="all")["eval_loss"]
    for directory in (run, run / "final", str(run)):
        assert whet.evaluate(directory, path)["eval_loss"] == expected
    assert whet.evaluate(run, renamed)["eval_loss"] == expected  # the fields already have whet's names
    assert whet.evaluate(run, path, supervise="assistant")["eval_loss"] != expected
    with pytest.raises(DataError, match="no record has the column"):
        whet.evaluate(run, paths[0])
    assert whet.evaluate(run, paths[0], columns={})["eval_loss"] > 0


def test_template_and_its_arguments_change_the_prompt(model, tmp_path):
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ prefix | default('') }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    before = model[1].chat_template
    plain = whet.evaluate(model, chat)["eval_loss"]
    same = whet.evaluate(model, chat, template=str(template))["eval_loss"]
    other = whet.evaluate(model, chat, template=str(template), template_args={"prefix": "Be kind."})
    assert same == plain != other["eval_loss"]
    assert model[1].chat_template == before


@pytest.mark.parametrize(
    ("text", "columns"), [("a=b", {"a": "b"}), ("a=b, c=d", {"a": "b", "c": "d"}), ("none", {})]
)
def test_columns_are_parsed(text, columns):
    assert parse_columns(text) == columns


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"enable_thinking": false, "n": [1]}', {"enable_thinking": False, "n": [1]}),
        ("enable_thinking=false,date=now", {"enable_thinking": False, "date": "now"}),
        ("none", {}),
    ],
)
def test_template_arguments_are_parsed(text, arguments):
    assert parse_template_args(text) == arguments


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_columns, "a"),
        (parse_columns, "=b"),
        (parse_template_args, "{broken"),
        (parse_template_args, "a"),
        (parse_format, "json"),
    ],
)
def test_malformed_options_are_rejected(parse, text):
    with pytest.raises(ConfigError, match=text):
        parse(text)


def test_the_command_prints_a_line_per_source(tiny_directory, paths, capsys, monkeypatch):
    arguments = ["whet", "eval", str(tiny_directory), "--data", paths[0], "--data", paths[1], "--no-generate"]
    outputs = []
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        with pytest.raises(SystemExit) as info:
            main()
        assert info.value.code in (0, None)
        outputs.append(capsys.readouterr().out)
    lines, metrics = outputs[0].splitlines(), json.loads(outputs[1])
    assert [line.split()[0] for line in lines] == ["source", *paths, "total"]
    assert f"{metrics['eval_loss']:.4f}" in lines[-1]
