"""Runs beside each other: what differs in their configs, and their metrics with seeds taken together."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from whet.config.load_config import flat_keys
from whet.errors import CheckpointError, ConfigError
from whet.runs.metric_series import LARGEST, Metric, as_number, metrics_of
from whet.runs.run_files import RunFiles, Values, is_run, read_run, section
from whet.studies.comparability import differing_keys
from whet.studies.statistics import compare, deviation, hedges_g, holm, interval, mean

# what runs of one group may differ in: neither changes what is learned but by chance
_CHANCE = ("run.seed", "run.name", "run.dir")
_RATES = (
    "tokens_per_s",
    "steps_per_s",
    "tflops_per_s",
    "mfu",
)  # of a run: the median, as single steps say little
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
    *("elapsed_ms", "final_loss"),  # of the quality task: other names
    *("loss_scale", "router_dropped_tokens", "probe_s", "mean_tokens_per_s"),
}
_LONGEST_NAME = 60
_MOST_KEYS_IN_A_NAME = 4


@dataclass(frozen=True)
class SeedScores:
    """One metric of one group, over its runs."""

    values: list[float]

    @property
    def mean(self) -> float:
        """Of the values."""
        return mean(self.values)

    @property
    def std(self) -> float | None:
        """Of a sample; None of one value."""
        return deviation(self.values) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """In which the mean lies with 95% confidence."""
        return interval(self.values)


@dataclass(frozen=True)
class Against:
    """A group against the first one, in one metric; differences are this group minus the first."""

    difference: float
    hedges_g: float | None  # None: too few runs
    pairs: int  # seeds that both groups have
    t: float | None = None  # paired; None with fewer than two pairs
    p: float | None = None
    p_adjusted: float | None = None  # by Holm, for all groups


@dataclass
class RunGroup:
    """Runs that differ by chance only."""

    name: str
    setting: dict[str, object]  # the keys in which groups differ, with this group's values
    runs: list[RunFiles]
    finals: list[dict[str, float]] = field(default_factory=list)  # of each run; not finite: it diverged

    def values(self, metric: str) -> list[float]:
        """Of the runs that have it, in their order."""
        return [final[metric] for final in self.finals if _counts(final.get(metric, math.nan))]

    def diverged(self, metric: str) -> dict[str, float]:
        """What is not finite, by the name of the run."""
        found = zip(self.runs, self.finals, strict=True)
        return {run.name: end[metric] for run, end in found if not _counts(end.get(metric, 0.0))}

    def scores(self, metric: str) -> SeedScores | None:
        """The same, to be counted; None where no run has it."""
        values = self.values(metric)
        return SeedScores(values) if values else None

    def by_seed(self, metric: str) -> dict[int, float]:
        """The metric by seed; where a seed ran twice, of the last."""
        found = ((seed_of(run), final.get(metric)) for run, final in zip(self.runs, self.finals, strict=True))
        return {
            seed: value for seed, value in found if seed is not None and value is not None and _counts(value)
        }


@dataclass
class RunComparison:
    """All that is known of some runs beside each other."""

    groups: list[RunGroup]
    metric: str  # what they are judged by
    metrics: list[str]  # all that can be compared, this one first
    differences: dict[str, list[object]]  # key: the value of each group
    notes: list[str]
    unlike: list[str] = field(default_factory=list)  # keys that make `metric` another quantity in each group

    @property
    def runs(self) -> list[RunFiles]:
        """Of all groups."""
        return [run for group in self.groups for run in group.runs]

    def against_first(self, metric: str) -> list[Against | None]:
        """Each group against the first one; None for the first, and where one of them has no such metric."""
        found = [None, *(_against(group, self.groups[0], metric) for group in self.groups[1:])]
        tested = [each for each in found if each is not None and each.p is not None]
        adjusted = dict(zip(map(id, tested), holm([each.p or 0.0 for each in tested]), strict=True))
        return [
            Against(**{**vars(each), "p_adjusted": adjusted[id(each)]}) if id(each) in adjusted else each
            for each in found
        ]


def _counts(value: float) -> bool:
    """Whether it is a number that something can be said of: a perplexity of 1e200 is as good as infinite."""
    return abs(value) <= LARGEST


def _against(group: RunGroup, first: RunGroup, metric: str) -> Against | None:
    mine, theirs = group.scores(metric), first.scores(metric)
    if mine is None or theirs is None:
        return None
    here, there = group.by_seed(metric), first.by_seed(metric)
    seeds = sorted(here.keys() & there.keys())
    apart, effect = mine.mean - theirs.mean, hedges_g(mine.values, theirs.values)
    if len(seeds) < 2:
        return Against(apart, effect, len(seeds))
    pairs = {"this": [here[seed] for seed in seeds], "first": [there[seed] for seed in seeds]}
    [tested] = compare(pairs)
    return Against(apart, effect, len(seeds), tested.t, tested.p)


def compare_runs(places: Sequence[str | Path], *, metric: str | None = None) -> RunComparison:
    """Read runs, and the runs in directories of runs, and put them beside each other."""
    directories = list(dict.fromkeys(found for place in places for found in _runs_at(Path(place))))
    if len(directories) < 2:
        raise ConfigError("one run is no comparison", hint="name two or more runs, or a directory of runs")
    runs = [read_run(directory) for directory in directories]
    groups = _grouped(runs)
    known = list(dict.fromkeys(name for group in groups for final in group.finals for name in final))
    if metric is not None and metric not in known:
        listed = ", ".join(known) or "they have none"
        raise ConfigError(f"no run has a metric {metric!r}", hint=f"known: {listed}")
    chosen = metric or _judged_by(runs, known)
    differences = {key: [group.setting[key] for group in groups] for key in groups[0].setting}
    ordered = sorted(known, key=lambda name: (name != chosen, not name.startswith(("test_", "best_"))))
    unlike = differing_keys([group.runs[0].config for group in groups], chosen)
    notes = [*_notes(runs), *_divergences(groups, chosen)]
    if unlike:
        keys = f"{', '.join(unlike)} {'differs' if len(unlike) == 1 else 'differ'}"
        notes.insert(0, f"{chosen} is not the same quantity in these groups: {keys}")
    return RunComparison(groups, chosen, ordered, differences, notes, unlike)


def _runs_at(place: Path) -> list[Path]:
    if is_run(place):
        return [place]
    inside = [path for path in sorted(place.iterdir()) if is_run(path)] if place.is_dir() else []
    if not inside:
        what = "has no runs in it" if place.is_dir() else "does not exist"
        raise CheckpointError(f"{place} {what}", hint="whet runs lists the runs that are there")
    return inside


def seed_of(run: RunFiles) -> int | None:
    """The seed that its config gives."""
    seed = section(run.config, "run").get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _grouped(runs: Sequence[RunFiles]) -> list[RunGroup]:
    settings = [_setting(run) for run in runs]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    differing = [key for key in keys if len({_text(setting.get(key)) for setting in settings}) > 1]
    groups: dict[str, RunGroup] = {}
    for run, setting in zip(runs, settings, strict=True):
        own = {key: setting.get(key) for key in differing}
        # a run whose config cannot be read is like no other
        identity = _text(own) if setting else str(run.directory)
        group = groups.setdefault(identity, RunGroup("", own, []))
        group.runs.append(run)
        group.finals.append(final_metrics(run))
    for group, name in zip(groups.values(), _names(list(groups.values())), strict=True):
        group.name = name
    return list(groups.values())


def _setting(run: RunFiles) -> dict[str, object]:
    """Its config, without what only names it or seeds it; lists of sections are one value."""
    return {key: value for key, value in flat_keys(run.config) if key not in _CHANCE}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _names(groups: Sequence[RunGroup]) -> list[str]:
    """By what differs where that is short, else by the name of the first run; never twice the same."""
    by_setting = [_group_name(group) for group in groups]
    fits = all(name and len(name) <= _LONGEST_NAME for name in by_setting)
    names = by_setting if fits else [group.runs[0].name for group in groups]
    if len(set(names)) < len(names):
        names = [str(group.runs[0].directory) for group in groups]
    return names


def _group_name(group: RunGroup) -> str:
    readable = all(_setting(run) for run in group.runs)
    return setting_name(group.setting) if readable and len(group.setting) <= _MOST_KEYS_IN_A_NAME else ""


def setting_name(setting: Mapping[str, object], without: str | None = None) -> str:
    """Keys and values on one line, the keys by their last part where that is clear."""
    last = [key.rpartition(".")[2] for key in setting]
    shown = last if len(set(last)) == len(last) else list(setting)
    return " ".join(
        f"{short}={setting_text(value)}"
        for short, (key, value) in zip(shown, setting.items(), strict=True)
        if key != without
    )


def setting_text(value: object) -> str:
    """A value of a config as people write it."""
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else _text(value)


def final_metrics(run: RunFiles) -> dict[str, float]:
    """The last number of each kind (of rates, the median), the best of the evaluations, and the test's."""
    found = {}
    for name, metric in metrics_of(run.rows).items():
        series = metric.train if metric.evaluation.last is None else metric.evaluation
        if series.last is not None and name not in _NOT_COMPARED:
            found[name] = median(series.values) if name in _RATES and series.values else series.last
    summary = run.summary or {}
    best = section(summary, "best")
    named = {f"best_{best.get('metric')}": best.get("value")} if best else {}
    test = {f"test_{name}": value for name, value in section(summary, "test").items() if name != "s"}
    for name, value in {**test, **named, "seconds": summary.get("seconds")}.items():
        number = as_number(value)
        if number is not None and _counts(number):
            found[name] = number
    return found


