"""A sweep of learning rates at several widths: under muP the best one is the same at each."""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config.run_config import RunConfig
from whet.errors import ConfigError, RunError
from whet.runs.assemble import assembled
from whet.storage import replace_text
from whet.studies.mup_widths import PARAMETRISATIONS, Parametrisation, at_width, with_seed
from whet.training.trainer import Trainer

log = logging.getLogger("whet")

RESULTS_FILE = "lr-sweep.json"


@dataclass(frozen=True)
class SweepPoint:
    """One run: its mean training loss over the last tenth of the steps; infinite when it broke off."""

    parametrisation: Parametrisation
    width: int
    lr: float
    seed: int
    loss: float

    @property
    def key(self) -> tuple[str, int, float, int]:
        """What was run, apart from what came of it."""
        return self.parametrisation, self.width, self.lr, self.seed


@dataclass(frozen=True)
class LrTransfer:
    """All runs of a sweep."""

    points: list[SweepPoint]

    def losses(self, parametrisation: Parametrisation, width: int) -> dict[float, float]:
        """Loss by learning rate, the mean over seeds."""
        found: dict[float, list[float]] = {}
        for point in self.points:
            if (point.parametrisation, point.width) == (parametrisation, width):
                found.setdefault(point.lr, []).append(point.loss)
        return {lr: sum(losses) / len(losses) for lr, losses in sorted(found.items())}

    def widths(self, parametrisation: Parametrisation) -> list[int]:
        """From the narrowest."""
        return sorted({p.width for p in self.points if p.parametrisation == parametrisation})

    def best(self, parametrisation: Parametrisation) -> dict[int, float]:
        """The learning rate with the lowest loss at each width; a width at which all diverged has none."""
        found = {}
        for width in self.widths(parametrisation):
            losses = self.losses(parametrisation, width)
            finite = [lr for lr, loss in losses.items() if math.isfinite(loss)]
            if finite:
                found[width] = min(finite, key=losses.__getitem__)
        return found

    def shift(self, parametrisation: Parametrisation) -> float | None:
        """Powers of two by which the best rate of the widest model is above that of the narrowest.

        Of those that have one; None where they are not two.
        """
        best = self.best(parametrisation)
        return math.log2(best[max(best)] / best[min(best)]) if len(best) > 1 else None


def lr_sweep(
    config: RunConfig,
    *,
    widths: Sequence[int],
    lrs: Sequence[float],
    seeds: int = 1,
    known: Iterable[SweepPoint] = (),
    keep: Callable[[LrTransfer], object] = lambda _: None,
    tell: Callable[[str], None] = log.info,
) -> LrTransfer:
    """Run every rate at every width, by muP and as usual; `known` runs are not run again.

    `keep` gets what there is after each run, known ones too, so that a sweep that is stopped can go on.
    """
    if config.run.steps is None:
        raise ConfigError("a sweep of learning rates is counted in steps", hint="set run.steps")
    if len(set(widths)) < 2 or len(set(lrs)) < 3:
        raise ConfigError("a sweep needs at least two widths and three learning rates")
    done = {point.key: point for point in known}
    points: list[SweepPoint] = []
    # the widest first: they tell soonest how long it will take
    for width in sorted(widths, reverse=True):
        for parametrisation in PARAMETRISATIONS:
            for lr in lrs:
                plan = at_width(config, width, parametrisation, lr=lr)
                for seed in range(config.run.seed, config.run.seed + seeds):
                    key = parametrisation, width, lr, seed
                    if key not in done:
                        done[key] = SweepPoint(*key, _last_loss(with_seed(plan, seed)))
                        tell(f"{parametrisation}, width {width}, lr {lr:.3g}: loss {done[key].loss:.4f}")
                        keep(LrTransfer(list(done.values())))
                    points.append(done[key])
    return LrTransfer(points)


def _last_loss(plan: RunConfig) -> float:
    with assembled(plan) as work:
        trainer = Trainer(work.model, work.objective, work.stream, plan, precision=work.precision)
        try:
            history = trainer.fit().history
        except RunError:
            return math.inf
    losses = [row["loss"] for row in history][-max(1, len(history) // 10) :]
    return sum(losses) / len(losses)


def keep_sweep(
    sweep: LrTransfer,
    directory: Path,
    *,
    settings: dict[str, Any],  # Any: JSON values
    data: dict[str, str],  # digests
) -> None:
    """lr-sweep.json, from which a sweep goes on: its runs, and the settings and data that they share."""
    found = {
        "what": "mean training loss over the last tenth of the steps, by learning rate and width",
        "settings": settings,
        "data": data,
        "best": {each: sweep.best(each) for each in {point.parametrisation for point in sweep.points}},
        "runs": [{**dataclasses.asdict(point), "loss": _to_json(point.loss)} for point in sweep.points],
    }
    replace_text(directory / RESULTS_FILE, json.dumps(found, indent=2) + "\n")


def kept_points(
    directory: Path,
    *,
    settings: dict[str, Any],  # Any: JSON values
    data: dict[str, str],  # digests
) -> list[SweepPoint]:
    """The runs of a sweep with the same settings on the same data that was begun before."""
    path = directory / RESULTS_FILE
    if not path.is_file():
        return []
    found = json.loads(path.read_text())
    if (found["settings"], found.get("data")) != (settings, data):
        log.warning("%s has runs with other settings or data: they are run again", path)
        return []
    return [SweepPoint(**{**run, "loss": float(run["loss"])}) for run in found["runs"]]


def _to_json(loss: float) -> float | str:
    """JSON has no infinity."""
    return loss if math.isfinite(loss) else str(loss)
