"""Checks of whet eval: the fraction of generated answers that pass a built-in reward."""

import json

import pytest

import whet
from whet.data.tokens.tokenize import Question
from whet.errors import ConfigError, DataError
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.evaluation.exact_match import greedy_answers
from whet.rl.rewards.answer_checks import parse_checks

ANSWERS = ['{"room": "attic"}', '{"room": 3}', "it is 12", "room 7"]


def questions(*expected):
    return [
        Question([1], "?", answer, f"test.jsonl:{index}", record={"prompt": "?", "completion": answer})
        for index, answer in enumerate(expected, start=1)
    ]


def test_checks_count_the_answers_that_pass(tmp_path):
    schema = {"type": "object", "properties": {"room": {"type": "string"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    specs = ["json_valid", f"json_schema={tmp_path}/schema.json", "regex=^room \\d$", "numeric_match"]
    expected = questions("3", "= 3", "12", "8")
    values = {check.name: check.fraction(ANSWERS, expected) for check in parse_checks(specs)}
    assert values == {"json_valid": 0.5, "json_schema": 0.25, "regex": 0.25, "numeric_match": 0.5}


def test_a_record_that_a_check_cannot_read_is_reported():
    [check] = parse_checks(["numeric_match"])
    with pytest.raises(DataError, match=r"test.jsonl:2: the check numeric_match failed: .*no number"):
        check.fraction(["1", "2"], questions("1", "none"))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["bleu"], "unknown check 'bleu'"),
        (["regex"], "incomplete"),
        (["json_valid=x"], "an argument too many"),
        (["regex=("], "invalid"),
        (["json_schema=nowhere.json"], "invalid"),
        (["json_valid", "json_valid"], "twice"),
    ],
)
def test_wrong_checks_are_reported(specs, message):
    with pytest.raises(ConfigError, match=message):
        parse_checks(specs)


def test_evaluate_reports_checks_beside_exact_match(tiny, monkeypatch):
    # half of the answers are the expected JSON, the others are not JSON
    def answer(model, tokenizer, asked, **_):
        return [each.answer if index % 2 else "no" for index, each in enumerate(asked)]

    monkeypatch.setattr("whet.evaluation.evaluate_model.greedy_answers", answer)
    metrics = whet.evaluate(tiny, "synth:house-test:10", generate=True, checks=["json_valid", "regex=^no$"])
    assert (metrics["exact_match"], metrics["json_valid"], metrics["regex"]) == (0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match="checks need generated responses"):
        whet.evaluate(tiny, "synth:house-test:10", checks=["json_valid"])


def test_all_answers_are_complete(tiny):
    from whet.data.sources.source import open_source

    model, tokenizer = tiny
    evaluation = ModelEvaluation(model, tokenizer, open_source("synth:house-test:4"), max_length=256)
    expected = greedy_answers(model, tokenizer, evaluation.questions, max_tokens=8)
    assert evaluation.all_answers(max_tokens=8) == expected