def curves_of(run: RunFiles) -> dict[str, Metric]:
    """Every metric that can be drawn over the steps."""
    return {name: metric for name, metric in metrics_of(run.rows).items() if metric.drawable}


def _judged_by(runs: Sequence[RunFiles], known: Sequence[str]) -> str:
    """What the runs themselves call their best; else a validation loss, else a training loss."""
    own = {str(section(run.summary or {}, "best").get("metric")) for run in runs if run.summary}
    wanted = (*(own if len(own) == 1 else ()), "eval_loss", "exact_match", "loss")
    return next((name for name in wanted if name in known), known[0] if known else "loss")


def _notes(runs: Sequence[RunFiles]) -> Iterator[str]:
    """What makes numbers less comparable than they look."""
    for run in runs:
        if run.status != "finished":
            yield f"{run.name} is {run.status}"
    for split in ("train", "valid", "test"):
        digests = {_text(section(run.provenance, "data_sha256").get(split)) for run in runs}
        if len(digests) > 1:
            yield f"data.{split} is not the same records in all runs"


def _divergences(groups: Sequence[RunGroup], metric: str) -> Iterator[str]:
    for group in groups:
        for name, value in group.diverged(metric).items():
            yield f"{name}: its last {metric} is {value}; it is in no mean, and its group is not the best"


