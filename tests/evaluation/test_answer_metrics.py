"""Metrics of one's own: they see the same greedy answers that transformers gives, generated once."""

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
    """What transformers answers, each question by itself."""
    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    answers = []
    for question in questions:
        tokens = torch.tensor([question.tokens])
        output = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=256)
        answers.append(tiny[1].decode(output[0, tokens.shape[1] :], skip_special_tokens=True))
    return answers


def test_answers_are_those_of_transformers_in_the_order_of_the_questions(tiny, questions, theirs):
    asked = []
    assert greedy_answers(*tiny, questions, max_tokens=8, progress=asked.append) == theirs
    assert asked == [3]
    assert len(set(theirs)) > 1


def test_a_metric_sees_every_answer_with_its_record(tiny, questions, theirs):
    seen = []

    def mean_length(answers, records):
        seen.append((answers, [dict(record) for record in records]))
        for record in records:
            record.clear()  # its own copies
        return sum(map(len, answers)) / len(answers)

    metrics = AnswerMetrics({"length": "python:length"}, {"length": mean_length})
    evaluate = answer_evaluator(*tiny, questions, max_tokens=8, exact=False, metrics=metrics)
    expected = sum(map(len, theirs)) / 3
    assert evaluate() == {"eval_length": expected}
    assert evaluate() == {"eval_length": expected}
    assert seen == [(theirs, ROWS)] * 2


def test_exact_match_and_metrics_share_one_generation(tiny, questions, monkeypatch, theirs):
    right = [*questions]
    right[2] = type(right[2])(**{**vars(right[2]), "answer": theirs[2]})
    alone = exact_match(*tiny, right, max_tokens=8).metrics()
    calls = []
    generate = greedy_answers

    def counted(*args, **kwargs):
        calls.append(1)
        return generate(*args, **kwargs)

    monkeypatch.setattr(answer_metrics, "greedy_answers", counted)
    metrics = AnswerMetrics({"one": "python:one"}, {"one": lambda answers: 1})
    both = answer_evaluator(*tiny, right, max_tokens=8, metrics=metrics)()
    assert both == {**alone, "eval_one": 1.0}
    assert alone["exact_match_other"] == 1
    assert len(calls) == 1
    assert answer_evaluator(*tiny, right, max_tokens=8)() == alone


def test_functions_come_from_modules_and_files_too(tmp_path, monkeypatch):
    (tmp_path / "own_metrics.py").write_text(
        "from beside_metrics import scale\ndef count(answers, records):\n    return scale * len(answers)\n"
    )
    (tmp_path / "beside_metrics.py").write_text("scale = 2\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    named = {"file": f"{tmp_path}/own_metrics.py:count", "module": "own_metrics:count"}
    metrics = AnswerMetrics(named)
    assert metrics
    assert metrics.compute(["a", "b"], [{}, {}]) == {"eval_file": 4.0, "eval_module": 4.0}
    for name in ("own_metrics", "beside_metrics"):
        sys.modules.pop(name)
    assert not AnswerMetrics({})


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("python:short:0123456789abcdef", r"eval.metrics.m: python:short:\S+ stands for a function.*\n.*metrics="),
        ("no_such_module_at_all:f", "eval.metrics.m: .* cannot be used: .*No module named"),
        ("nowhere.py:f", "eval.metrics.m: .*nowhere.py is not a file"),
        ("math:no_such_function", "eval.metrics.m: .*math has no function 'no_such_function'"),
        ("math:pi", "eval.metrics.m: .*math has no function 'pi'"),
        ("python:none", r"eval.metrics.m: .*its signature is \(\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_before_anything_is_trained(reference, message):
    with pytest.raises(ConfigError, match=message):
        AnswerMetrics({"m": reference}, {"none": lambda: 1})


def test_a_metric_that_fails_stops_the_run_at_once_but_not_later(caplog):
    for bad in (lambda answers: {}["x"], lambda answers: None, lambda answers: "many"):
        metrics = AnswerMetrics({"m": "python:m"}, {"m": bad})
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
def test_configs_that_name_no_function_are_refused(metrics, message):
    with pytest.raises(ConfigError, match=message):
        Evaluation(metrics=metrics)


def test_parsing_a_config_imports_nothing():
    assert Evaluation(metrics={"m": "no_such_module_at_all:f"}).metrics == {"m": "no_such_module_at_all:f"}
