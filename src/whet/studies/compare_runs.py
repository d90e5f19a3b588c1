"""Comparison of runs: their config differences, and statistics of their metrics over seeds."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from whet.config.load_config import flatten_keys
from whet.errors import CheckpointError, ConfigError
from whet.runs.metric_series import MAX_PLOTTED_VALUE, Metric, as_number, metrics_by_name
from whet.runs.run_files import JsonObject, RunFiles, is_run, nested_object, read_run
from whet.studies.comparability import differing_keys
from whet.studies.statistics import compare, deviation, hedges_g, holm, interval, mean

# keys in which the runs of a group may differ: only random effects depend on them
_SEED_KEYS = ("run.seed", "run.name", "run.dir")
_RATES = (
    "tokens_per_s",
    "steps_per_s",
    "tflops_per_s",
    "mfu",
)  # compared by their median over a run, because single steps are noisy
_NOT_COMPARED = {
    *(
        "tokens",
        "supervised_tokens",
        "step_s",
        "elapsed_s",
        "eval_s",
        "tokens_total",
        "supervised_tokens_total",
        "lr",
        "skipped",
    ),
    *("elapsed_ms", "final_loss"),  # names used by the quality task
    *("loss_scale", "router_dropped_tokens", "probe_s", "mean_tokens_per_s"),
}
_MAX_NAME_LENGTH = 60
_MAX_KEYS_IN_NAME = 4


@dataclass(frozen=True)
class SeedScores:
    """The values of one metric in the runs of one group."""

    values: list[float]

    @property
    def mean(self) -> float:
        """The mean over the runs."""
        return mean(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation, or None for a single value."""
        return deviation(self.values) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval of the mean, or None for a single value."""
        return interval(self.values)


@dataclass(frozen=True)
class GroupDifference:
    """The difference of one metric between a group and the first group (group minus first)."""

    difference: float
    hedges_g: float | None  # None: too few runs
    pairs: int  # seeds that both groups have
    t: float | None = None  # of a paired t-test; None with fewer than two pairs
    p: float | None = None
    p_adjusted: float | None = None  # Holm's correction over all groups


@dataclass
class RunGroup:
    """Runs that differ only in their seed."""

    name: str
    setting: dict[str, object]  # the keys in which groups differ, with this group's values
    runs: list[RunFiles]
    finals: list[dict[str, float]] = field(
        default_factory=list
    )  # final metrics per run; non-finite values mean that it diverged

    def values(self, metric: str) -> list[float]:
        """Return the usable values of a metric, in the order of the runs."""
        return [final[metric] for final in self.finals if _is_usable(final.get(metric, math.nan))]

    def diverged(self, metric: str) -> dict[str, float]:
        """Return the unusable values of a metric (non-finite or huge) by run name."""
        pairs = zip(self.runs, self.finals, strict=True)
        return {run.name: final[metric] for run, final in pairs if not _is_usable(final.get(metric, 0.0))}

    def scores(self, metric: str) -> SeedScores | None:
        """Return the usable values of a metric with their statistics, or None if no run has the metric."""
        values = self.values(metric)
        return SeedScores(values) if values else None

    def by_seed(self, metric: str) -> dict[int, float]:
        """Return a metric by seed; if a seed ran twice, the last value."""
        pairs = ((seed_of(run), final.get(metric)) for run, final in zip(self.runs, self.finals, strict=True))
        return {
            seed: value
            for seed, value in pairs
            if seed is not None and value is not None and _is_usable(value)
        }


@dataclass
class RunComparison:
    """The result of comparing runs."""

    groups: list[RunGroup]
    metric: str  # the metric that ranks the groups
    metrics: list[str]  # all comparable metrics, `metric` first
    differences: dict[str, list[object]]  # key: the value of each group
    notes: list[str]
    incomparable_keys: list[str] = field(default_factory=list)  # keys that make `metric` incomparable

    @property
    def runs(self) -> list[RunFiles]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    def differences_to_first(self, metric: str) -> list[GroupDifference | None]:
        """Return each group's difference to the first; None for the first itself and for missing metrics."""
        differences = [None, *(_difference(group, self.groups[0], metric) for group in self.groups[1:])]
        tested = [each for each in differences if each is not None and each.p is not None]
        adjusted = dict(zip(map(id, tested), holm([each.p or 0.0 for each in tested]), strict=True))
        return [
            GroupDifference(**{**vars(each), "p_adjusted": adjusted[id(each)]})
            if id(each) in adjusted
            else each
            for each in differences
        ]


