"""Paired statistics of benchmark items, checked against scipy, and how runs with results are compared."""

import json
import random

import numpy as np
import pytest
from scipy import stats

from studies.test_compare_runs import write_seed
from whet.evaluation.task_result import Score, TaskResult, append_result, read_results
from whet.reporting.compare.compare_page import comparison_page
from whet.reporting.compare.compare_text import comparison_text
from whet.studies.compare_runs import compare_runs, comparison_json
from whet.studies.paired_items import bootstrap_interval, compare_items, mcnemar_p


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (3, 3), (1, 9), (40, 12), (900, 1100)])
def test_mcnemar_equals_the_binomial_test(only_first, only_second):
    flips = only_first + only_second
    expected = stats.binomtest(only_first, flips, 0.5).pvalue if flips else 1.0
    assert mcnemar_p(only_first, only_second) == pytest.approx(expected, rel=1e-9)


def test_binary_scores_are_compared_by_mcnemar():
    rng = random.Random(0)
    first = {str(item): float(rng.random() < 0.5) for item in range(200)}
    second = {item: float(rng.random() < 0.8) for item in first} | {"only here": 1.0}
    result = compare_items(first, second)
    solved = [(first[item], second[item]) for item in first]
    assert (result.only_first, result.only_second) == (solved.count((1, 0)), solved.count((0, 1)))
    assert (result.items, result.test) == (200, "McNemar")
    assert result.difference == pytest.approx(np.mean([b - a for a, b in solved]))
    assert result.interval[0] < result.difference < result.interval[1]


def test_other_scores_are_compared_by_a_paired_t_test():
    rng = random.Random(1)
    first = {str(item): rng.gauss(1.0, 0.5) for item in range(50)}
    second = {item: value - 0.1 + rng.gauss(0, 0.2) for item, value in first.items()}
    result = compare_items(first, second)
    assert result.test == "paired t"
    assert result.p == pytest.approx(stats.ttest_rel(list(second.values()), list(first.values())).pvalue)
    equal = compare_items(first, first)
    assert (equal.p, equal.interval) == (1.0, (0.0, 0.0))
    assert compare_items({"a": 1.0}, {"a": 0.0}) is None


def test_bootstrap_interval_is_close_to_scipys():
    values = np.random.default_rng(2).normal(0.1, 1.0, size=300)
    expected = stats.bootstrap((values,), np.mean, method="percentile", random_state=0).confidence_interval
    assert bootstrap_interval(values) == pytest.approx(tuple(expected), abs=0.02)


def task_result(correct, *, key="k", metric="acc", limit=None):
    value = sum(correct) / len(correct)
    return TaskResult(
        key=key,
        task="house",
        version="1",
        shots=0,
        items=len(correct),
        limit=limit,
        chat=True,
        scores={metric: Score(value, 0.05)},
        item_ids=[f"item-{index}" for index in range(len(correct))],
        item_scores={metric: [float(each) for each in correct]},
        date="2026-01-01T00:00:00+00:00",
    )


@pytest.fixture
def runs(tmp_path):
    """Two runs with results: the second solves six items that the first does not, and misses none."""
    first = write_seed(tmp_path, "first", 1.0, lr=1e-3)
    second = write_seed(tmp_path, "second", 0.9, lr=1e-4)
    append_result(first, task_result([0] * 8 + [1] * 12, key="old", limit=5))
    append_result(first, task_result([0] * 20, key="stale"))  # replaced by the next result of the task
    append_result(first, task_result([0] * 8 + [1] * 12))
    append_result(second, task_result([0] * 2 + [1] * 18))
    return [first, second]


def test_comparison_pairs_the_items_of_runs(runs):
    comparison = compare_runs(runs)
    [benchmark] = comparison.benchmarks  # the result with a limit is in one run only
    assert benchmark.values == [0.6, 0.9]
    paired = benchmark.paired[1]
    assert (paired.only_first, paired.only_second) == (0, 6)
    assert paired.p == benchmark.p_adjusted[1] == pytest.approx(stats.binomtest(0, 6).pvalue)
    text = comparison_text(comparison)
    assert "house (chat)" in text
    assert "McNemar 0:6, 20 items" in text
    assert "+0.3000" in text
    page = comparison_page(comparison)
    assert "<section id='benchmarks'>" in page
    assert "McNemar 0:6, 20 items" in page
    report = json.loads(json.dumps(comparison_json(comparison)))["benchmarks"][0]
    assert report["against_first"][1]["difference"] == pytest.approx(0.3)


def test_comparison_of_seeds_averages_their_items(tmp_path):
    runs = [write_seed(tmp_path, f"run-{n}", 1.0, lr=[1e-3, 1e-4][n // 2], seed=n % 2) for n in range(4)]
    scores = [[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 0]]
    for run, correct in zip(runs, scores, strict=True):
        append_result(run, task_result(correct))
    [benchmark] = compare_runs(runs).benchmarks
    assert benchmark.values == [0.625, 0.875]
    assert benchmark.stderrs == [None, None]
    paired = benchmark.paired[1]
    means = np.mean(scores[:2], axis=0), np.mean(scores[2:], axis=0)
    assert paired.p == pytest.approx(stats.ttest_rel(*means).pvalue)


def test_runs_without_results_have_no_benchmarks(tmp_path):
    runs = [write_seed(tmp_path, name, 1.0, lr=lr) for name, lr in (("a", 1e-3), ("b", 1e-4))]
    comparison = compare_runs(runs)
    assert comparison.benchmarks == []
    assert "McNemar" not in comparison_text(comparison)


def test_stored_results_are_read_back_without_damaged_rows(tmp_path):
    result = task_result([1, 0])
    append_result(tmp_path, result)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"task": "house"}\n{"cut off\n')
    append_result(tmp_path, result)
    assert read_results(tmp_path) == [result, result]
