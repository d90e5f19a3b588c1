"""Many runs of one config: every combination of some values, or random draws, each with several seeds."""

import contextlib
import gc
import hashlib
import itertools
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from whet.config.load_config import load_config, make_config, to_dict
from whet.config.run_config import RunConfig
from whet.errors import CheckpointError, ConfigError, StorageError, WhetError
from whet.run_directory import CONFIG_FILE, is_finished
from whet.runs.resume_checks import differences, refuse_changes
from whet.runs.run import resume, train
from whet.storage import clear_leftovers, replace_text
from whet.training.callbacks import Callback

log = logging.getLogger("whet")

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")

_OF_THE_SWEEP = {
    "run.seed": "--seeds N runs each setting with run.seed, run.seed + 1, ...",
    "run.name": "a sweep names its runs itself",
    "run.dir": "a sweep has one place",
}

_LONGEST_NAME = 120  # file systems allow 255 bytes
_MOST_RUNS = 10_000
# what a run may change on its way, and runs that are compared must have in common
_SHARED = ("run.steps", "run.epochs", "run.budget", "eval.batches", "eval.max_new_tokens")


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, evenly on a logarithmic scale; whole ones where both ends are."""

    low: float
    high: float
    whole: bool

    def draw(self, rng: random.Random) -> str:
        """One of them, as it is written in an override."""
        value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        value = min(max(value, self.low), self.high)
        return str(round(value)) if self.whole else f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """A key, and what it is to be."""

    key: str
    values: tuple[str, ...] | Range

    def draw(self, rng: random.Random) -> str:
        """One value, by chance."""
        return self.values.draw(rng) if isinstance(self.values, Range) else rng.choice(self.values)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, and how it stands."""

    name: str
    setting: dict[str, str]
    seed: int
    status: str = "waiting"  # finished, stopped, failed
    error: str | None = None


@dataclass(frozen=True)
class Sweep:
    """What is to be run."""

    directory: Path
    plans: list[RunConfig]
    runs: list[SweepRun]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[Axis]]:
    """What holds for every run, and what is swept: a key with several values or a range."""
    fixed: list[str] = []
    axes: list[Axis] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = _split(text)
        found = _RANGE.fullmatch(text.strip())
        if not equals or (len(values) < 2 and found is None):
            fixed.append(argument)
            continue
        if key in _OF_THE_SWEEP:
            raise ConfigError(f"{key} cannot be swept", hint=_OF_THE_SWEEP[key])
        if key in [axis.key for axis in axes]:
            raise ConfigError(f"{key} is given twice", hint="name all its values at once")
        axes.append(Axis(key, _range(argument, found) if found else _different(argument, values)))
    if again := {axis.key for axis in axes} & {argument.partition("=")[0] for argument in fixed}:
        raise ConfigError(f"{min(again)} is given twice", hint="name all its values at once")
    return fixed, axes


def _split(text: str) -> list[str]:
    """At commas that are in no list, mapping or quotation."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _different(argument: str, values: Sequence[str]) -> tuple[str, ...]:
    if "" in values:
        raise ConfigError(f"{argument!r} has an empty value", hint="write null for nothing, '' for no text")
    if len(set(values)) < len(values):
        raise ConfigError(f"{argument!r} has a value twice")
    return tuple(values)


def _range(argument: str, found: re.Match[str]) -> Range:
    low, high = float(found[1]), float(found[2])
    if not 0 < low < high < math.inf:
        raise ConfigError(
            f"{argument!r}: a range is drawn from on a logarithmic scale, so 0 < its low end < its high end"
        )
    return Range(low, high, whole=found[1].isdecimal() and found[2].isdecimal())


def plan_sweep(
    config: str | Path, arguments: Sequence[str], *, seeds: int = 1, draws: int | None = None
) -> Sweep:
    """Every run of a sweep, checked: a bad key or value is found before the first of them starts."""
    fixed, axes = split_arguments(arguments)
    base = load_config(config, fixed)
    if not axes and seeds == 1 and draws is None:
        raise ConfigError(
            "there is nothing to sweep",
            hint="give a key several values, e.g. optim.lr=1e-4,3e-4, or --seeds 3",
        )
    count = draws if draws is not None else math.prod(_size(axis) for axis in axes)
    if count * seeds > _MOST_RUNS:
        raise ConfigError(f"{count * seeds:,} runs are too many", hint=f"at most {_MOST_RUNS:,}")
    settings = _drawn(axes, draws, base.run.seed) if draws is not None else _grid(axes)
    directory = base.directory
    if (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"{directory} is a run", hint="choose another name for the sweep (run.name=...)")
    checked = [
        load_config(config, [*fixed, *(f"{key}={value}" for key, value in setting.items())])
        for setting in settings
    ]
    if len({json.dumps(to_dict(each), default=str) for each in checked}) < len(checked):
        raise ConfigError("two settings of the sweep are the same run", hint="1e-4 and 0.0001 are one value")
    names = _names(settings)
    plans, runs = [], []
    for number in range(seeds):  # all settings with the first seed come first: soon there is a whole picture
        for setting, found, name in zip(settings, checked, names, strict=True):
            seed = base.run.seed + number
            runs.append(SweepRun(f"{name}-seed-{seed}" if name else f"seed-{seed}", setting, seed))
            values = to_dict(found)
            values["run"] |= {"seed": seed, "dir": str(directory), "name": runs[-1].name}
            plans.append(make_config(values, origin=str(config)))
    return Sweep(directory, plans, runs)


def _size(axis: Axis) -> int:
    return 1 if isinstance(axis.values, Range) else len(axis.values)


def _grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    choices = []
    for axis in axes:
        if isinstance(axis.values, Range):
            raise ConfigError(
                f"{axis.key} has a range, and a grid needs values",
                hint="name them with commas, or draw from the range with --random N",
            )
        choices.append(axis.values)
    return [dict(zip([axis.key for axis in axes], each, strict=True)) for each in itertools.product(*choices)]


def _drawn(axes: Sequence[Axis], draws: int, seed: int) -> list[dict[str, str]]:
    """As many different settings; more draws begin with the same ones."""
    if not axes:
        raise ConfigError("--random has nothing to draw", hint="e.g. optim.lr=1e-5..1e-3 or method.rank=4,8")
    rng = random.Random(seed)
    found: dict[tuple[str, ...], None] = {}
    for _ in range(100 * draws):
        found.setdefault(tuple(axis.draw(rng) for axis in axes))
        if len(found) == draws:
            return [dict(zip([axis.key for axis in axes], values, strict=True)) for values in found]
    raise ConfigError(
        f"--random {draws}: there are not so many different settings", hint="leave --random out: try them all"
    )


def _names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """A directory's name for each setting, of what is swept; it depends on no other setting."""
    keys = list(settings[0])
    last = [key.rpartition(".")[2] for key in keys]
    shown = last if len(set(last)) == len(last) else keys
    return [_name(shown, setting) for setting in settings]


