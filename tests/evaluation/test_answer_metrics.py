"""User-defined metrics: they receive the greedy answers that transformers generates, generated once."""

import json
import logging
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from whet.config.eval import Evaluation
from whet.data.sources.source import open_source
from whet.data.tokens.prepare_dataset import Preparation
from whet.errors import ConfigError, RunError
from whet.evaluation import answer_metrics
from whet.evaluation.answer_metrics import AnswerMetrics, answer_evaluator
from whet.evaluation.exact_match import exact_match, greedy_answers

ROWS = [
    {"prompt": "2+2=", "completion": "4", "group": "sums"},
    {"prompt": "a longer question, so that lengths differ", "completion": "x", "level": 3},
    {"prompt": "3", "completion": "yes", "group": "other"},
]


@pytest.fixture
def questions(tiny, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Preparation(tiny[1], cache=tmp_path).questions(open_source(str(path)))


@pytest.fixture
def theirs(tiny_directory, tiny, questions):
    """The answers of transformers, generated one question at a time."""
    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    answers = []
    for question in questions:
        tokens = torch.tensor([question.tokens])
        output = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=256)
        answers.append(tiny[1].decode(output[0, tokens.shape[1] :], skip_special_tokens=True))
    return answers


def test_answers_equal_transformers_in_question_order(tiny, questions, theirs):
    answered = []
    assert greedy_answers(*tiny, questions, max_tokens=8, progress=answered.append) == theirs
    assert answered == [3]
    assert len(set(theirs)) > 1


def test_metric_receives_answers_with_records(tiny, questions, theirs):
    seen = []

    def mean_length(answers, records):
        seen.append((answers, [dict(record) for record in records]))
        for record in records:
            record.clear()  # the records are copies
        return sum(map(len, answers)) / len(answers)

    metrics = AnswerMetrics({"length": "python:length"}, {"length": mean_length})
    evaluate = answer_evaluator(*tiny, questions, max_tokens=8, exact=False, metrics=metrics)
    expected = sum(map(len, theirs)) / 3
    assert evaluate() == {"eval_length": expected}
    assert evaluate() == {"eval_length": expected}
    assert seen == [(theirs, ROWS)] * 2


def test_exact_match_and_metrics_share_one_generation(tiny, questions, monkeypatch, theirs):
    corrected = [*questions]
    corrected[2] = type(corrected[2])(**{**vars(corrected[2]), "answer": theirs[2]})
    exact_only = exact_match(*tiny, corrected, max_tokens=8).metrics()
    calls = []
    generate = greedy_answers

    def counting(*args, **kwargs):
        calls.append(1)
        return generate(*args, **kwargs)

    monkeypatch.setattr(answer_metrics, "greedy_answers", counting)
    metrics = AnswerMetrics({"one": "python:one"}, {"one": lambda answers: 1})
    results = answer_evaluator(*tiny, corrected, max_tokens=8, metrics=metrics)()
    assert results == {**exact_only, "eval_one": 1.0}
    assert exact_only["exact_match_other"] == 1
    assert len(calls) == 1
    assert answer_evaluator(*tiny, corrected, max_tokens=8)() == exact_only


def test_functions_from_modules_and_files(tmp_path, monkeypatch):
    (tmp_path / "own_metrics.py").write_text(
        "from beside_metrics import scale\ndef count(answers, records):\n    return scale * len(answers)\n"
    )
    (tmp_path / "beside_metrics.py").write_text("scale = 2\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    references = {"file": f"{tmp_path}/own_metrics.py:count", "module": "own_metrics:count"}
    metrics = AnswerMetrics(references)
    assert metrics
    assert metrics.compute(["a", "b"], [{}, {}]) == {"eval_file": 4.0, "eval_module": 4.0}
    for name in ("own_metrics", "beside_metrics"):
        sys.modules.pop(name)
    assert not AnswerMetrics({})


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("python:short:0123456789abcdef", r"eval.metrics.m: python:short:\S+ is a placeholder for a function.*\n.*metrics="),
        ("no_such_module_at_all:f", "eval.metrics.m: .* cannot be used: .*No module named"),
        ("nowhere.py:f", "eval.metrics.m: .*nowhere.py is not a file"),
        ("math:no_such_function", "eval.metrics.m: .*math has no function 'no_such_function'"),
        ("math:pi", "eval.metrics.m: .*math has no function 'pi'"),
        ("python:none", r"eval.metrics.m: .*its signature is \(\)"),
    ],
)  # fmt: skip
def test_invalid_functions_are_rejected_before_training(reference, message):
    with pytest.raises(ConfigError, match=message):
        AnswerMetrics({"m": reference}, {"none": lambda: 1})


def test_failing_metric_stops_the_run_only_at_first(caplog):
    for function in (lambda answers: {}["x"], lambda answers: None, lambda answers: "many"):
        metrics = AnswerMetrics({"m": "python:m"}, {"m": function})
        with pytest.raises(RunError, match=r"the metric m failed: .*\n  hint: it is called with the lists"):
            metrics.compute(["a"], [{}])
    metrics = AnswerMetrics({"m": "python:m"}, {"m": lambda answers: 1 / len(answers[0])})
    assert metrics.compute(["ab"], [{}]) == {"eval_m": 0.5}
    with caplog.at_level(logging.WARNING, logger="whet"):
        assert math.isnan(metrics.compute([""], [{}])["eval_m"])
    assert "the metric m failed: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "a:b"}, "eval_loss is a built-in metric"),
        ({"a b": "a:b"}, "may only contain letters, digits, _ and -"),
        ({"m": "json"}, "'json' is not a function"),
        ({"m": len}, r"m is a Python object.*metrics=\{'m': function\}"),
        ("a:b", "this must be a section with keys"),
    ],
)
def test_configs_without_function_are_rejected(metrics, message):
    with pytest.raises(ConfigError, match=message):
        Evaluation(metrics=metrics)


def test_parsing_a_config_imports_nothing():
    assert Evaluation(metrics={"m": "no_such_module_at_all:f"}).metrics == {"m": "no_such_module_at_all:f"}
