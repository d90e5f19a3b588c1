"""Ablation statistics (checked against scipy), text and JSON."""

import json
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.reporting.text.ablation_text import describe_ablation, write_ablation
from whet.studies.ablation import Ablation, ArmRun
from whet.studies.statistics import compare, holm, t_test_p


def test_p_value_matches_scipy():
    stats = pytest.importorskip("scipy.stats")

    @settings(deadline=None)
    @given(st.floats(-60, 60), st.integers(1, 60))
    def check(t, freedom):
        assert t_test_p(t, freedom) == pytest.approx(
            2 * stats.t.sf(abs(t), freedom), abs=1e-9
        )  # the accuracy of scipy itself

    check()


def test_paired_t_test_matches_scipy():
    stats = pytest.importorskip("scipy.stats")
    one, other = [1.0, 1.2, 0.9, 1.4, 1.1], [0.8, 1.3, 0.7, 1.1, 1.0]
    [result] = compare({"a": one, "b": other})
    expected = stats.ttest_rel(one, other)
    assert result.t == pytest.approx(expected.statistic)
    assert result.p == result.p_adjusted == pytest.approx(expected.pvalue)
    differences = [a - b for a, b in zip(one, other, strict=True)]
    average = sum(differences) / 5
    deviation = math.sqrt(sum((x - average) ** 2 for x in differences) / 4)
    assert result.effect_size == pytest.approx(average / deviation)


def test_holm_correction():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_equal_and_constantly_different_series():
    [same] = compare({"a": [1.0, 2.0], "b": [1.0, 2.0]})
    assert (same.difference, same.effect_size, same.p) == (0.0, 0.0, 1.0)
    [always] = compare({"a": [1.0, 2.0], "b": [2.0, 3.0]})
    assert (always.effect_size, always.p) == (-math.inf, 0.0)


def ablation(**series):
    runs = [
        ArmRun(arm, seed, f"runs/{arm}-seed-{seed}", value, False)
        for arm, values in series.items()
        for seed, value in enumerate(values)
    ]
    return Ablation(20, dict.fromkeys(series, 195_540), runs)


def test_ablation_text_and_json(tmp_path):
    results = ablation(softmax=[0.10, 0.11, 0.12], padic=[0.101, 0.109, 0.121], dense=[0.01, 0.021, 0.03])
    text = describe_ablation(results)
    assert "softmax and padic do not differ significantly" in text
    assert "dense is significantly better than softmax" in text
    assert "Cohen d_z" in text
    paths = write_ablation(results, tmp_path)
    stored = json.loads(paths[0].read_text())
    assert stored["arms"]["dense"]["values"] == [0.01, 0.021, 0.03]
    assert len(stored["comparisons"]) == 3
    if len(paths) > 1:
        assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    caplog.set_level("INFO", logger="whet")
    paths = write_ablation(ablation(a=[1.0, 2.0], b=[1.5, 2.0]), tmp_path)
    assert [path.name for path in paths] == ["ablation.json"]
    assert "matplotlib is not installed" in caplog.text
