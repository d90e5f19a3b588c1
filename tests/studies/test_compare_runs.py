"""Comparison of runs: grouping, statistics (checked difference scipy), text, JSON and HTML output."""

import json
import math
import re

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from reporting.test_report_page import SCRIPT, Page
from whet.errors import CheckpointError, ConfigError
from whet.reporting.compare.compare_page import comparison_page, write_comparison
from whet.reporting.compare.compare_text import comparison_text
from whet.reporting.svg import COLORS
from whet.studies.compare_runs import compare_runs, comparison_json
from whet.studies.statistics import hedges_g, interval

LOSSES = {1e-4: [1.0, 1.3, 0.9], 1e-3: [0.5, 0.7, 0.55], 1e-2: [2.0, 1.8, 2.5]}


def write_seed(parent, name, loss, *, lr=1e-3, seed=0, done=True, digest="abc", rows=(), **sections):
    """Write the files of a run without training."""
    directory = parent / name
    (directory / "final").mkdir(parents=True)
    run = {"name": name, "dir": str(parent), "seed": seed, "steps": 2}
    config = {"model": "m", "optim": {"lr": lr, "betas": [0.9, 0.95]}, "run": run, **sections}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "provenance.json").write_text(json.dumps({"data_sha256": {"valid": digest}}))
    lines = [
        {"step": 1, "loss": 3.0, "tokens_per_s": 100.0, "lr": lr},
        {"step": 2, "loss": 2.0, "tokens_per_s": 300.0, "lr": lr},
        {"step": 2, "eval_loss": loss, "eval_s": 0.1},
        *rows,
    ]
    if done:
        best = {"metric": "eval_loss", "value": loss - 0.1, "step": 1}
        lines.append({"summary": {"steps": 2, "seconds": 4.0, "best": best, "test": {"loss": 7.0, "s": 1}}})
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory


@pytest.fixture
def new_run(tmp_path):
    """Return a function that writes the files of a run."""
    return lambda name, loss, **more: write_seed(tmp_path / "runs", name, loss, **more)


@pytest.fixture
def sweep(new_run):
    """Three learning rates with three seeds each."""
    return [
        new_run(f"lr-{lr}-seed-{seed}", loss, lr=lr, seed=seed)
        for lr, losses in LOSSES.items()
        for seed, loss in enumerate(losses)
    ]


def test_runs_are_grouped_by_seed_and_named_by_differences(sweep):
    comparison = compare_runs(sweep)
    assert [group.name for group in comparison.groups] == ["lr=0.0001", "lr=0.001", "lr=0.01"]
    assert [len(group.runs) for group in comparison.groups] == [3, 3, 3]
    assert comparison.differences == {"optim.lr": [1e-4, 1e-3, 1e-2]}
    assert comparison.metric == "eval_loss"
    assert comparison.notes == []
    finals = comparison.groups[0].finals[0]
    assert finals == pytest.approx(
        {
            "eval_loss": 1.0,
            "loss": 2.0,
            "tokens_per_s": 200.0,
            "seconds": 4.0,
            "best_eval_loss": 0.9,
            "test_loss": 7.0,
        }
    )


def test_statistics_match_scipy(sweep):
    stats = pytest.importorskip("scipy.stats")
    comparison = compare_runs(sweep)
    first = LOSSES[1e-4]
    ps = []
    for group, difference, values in zip(
        comparison.groups, comparison.differences_to_first("eval_loss"), LOSSES.values(), strict=True
    ):
        scores = group.scores("eval_loss")
        assert scores.mean == pytest.approx(np.mean(values))
        assert scores.std == pytest.approx(np.std(values, ddof=1))
        expected = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
        assert scores.interval == pytest.approx(expected)
        if difference is None:
            continue
        pooled = math.sqrt((np.var(values, ddof=1) + np.var(first, ddof=1)) / 2)
        correction = math.gamma(2) / (math.sqrt(2) * math.gamma(1.5))  # 4 degrees of freedom
        assert difference.difference == pytest.approx(np.mean(values) - np.mean(first))
        assert difference.hedges_g == pytest.approx(correction * difference.difference / pooled)
        paired = stats.ttest_rel(values, first)
        assert (difference.t, difference.p, difference.pairs) == (
            pytest.approx(paired.statistic),
            pytest.approx(paired.pvalue),
            3,
        )
        ps.append((difference.p, difference.p_adjusted))
    low, high = sorted(ps)
    assert low[1] == pytest.approx(2 * low[0])
    assert high[1] == pytest.approx(max(high[0], low[1]))