def _is_usable(value: float) -> bool:
    """Return whether a value can be compared: a perplexity of 1e200 is as useless as infinity."""
    return abs(value) <= MAX_PLOTTED_VALUE


def _difference(group: RunGroup, first: RunGroup, metric: str) -> GroupDifference | None:
    scores, first_scores = group.scores(metric), first.scores(metric)
    if scores is None or first_scores is None:
        return None
    by_seed, first_by_seed = group.by_seed(metric), first.by_seed(metric)
    seeds = sorted(by_seed.keys() & first_by_seed.keys())
    difference = scores.mean - first_scores.mean
    effect = hedges_g(scores.values, first_scores.values)
    if len(seeds) < 2:
        return GroupDifference(difference, effect, len(seeds))
    pairs = {"this": [by_seed[seed] for seed in seeds], "first": [first_by_seed[seed] for seed in seeds]}
    [test] = compare(pairs)
    return GroupDifference(difference, effect, len(seeds), test.t, test.p)


def compare_runs(paths: Sequence[str | Path], *, metric: str | None = None) -> RunComparison:
    """Compare runs, grouping those that differ only in their seed.

    Args:
        paths: Runs, or directories of runs. The first group is the baseline.
        metric: The metric that ranks the groups; default: the one that selected the best checkpoint.

    Returns:
        The groups with their metrics and config differences.

    Raises:
        ConfigError: If there are fewer than two runs, or no run has the metric.
        CheckpointError: If a path is neither a run nor a directory of runs.
    """
    directories = list(dict.fromkeys(run for path in paths for run in _runs_at(Path(path))))
    if len(directories) < 2:
        raise ConfigError(
            "a comparison needs at least two runs", hint="name two or more runs, or a directory of runs"
        )
    runs = [read_run(directory) for directory in directories]
    groups = _group_runs(runs)
    known = list(dict.fromkeys(name for group in groups for final in group.finals for name in final))
    if metric is not None and metric not in known:
        listed = ", ".join(known) or "none"
        raise ConfigError(f"no run has a metric {metric!r}", hint=f"known: {listed}")
    ranked_by = metric or _default_metric(runs, known)
    differences = {key: [group.setting[key] for group in groups] for key in groups[0].setting}
    ordered = sorted(known, key=lambda name: (name != ranked_by, not name.startswith(("test_", "best_"))))
    incomparable = differing_keys([group.runs[0].config for group in groups], ranked_by)
    notes = [*_notes(runs), *_divergences(groups, ranked_by)]
    if incomparable:
        keys = f"{', '.join(incomparable)} {'differs' if len(incomparable) == 1 else 'differ'}"
        notes.insert(0, f"{ranked_by} is not comparable between these groups: {keys}")
    return RunComparison(groups, ranked_by, ordered, differences, notes, incomparable)


def _runs_at(directory: Path) -> list[Path]:
    if is_run(directory):
        return [directory]
    runs = [path for path in sorted(directory.iterdir()) if is_run(path)] if directory.is_dir() else []
    if not runs:
        problem = "contains no runs" if directory.is_dir() else "does not exist"
        raise CheckpointError(f"{directory} {problem}", hint="whet runs lists the existing runs")
    return runs


def seed_of(run: RunFiles) -> int | None:
    """Return the seed in a run's config, or None."""
    seed = nested_object(run.config, "run").get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _group_runs(runs: Sequence[RunFiles]) -> list[RunGroup]:
    settings = [_setting(run) for run in runs]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    differing = [key for key in keys if len({_text(setting.get(key)) for setting in settings}) > 1]
    groups: dict[str, RunGroup] = {}
    for run, setting in zip(runs, settings, strict=True):
        group_setting = {key: setting.get(key) for key in differing}
        # a run whose config cannot be read forms its own group
        identity = _text(group_setting) if setting else str(run.directory)
        group = groups.setdefault(identity, RunGroup("", group_setting, []))
        group.runs.append(run)
        group.finals.append(final_metrics(run))
    for group, name in zip(groups.values(), _names(list(groups.values())), strict=True):
        group.name = name
    return list(groups.values())


def _setting(run: RunFiles) -> dict[str, object]:
    """Return the config of a run by flat keys, without name and seed; lists of sections are one value."""
    return {key: value for key, value in flatten_keys(run.config) if key not in _SEED_KEYS}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _names(groups: Sequence[RunGroup]) -> list[str]:
    """Name groups by their settings if that is short, else by their first run; names are unique."""
    by_setting = [_group_name(group) for group in groups]
    fits = all(name and len(name) <= _MAX_NAME_LENGTH for name in by_setting)
    names = by_setting if fits else [group.runs[0].name for group in groups]
    if len(set(names)) < len(names):
        names = [str(group.runs[0].directory) for group in groups]
    return names


