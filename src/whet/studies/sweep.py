"""Sweeps: many runs of one config over a grid or a random sample of settings, with several seeds."""

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

from whet.config.load_config import load_config, to_dict, validate_config
from whet.config.run_config import RunConfig
from whet.errors import CheckpointError, ConfigError, StorageError, WhetError
from whet.run_directory import CONFIG_FILE, is_finished
from whet.runs.resume_checks import check_config_unchanged, config_differences
from whet.runs.run import resume, train
from whet.storage import remove_temporary_files, replace_text
from whet.training.callbacks import Callback

log = logging.getLogger("whet")

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")

_RESERVED_KEYS = {
    "run.seed": "--seeds N trains each setting with run.seed, run.seed + 1, ...",
    "run.name": "a sweep names its runs",
    "run.dir": "a sweep has one directory",
}

_MAX_NAME_LENGTH = 120  # file systems allow 255 bytes
_MAX_RUNS = 10_000
# keys that a resumed run may change, but that compared runs must share
_SHARED_KEYS = ("run.steps", "run.epochs", "run.budget", "eval.batches", "eval.max_new_tokens")


@dataclass(frozen=True)
class Range:
    """A range that is sampled log-uniformly; samples are integers if both bounds are."""

    low: float
    high: float
    is_integer: bool

    def draw(self, rng: random.Random) -> str:
        """Sample a value, formatted as in an override."""
        value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        value = min(max(value, self.low), self.high)
        return str(round(value)) if self.is_integer else f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """A swept key with its values or its range."""

    key: str
    values: tuple[str, ...] | Range

    def draw(self, rng: random.Random) -> str:
        """Sample a value."""
        return self.values.draw(rng) if isinstance(self.values, Range) else rng.choice(self.values)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep with its status."""

    name: str
    setting: dict[str, str]
    seed: int
    status: str = "waiting"  # finished, stopped, failed
    error: str | None = None


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, with their configs."""

    directory: Path
    plans: list[RunConfig]
    runs: list[SweepRun]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[Axis]]:
    """Split arguments into overrides for every run and swept keys (several values or a range)."""
    fixed: list[str] = []
    axes: list[Axis] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = _split_values(text)
        match = _RANGE.fullmatch(text.strip())
        if not equals or (len(values) < 2 and match is None):
            fixed.append(argument)
            continue
        if key in _RESERVED_KEYS:
            raise ConfigError(f"{key} cannot be swept", hint=_RESERVED_KEYS[key])
        if key in [axis.key for axis in axes]:
            raise ConfigError(f"{key} is given twice", hint="list all values in one argument")
        axes.append(Axis(key, _parse_range(argument, match) if match else _check_values(argument, values)))
    if repeated := {axis.key for axis in axes} & {argument.partition("=")[0] for argument in fixed}:
        raise ConfigError(f"{min(repeated)} is given twice", hint="list all values in one argument")
    return fixed, axes


def _split_values(text: str) -> list[str]:
    """Split at commas outside of lists, mappings and quotes."""
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


def _check_values(argument: str, values: Sequence[str]) -> tuple[str, ...]:
    if "" in values:
        raise ConfigError(
            f"{argument!r} has an empty value", hint="write null for no value, '' for an empty string"
        )
    if len(set(values)) < len(values):
        raise ConfigError(f"{argument!r} has a value twice")
    return tuple(values)


def _parse_range(argument: str, match: re.Match[str]) -> Range:
    low, high = float(match[1]), float(match[2])
    if not 0 < low < high < math.inf:
        raise ConfigError(
            f"{argument!r}: ranges are sampled on a logarithmic scale, so they need 0 < low < high"
        )
    return Range(low, high, is_integer=match[1].isdecimal() and match[2].isdecimal())


def plan_sweep(
    config: str | Path, arguments: Sequence[str], *, seeds: int = 1, draws: int | None = None
) -> Sweep:
    """Plan the runs of a sweep and validate all of their configs.

    Args:
        config: The YAML config.
        arguments: Overrides for every run, and swept keys as `key=a,b,c` or `key=low..high`.
        seeds: The number of seeds per setting.
        draws: The number of settings to sample; None: all combinations.

    Returns:
        The sweep; its runs go into the directory of the config's run.

    Raises:
        ConfigError: If a key or value is invalid, or there is nothing to sweep.
    """
    fixed, axes = split_arguments(arguments)
    base = load_config(config, fixed)
    if not axes and seeds == 1 and draws is None:
        raise ConfigError(
            "nothing to sweep",
            hint="give a key several values, e.g. optim.lr=1e-4,3e-4, or --seeds 3",
        )
    count = draws if draws is not None else math.prod(_value_count(axis) for axis in axes)
    if count * seeds > _MAX_RUNS:
        raise ConfigError(
            f"the sweep has {count * seeds:,} runs, more than the limit of {_MAX_RUNS:,}",
            hint="try fewer values or seeds",
        )
    settings = _sample_settings(axes, draws, base.run.seed) if draws is not None else _grid(axes)
    directory = base.directory
    if (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{directory} is a run, not a sweep", hint="choose another name for the sweep (run.name=...)"
        )
    checked = [
        load_config(config, [*fixed, *(f"{key}={value}" for key, value in setting.items())])
        for setting in settings
    ]
    if len({json.dumps(to_dict(each), default=str) for each in checked}) < len(checked):
        raise ConfigError(
            "two settings of the sweep are identical", hint="1e-4 and 0.0001 are the same value"
        )
    names = _names(settings)
    plans, runs = [], []
    for offset in range(seeds):  # all settings with the first seed come first, for early results
        for setting, run_config, name in zip(settings, checked, names, strict=True):
            seed = base.run.seed + offset
            runs.append(SweepRun(f"{name}-seed-{seed}" if name else f"seed-{seed}", setting, seed))
            values = to_dict(run_config)
            values["run"] |= {"seed": seed, "dir": str(directory), "name": runs[-1].name}
            plans.append(validate_config(values, origin=str(config)))
    return Sweep(directory, plans, runs)