def _name(keys: Sequence[str], setting: Mapping[str, str]) -> str:
    """Keys and values; where these could be another setting's, too, with a hash of this one."""
    values = list(setting.values())
    name = "-".join(f"{key}-{_slug(value)}" for key, value in zip(keys, values, strict=True))
    as_written = all(_slug(value) == value for value in values)
    # a value that has a key in it could be read as two values
    separate = not any(f"-{key}" in value for key in keys for value in values)
    if as_written and separate and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:8]
    return f"{name[:_LONGEST_NAME]}-{digest}"


def _slug(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", value).strip("._") or "_"


def run_sweep(sweep: Sweep, callbacks: Callable[[], list[Callback]] = list) -> Iterator[SweepRun]:
    """Run what has not finished, and tell how each came out; it ends at the first that was stopped.

    A run that fails is told and the next one starts; the next call tries it again.
    """
    for plan in sweep.plans:  # before hours of work: what is there must be of this sweep
        if (plan.directory / CONFIG_FILE).is_file():
            refuse_other_plan(plan)
    states = list(sweep.runs)
    for place, (plan, run) in enumerate(zip(sweep.plans, sweep.runs, strict=True)):
        log.info("sweep: run %d of %d: %s", place + 1, len(states), run.name)
        try:
            done = _outcome(plan, run, callbacks)
        except KeyboardInterrupt:
            _record(sweep, states, place, replace(run, status="stopped"))
            raise
        _record(sweep, states, place, done)
        yield done
        if done.status == "stopped":
            return


def _outcome(plan: RunConfig, run: SweepRun, callbacks: Callable[[], list[Callback]]) -> SweepRun:
    if is_finished(plan.directory):
        log.info("%s has finished before", run.name)
        return replace(run, status="finished")
    try:
        return replace(run, status="finished" if finish(plan, callbacks()) else "stopped")
    except Exception as error:  # whatever one run dies of, the others may live
        message = error.message if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
        log.error("%s failed: %s", run.name, message)
        return replace(run, status="failed", error=message)
    finally:
        gc.collect()  # the model of this run goes before that of the next comes
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _record(sweep: Sweep, states: list[SweepRun], place: int, state: SweepRun) -> None:
    """How every run stands, beside them."""
    states[place] = state
    with contextlib.suppress(StorageError):  # a note for people: the runs do not depend on it
        sweep.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"runs": [asdict(each) for each in states]}, indent=2)
        replace_text(sweep.directory / "sweep.json", text + "\n")


def finish(plan: RunConfig, callbacks: Iterable[Callback]) -> bool:
    """Run it, or go on with it; whether it came to its end."""
    directory = plan.directory
    clear_leftovers(directory.parent, of=directory.name)
    begun = (directory / CONFIG_FILE).is_file()
    if begun:
        refuse_other_plan(plan)
    result = resume(directory, callbacks) if begun else train(plan, callbacks)
    return not result.unfinished


def refuse_other_plan(plan: RunConfig) -> None:
    """What is there must be the run that is meant, as long as the others and judged as they are."""
    directory = plan.directory
    there = to_dict(load_config(directory / CONFIG_FILE))
    refuse_changes(there, plan, directory)
    if other := [key for key in differences(there, to_dict(plan)) if key.startswith(_SHARED)]:
        raise CheckpointError(
            f"{directory} has another {' and '.join(other)} than the runs it belongs to",
            hint="choose another name for all of them (run.name=...)",
        )