def test_confidence_interval_matches_scipy():
    stats = pytest.importorskip("scipy.stats")

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.floats(-100, 100), min_size=2, max_size=40), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
    def check(values, level):
        half = stats.t.ppf((1 + level) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
        low, high = interval(values, level)
        assert (high - low) / 2 == pytest.approx(half, rel=1e-6, abs=1e-9)

    check()


def test_effect_size_without_deviation():
    assert hedges_g([1.0], [2.0]) is None
    assert hedges_g([1.0, 1.0], [2.0]) is None
    assert hedges_g([1.0, 1.0], [2.0, 2.0]) == -math.inf
    assert hedges_g([1.0, 1.0], [1.0, 1.0]) == 0.0
    assert interval([1.0]) is None


def test_seeds_are_paired_by_value(new_run):
    runs = [new_run(f"a{seed}", 1.0 + seed, lr=1e-4, seed=seed) for seed in (0, 1, 2)]
    runs += [new_run(f"b{seed}", 2.0 + seed + 0.1 * (seed == 1), lr=1e-3, seed=seed) for seed in (2, 1, 9)]
    [_, difference] = compare_runs(runs).differences_to_first("eval_loss")
    assert difference.pairs == 2
    assert difference.t == pytest.approx(
        1.05 / (0.05 * math.sqrt(2) / math.sqrt(2))
    )  # differences 1.1 and 1.0


def test_single_runs_have_a_difference_without_statistics(new_run):
    comparison = compare_runs([new_run("one", 1.0), new_run("other", 1.5, lr=0.1)])
    [_, difference] = comparison.differences_to_first("eval_loss")
    assert (difference.difference, difference.hedges_g, difference.p) == (0.5, None, None)
    text = comparison_text(comparison)
    assert "best: lr=0.001" in text
    assert "Hedges" not in text
    assert "interval" not in text


def test_directory_of_runs_is_expanded_without_duplicates(sweep, tmp_path):
    assert len(compare_runs([tmp_path / "runs"]).runs) == 9
    assert len(compare_runs([tmp_path / "runs", sweep[0]]).runs) == 9


def test_groups_with_many_differences_are_named_by_run(new_run):
    other = {"method": {"kind": "lora", "rank": 8, "alpha": 16, "variant": "lora", "dropout": 0.1}}
    comparison = compare_runs([new_run("full", 1.0), new_run("small", 2.0, **other)])
    assert [group.name for group in comparison.groups] == ["full", "small"]
    assert comparison.differences["method.rank"] == [None, 8]


def test_notes_report_unfinished_runs_and_different_data(new_run):
    comparison = compare_runs([new_run("one", 1.0), new_run("other", 2.0, done=False, digest="def")])
    assert comparison.notes == ["other is not finished", "data.valid differs between the runs"]
    assert "note: other is not finished" in comparison_text(comparison)
    assert "other is not finished" in Page(comparison_page(comparison)).text


@pytest.mark.parametrize("last", ["nan", "inf"])
def test_diverged_run_is_never_best(new_run, last):
    """The last value counts, and the group of a diverged run is never the best."""
    for seed in (0, 1):
        new_run(f"slow-{seed}", 0.9, lr=1e-4, seed=seed)
    wild = {"step": 3, "eval_loss": last, "eval_s": 0.1}
    runs = [new_run("fast-0", 0.1, lr=1.0, rows=[wild]), new_run("fast-1", 0.2, lr=1.0, seed=1)]
    runs += [new_run(f"fair-{seed}", 0.8, lr=1e-2, seed=seed) for seed in (0, 1)]
    comparison = compare_runs([runs[0].parent])
    groups = {group.name: group for group in comparison.groups}
    assert groups["lr=1"].values("eval_loss") == [0.2]
    assert (
        f"fast-0: the last eval_loss is {last}; it is left out, and its group cannot rank first"
        in comparison.notes
    )
    text = comparison_text(comparison)
    assert "best: lr=0.01" in text
    assert "fast-0: the last" in text
    stored = json.loads(json.dumps(comparison_json(comparison), allow_nan=False))
    assert any("fast-0" in note for note in stored["notes"])


def test_metric_can_be_chosen(sweep):
    comparison = compare_runs(sweep, metric="tokens_per_s")
    assert comparison.metrics[0] == "tokens_per_s"
    assert "higher is better" in comparison_text(comparison)
    with pytest.raises(ConfigError, match="no run has a metric 'f1'"):
        compare_runs(sweep, metric="f1")


def test_comparison_json(sweep):
    stored = json.loads(json.dumps(comparison_json(compare_runs(sweep)), allow_nan=False))
    assert stored["groups"][1]["metrics"]["eval_loss"]["values"] == LOSSES[1e-3]
    assert stored["groups"][1]["setting"] == {"optim.lr": 1e-3}
    assert stored["groups"][1]["runs"][2]["seed"] == 2
    assert stored["groups"][2]["against_first"]["eval_loss"]["pairs"] == 3
    assert stored["groups"][0]["against_first"] == {}


def test_comparison_page_has_charts_and_is_self_contained(sweep, tmp_path):
    comparison = compare_runs(sweep)
    text = comparison_page(comparison)
    page = Page(text)
    assert "script" not in page.tags
    assert len(set(page.ids)) == len(page.ids)
    charts = {name for name in page.ids if name.startswith("chart-")}
    names = ("intervals", "swept-optim-46-lr", "eval_loss", "loss", "lr", "tokens_per_s")
    assert charts == {f"chart-{name}" for name in names}
    assert text == comparison_page(compare_runs(sweep))
    for expected in ("9 in 3 groups", "best: lr=0.001", "optim.lr", "lr-0.01-seed-2"):
        assert expected in page.text
    with pytest.raises(ConfigError, match=r"does not end in \.html"):
        write_comparison(comparison, tmp_path / "page.txt")


def test_page_draws_first_and_best_groups_if_there_are_too_many(new_run):
    count = len(COLORS) + 3
    runs = [new_run(f"r{n}", 5.0 if n == 0 else 4.0 - n / 10, lr=n + 1.0) for n in range(count)]
    page = Page(comparison_page(compare_runs(runs)))
    assert "3 more are not drawn" in page.text
    curves = page.text[page.text.index("Curves") : page.text.index("3 more are not drawn")]
    assert [int(lr) for lr in re.findall(r"lr=(\d+)", curves.replace("lr=", " lr="))] == [
        1,
        *range(count, 4, -1),
    ]


def test_comparison_escapes_text_and_tolerates_damaged_runs(new_run):
    one = new_run("one", 1.0, data={"train": SCRIPT}, rows=[{"step": 2, SCRIPT: 1.0}])
    two = new_run("two", 2.0, data={"train": "x\x1b[31m"})
    three = new_run("three", math.nan)
    (three / "config.yaml").write_text("[")
    (three / "metrics.jsonl").write_text('{"step": 1, "loss": "nan"}\n{torn')
    comparison = compare_runs([one, two, three])
    assert len(comparison.groups) == 3
    text = comparison_page(comparison)
    assert "<script" not in text
    assert "config.yaml is not a valid config" in Page(text).text
    assert "\x1b" not in comparison_text(comparison)


def test_invalid_comparison_is_rejected(new_run, tmp_path):
    one = new_run("one", 1.0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="a comparison needs at least two runs"):
        compare_runs([one, one])
    for name, message in (("none", "does not exist"), ("empty", "contains no runs")):
        with pytest.raises(CheckpointError, match=message):
            compare_runs([one, tmp_path / name])


@pytest.mark.parametrize("last", [1e200, -1e308, 1e31])
def test_huge_values_do_not_break_the_comparison(new_run, last):
    wild = [{"step": 3, "eval_loss": 500.0, "eval_perplexity": last, "eval_s": 0.1}]
    runs = [new_run(f"wild-{seed}", 0.1, lr=1.0, seed=seed, rows=wild) for seed in (0, 1)]
    runs += [new_run(f"fair-{seed}", 0.8, lr=1e-2, seed=seed) for seed in (0, 1)]
    comparison = compare_runs(runs)
    assert "best: lr=0.01" in comparison_text(comparison)
    assert Page(comparison_page(comparison)).text
    [group] = [group for group in comparison.groups if group.name == "lr=1"]
    assert group.values("eval_perplexity") == []


CLASSIFY = {"kind": "classify", "classes": ["a", "b"], "focal": 0.0}
DPO = {"kind": "dpo", "beta": 0.1}
MIX = {
    "kind": "mix",
    "parts": [
        {"weight": 1.0, "objective": {"kind": "sft"}, "data": {"train": "a"}},
        {"weight": 0.5, "objective": DPO, "data": {"train": "b"}},
    ],
}


def other_mix(**changes):
    return {**MIX, "parts": [MIX["parts"][0], {**MIX["parts"][1], **changes}]}


@pytest.mark.parametrize(
    ("first", "second", "metric", "keys"),
    [
        ({"objective": CLASSIFY}, {"objective": {**CLASSIFY, "focal": 2.0}}, "eval_loss", "objective.focal differs"),
        ({"objective": CLASSIFY}, {"objective": {**CLASSIFY, "focal": 2.0}}, "loss", "objective.focal differs"),
        (
            {"objective": {**CLASSIFY, "focal": 0.0, "normalise": "samples"}},
            {"objective": {**CLASSIFY, "focal": 2.0, "normalise": "weights"}},
            "best_eval_loss",
            "objective.focal, objective.normalise differ",
        ),
        ({"objective": DPO}, {"objective": {**DPO, "beta": 0.5}}, "test_loss", "objective.beta differs"),
        ({"objective": DPO}, {"objective": {"kind": "ipo", "beta": 0.1}}, "eval_loss", "objective.kind differs"),
        ({}, {"objective": {"kind": "mtp", "weight": 0.3}}, "eval_loss", "objective.kind differs"),
        ({"objective": MIX}, {"objective": other_mix(weight=1.0)}, "eval_loss", "objective.parts.1.weight differs"),
        (
            {"objective": MIX},
            {"objective": other_mix(objective={**DPO, "beta": 0.5})},
            "eval_dpo.loss",
            "objective.parts.1.objective.beta differs",
        ),
        ({"data": {"supervise": "all"}}, {"data": {"supervise": "last"}}, "eval_bits_per_byte", "data.supervise differs"),
        (
            {"model": {"preset": "nano", "tokenizer": "bytes"}},
            {"model": {"preset": "nano", "tokenizer": "bpe:300"}},
            "eval_perplexity",
            "model.tokenizer differs",
        ),
        ({"experts": {"z_loss": 0.0}}, {"experts": {"z_loss": 0.1}}, "loss", "experts.z_loss differs"),
    ],
)  # fmt: skip
def test_incomparable_metric_is_not_ranked(new_run, tmp_path, first, second, metric, keys):
    comparison, text = two_settings(new_run, tmp_path, first, second, metric)
    note = f"{metric} is not comparable between these groups: {keys}"
    assert note in comparison.notes
    assert f"note: {note}" in text
    assert "best: " not in text
    assert f"not ranked: the groups are not comparable by {metric}; choose another with --metric" in text
    assert comparison_json(comparison)["not_comparable_by"]


@pytest.mark.parametrize(
    ("first", "second", "metric"),
    [
        ({"objective": CLASSIFY}, {"objective": {**CLASSIFY, "focal": 2.0}}, "eval_accuracy"),
        ({"objective": {**CLASSIFY, "pooling": "last"}}, {"objective": {**CLASSIFY, "pooling": "mean"}}, "eval_loss"),
        ({"objective": {**DPO, "gamma": 1.0}}, {"objective": {**DPO, "gamma": 2.0}}, "eval_loss"),
        (
            {"objective": {"kind": "grpo", "beta": 0.0, "reference_model": "a", "samples": 1}},
            {"objective": {"kind": "grpo", "beta": 0.0, "reference_model": "b", "samples": 2}},
            "loss",
        ),
        ({}, {"objective": {"kind": "mtp", "weight": 0.3}}, "eval_perplexity"),
        ({}, {"objective": {"kind": "distrust", "mode": "weight"}}, "eval_cross_entropy"),
        ({"objective": MIX}, {"objective": other_mix(weight=1.0)}, "eval_dpo.loss"),
        ({"objective": MIX}, {"objective": other_mix(batch_size=4)}, "eval_loss"),
        ({"experts": {"z_loss": 0.0}}, {"experts": {"z_loss": 0.1}}, "eval_loss"),
        ({"data": {"max_length": 64}}, {"data": {"max_length": 128}}, "eval_loss"),
        (
            {"model": {"preset": "nano", "tokenizer": "bytes"}},
            {"model": {"preset": "nano", "tokenizer": "bpe:300"}},
            "eval_bits_per_byte",
        ),
        (
            {"objective": CLASSIFY, "model": {"preset": "nano", "tokenizer": "bytes"}},
            {"objective": CLASSIFY, "model": {"preset": "nano", "tokenizer": "bpe:300"}},
            "eval_loss",
        ),
    ],
)  # fmt: skip
def test_comparable_metric_is_ranked(new_run, tmp_path, first, second, metric):
    comparison, text = two_settings(new_run, tmp_path, first, second, metric)
    assert comparison.notes == []
    assert comparison.incomparable_keys == []
    assert "\nbest: " in text


def two_settings(new_run, tmp_path, first, second, metric):
    """Compare two settings with two seeds each; return the comparison and its text."""
    for name, sections, value in (("one", first, 1.0), ("two", second, 2.0)):
        for seed in (0, 1):
            score = value + seed / 100
            new_run(f"{name}-{seed}", score, seed=seed, rows=[{"step": 2, metric: score}], **sections)
    comparison = compare_runs([tmp_path / "runs"], metric=metric)
    return comparison, comparison_text(comparison)