def as_json(found: RunComparison) -> Values:
    """All of it, for machines; what JSON does not have is text, as in metrics.jsonl."""
    groups = []
    for place, group in enumerate(found.groups):
        scores = {name: score for name in found.metrics if (score := group.scores(name)) is not None}
        against = {name: found.against_first(name)[place] for name in scores}
        groups.append(
            {
                "name": group.name,
                "setting": group.setting,
                "runs": [
                    {"directory": str(run.directory), "seed": seed_of(run), "status": run.status}
                    for run in group.runs
                ],
                "metrics": {name: _score_json(score) for name, score in scores.items()},
                "against_first": {name: _plain(vars(each)) for name, each in against.items() if each},
            }
        )
    return {
        "metric": found.metric,
        "interval": "95%, Student's t",
        "effect_size": "Hedges' g: difference of the means / pooled standard deviation, corrected",
        "test": "paired t-test over the seeds both groups have, two-sided; p_adjusted by Holm",
        "groups": groups,
        "differences": found.differences,
        "not_comparable_by": found.unlike,
        "notes": found.notes,
    }


def _score_json(score: SeedScores) -> Values:
    return _plain({"values": score.values, "mean": score.mean, "std": score.std, "interval": score.interval})


def _plain(values: Mapping[str, object]) -> Values:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
