"""Damaged files of every kind: no parser hangs, aborts, needs gigabytes or fails with an unexpected error."""

import pytest

from fuzz.harness import fuzz
from fuzz.parsers import PARSERS
from fuzz.worker import find_problem, run_case

SMOKE = {"run_directory": 1, "model_config": 3}  # cases in the quick suite; 6 for the other parsers


@pytest.mark.parametrize("name", PARSERS)
def test_a_few_damaged_files(name, tmp_path):
    parser = PARSERS[name]
    parser.build(tmp_path / "base")
    parser.parse(tmp_path / "base")
    for number in range(SMOKE.get(name, 6)):
        changed, error = run_case(parser, number, tmp_path / "base", tmp_path / "case")
        if (problem := find_problem(error)) is not None:
            raise AssertionError(f"{name} {number} ({changed}): {problem}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_damaged_files(name, tmp_path, record_property):
    outcome = fuzz(name, PARSERS[name].cases, tmp_path)
    record_property("fuzz", f"{name}: {outcome.cases} cases, {outcome.rejected} rejected")
    assert outcome.cases == PARSERS[name].cases
    assert not outcome.problems, "\n\n".join(outcome.problems)


def test_at_least_two_thousand_cases():
    assert sum(parser.cases for parser in PARSERS.values()) >= 2000


@pytest.mark.slow
def test_hanging_or_dying_worker_is_reported(tmp_path, monkeypatch):
    """Test the harness itself: two cases that end badly among good ones."""
    monkeypatch.setattr("fuzz.harness.CASE_S", 5)
    monkeypatch.setenv("WHET_FUZZ_SELF_TEST", "1")
    outcome = fuzz("self_test", 4, tmp_path)
    assert outcome.cases == 4
    hung, died = outcome.problems
    assert "self_test 1: its process did not end within" in hung
    assert "self_test 2: its process ended with -6" in died