def _group_name(group: RunGroup) -> str:
    readable = all(_setting(run) for run in group.runs)
    return setting_name(group.setting) if readable and len(group.setting) <= _MAX_KEYS_IN_NAME else ""


def setting_name(setting: Mapping[str, object], without: str | None = None) -> str:
    """Return settings as `key=value` on one line, with keys shortened to their last part if unambiguous."""
    last = [key.rpartition(".")[2] for key in setting]
    shown = last if len(set(last)) == len(last) else list(setting)
    return " ".join(
        f"{short}={setting_text(value)}"
        for short, (key, value) in zip(shown, setting.items(), strict=True)
        if key != without
    )


def setting_text(value: object) -> str:
    """Format a config value as a user would write it."""
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else _text(value)


def final_metrics(run: RunFiles) -> dict[str, float]:
    """Return the last value of each metric (throughput: median), the best evaluation and the test metrics."""
    final = {}
    for name, metric in metrics_by_name(run.rows).items():
        series = metric.train if metric.evaluation.last is None else metric.evaluation
        if series.last is not None and name not in _NOT_COMPARED:
            final[name] = median(series.values) if name in _RATES and series.values else series.last
    summary = run.summary or {}
    best = nested_object(summary, "best")
    best_value = {f"best_{best.get('metric')}": best.get("value")} if best else {}
    test = {f"test_{name}": value for name, value in nested_object(summary, "test").items() if name != "s"}
    for name, value in {**test, **best_value, "seconds": summary.get("seconds")}.items():
        number = as_number(value)
        if number is not None and _is_usable(number):
            final[name] = number
    return final


def curves_of(run: RunFiles) -> dict[str, Metric]:
    """Return the metrics of a run that can be drawn over the steps."""
    return {name: metric for name, metric in metrics_by_name(run.rows).items() if metric.has_points}


def _default_metric(runs: Sequence[RunFiles], known: Sequence[str]) -> str:
    """Return the metric that selected the runs' best checkpoints, else a validation or training loss."""
    best_metrics = {
        str(nested_object(run.summary or {}, "best").get("metric")) for run in runs if run.summary
    }
    candidates = (*(best_metrics if len(best_metrics) == 1 else ()), "eval_loss", "exact_match", "loss")
    return next((name for name in candidates if name in known), known[0] if known else "loss")


def _notes(runs: Sequence[RunFiles]) -> Iterator[str]:
    """Yield warnings about runs whose metrics are not fully comparable."""
    for run in runs:
        if run.status != "finished":
            yield f"{run.name} is {run.status}"
    for split in ("train", "valid", "test"):
        digests = {_text(nested_object(run.provenance, "data_sha256").get(split)) for run in runs}
        if len(digests) > 1:
            yield f"data.{split} differs between the runs"


def _divergences(groups: Sequence[RunGroup], metric: str) -> Iterator[str]:
    for group in groups:
        for name, value in group.diverged(metric).items():
            yield f"{name}: the last {metric} is {value}; it is left out, and its group cannot rank first"


def comparison_json(comparison: RunComparison) -> JsonObject:
    """Return the comparison as JSON values; non-finite numbers become strings, as in metrics.jsonl."""
    groups = []
    for index, group in enumerate(comparison.groups):
        scores = {name: score for name in comparison.metrics if (score := group.scores(name)) is not None}
        differences = {name: comparison.differences_to_first(name)[index] for name in scores}
        groups.append(
            {
                "name": group.name,
                "setting": group.setting,
                "runs": [
                    {"directory": str(run.directory), "seed": seed_of(run), "status": run.status}
                    for run in group.runs
                ],
                "metrics": {name: _score_json(score) for name, score in scores.items()},
                "against_first": {
                    name: _json_values(vars(each)) for name, each in differences.items() if each
                },
            }
        )
    return {
        "metric": comparison.metric,
        "interval": "95%, Student's t",
        "effect_size": "Hedges' g: difference of the means / pooled standard deviation, corrected",
        "test": "paired t-test over the seeds both groups have, two-sided; p_adjusted by Holm",
        "groups": groups,
        "differences": comparison.differences,
        "not_comparable_by": comparison.incomparable_keys,
        "notes": comparison.notes,
    }


def _score_json(score: SeedScores) -> JsonObject:
    return _json_values(
        {"values": score.values, "mean": score.mean, "std": score.std, "interval": score.interval}
    )


def _json_values(values: Mapping[str, object]) -> JsonObject:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