def _value_count(axis: Axis) -> int:
    return 1 if isinstance(axis.values, Range) else len(axis.values)


def _grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    choices = []
    for axis in axes:
        if isinstance(axis.values, Range):
            raise ConfigError(
                f"{axis.key} has a range, but a grid needs values",
                hint="list the values with commas, or sample the range with --random N",
            )
        choices.append(axis.values)
    return [dict(zip([axis.key for axis in axes], each, strict=True)) for each in itertools.product(*choices)]


def _sample_settings(axes: Sequence[Axis], draws: int, seed: int) -> list[dict[str, str]]:
    """Sample distinct settings; a larger number of draws starts with the same settings."""
    if not axes:
        raise ConfigError("--random needs a swept key", hint="e.g. optim.lr=1e-5..1e-3 or method.rank=4,8")
    rng = random.Random(seed)
    settings: dict[tuple[str, ...], None] = {}
    for _ in range(100 * draws):
        settings.setdefault(tuple(axis.draw(rng) for axis in axes))
        if len(settings) == draws:
            return [dict(zip([axis.key for axis in axes], values, strict=True)) for values in settings]
    raise ConfigError(
        f"--random {draws}: there are fewer different settings", hint="omit --random to try all of them"
    )


def _names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a directory name per setting; a name does not depend on the other settings."""
    keys = list(settings[0])
    short = [key.rpartition(".")[2] for key in keys]
    labels = short if len(set(short)) == len(short) else keys
    return [_name(labels, setting) for setting in settings]


def _name(keys: Sequence[str], setting: Mapping[str, str]) -> str:
    """Return keys and values as a name, with a hash of the setting if the name would be ambiguous."""
    values = list(setting.values())
    name = "-".join(f"{key}-{_slug(value)}" for key, value in zip(keys, values, strict=True))
    is_exact = all(_slug(value) == value for value in values)
    # a value that contains a key could be read as two values
    is_unambiguous = not any(f"-{key}" in value for key in keys for value in values)
    if is_exact and is_unambiguous and len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:8]
    return f"{name[:_MAX_NAME_LENGTH]}-{digest}"


def _slug(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", value).strip("._") or "_"


def run_sweep(sweep: Sweep, callbacks: Callable[[], list[Callback]] = list) -> Iterator[SweepRun]:
    """Train the unfinished runs and yield every run with its status, until one is stopped.

    After a failed run, the sweep continues with the next one. The next call retries failed runs.
    """
    for plan in sweep.plans:  # fail before hours of work if an existing run is not part of this sweep
        if (plan.directory / CONFIG_FILE).is_file():
            check_existing_run(plan)
    states = list(sweep.runs)
    for index, (plan, run) in enumerate(zip(sweep.plans, sweep.runs, strict=True)):
        log.info("sweep: run %d of %d: %s", index + 1, len(states), run.name)
        try:
            result = _execute(plan, run, callbacks)
        except KeyboardInterrupt:
            _write_status(sweep, states, index, replace(run, status="stopped"))
            raise
        _write_status(sweep, states, index, result)
        yield result
        if result.status == "stopped":
            return


def _execute(plan: RunConfig, run: SweepRun, callbacks: Callable[[], list[Callback]]) -> SweepRun:
    if is_finished(plan.directory):
        log.info("%s has already finished", run.name)
        return replace(run, status="finished")
    try:
        return replace(run, status="finished" if train_or_resume(plan, callbacks()) else "stopped")
    except Exception as error:  # the failure of one run must not stop the others
        message = error.message if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
        log.error("%s failed: %s", run.name, message)
        return replace(run, status="failed", error=message)
    finally:
        gc.collect()  # free this run's model before building the next one
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _write_status(sweep: Sweep, states: list[SweepRun], index: int, state: SweepRun) -> None:
    """Update the status of a run, and write sweep.json."""
    states[index] = state
    with contextlib.suppress(StorageError):  # informational only: the runs do not depend on it
        sweep.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"runs": [asdict(each) for each in states]}, indent=2)
        replace_text(sweep.directory / "sweep.json", text + "\n")


def train_or_resume(plan: RunConfig, callbacks: Iterable[Callback]) -> bool:
    """Start a run, or resume it if it exists; return whether it finished."""
    directory = plan.directory
    remove_temporary_files(directory.parent, only_name=directory.name)
    exists = (directory / CONFIG_FILE).is_file()
    if exists:
        check_existing_run(plan)
    result = resume(directory, callbacks) if exists else train(plan, callbacks)
    return not result.unfinished


def check_existing_run(plan: RunConfig) -> None:
    """Raise a CheckpointError if an existing run has other settings, length or evaluation than planned."""
    directory = plan.directory
    existing = to_dict(load_config(directory / CONFIG_FILE))
    check_config_unchanged(existing, plan, directory)
    if changed := [
        key for key in config_differences(existing, to_dict(plan)) if key.startswith(_SHARED_KEYS)
    ]:
        raise CheckpointError(
            f"{directory} was started with a different {' and '.join(changed)} than the other runs",
            hint="choose another name for all of them (run.name=...)",
        )
