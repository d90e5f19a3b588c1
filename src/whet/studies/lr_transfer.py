"""A sweep of learning rates at several widths: under muP the best learning rate is the same at each."""

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
from whet.runs.assemble import open_assembly
from whet.storage import replace_text
from whet.studies.mup_widths import PARAMETRISATIONS, Parametrisation, at_width, with_seed
from whet.training.trainer import Trainer

log = logging.getLogger("whet")

RESULTS_FILE = "lr-sweep.json"


@dataclass(frozen=True)
class SweepPoint:
    """One run: its mean training loss over the last tenth of the steps, or infinity if it failed."""

    parametrisation: Parametrisation
    width: int
    lr: float
    seed: int
    loss: float

    @property
    def key(self) -> tuple[str, int, float, int]:
        """The settings of the run, without its result."""
        return self.parametrisation, self.width, self.lr, self.seed


@dataclass(frozen=True)
class LrTransfer:
    """The runs of a sweep of learning rates."""

    points: list[SweepPoint]

    def losses(self, parametrisation: Parametrisation, width: int) -> dict[float, float]:
        """Return the mean loss over seeds by learning rate."""
        by_lr: dict[float, list[float]] = {}
        for point in self.points:
            if (point.parametrisation, point.width) == (parametrisation, width):
                by_lr.setdefault(point.lr, []).append(point.loss)
        return {lr: sum(losses) / len(losses) for lr, losses in sorted(by_lr.items())}

    def widths(self, parametrisation: Parametrisation) -> list[int]:
        """Return the widths in ascending order."""
        return sorted({p.width for p in self.points if p.parametrisation == parametrisation})

    def best(self, parametrisation: Parametrisation) -> dict[int, float]:
        """Return the best learning rate by width, without widths at which all runs diverged."""
        best = {}
        for width in self.widths(parametrisation):
            losses = self.losses(parametrisation, width)
            finite = [lr for lr, loss in losses.items() if math.isfinite(loss)]
            if finite:
                best[width] = min(finite, key=losses.__getitem__)
        return best

    def shift(self, parametrisation: Parametrisation) -> float | None:
        """Return log2 of the ratio of the best learning rates of the widest and the narrowest model.

        Widths without a best learning rate are ignored; None if fewer than two remain.
        """
        best = self.best(parametrisation)
        return math.log2(best[max(best)] / best[min(best)]) if len(best) > 1 else None


def lr_sweep(
    config: RunConfig,
    *,
    widths: Sequence[int],
    lrs: Sequence[float],
    seeds: int = 1,
    known_points: Iterable[SweepPoint] = (),
    save: Callable[[LrTransfer], object] = lambda _: None,
    log_line: Callable[[str], None] = log.info,
) -> LrTransfer:
    """Train with every learning rate at every width, with muP and with standard parametrization.

    Args:
        config: A run with `model.preset`, `optim.mup` and `run.steps`.
        widths: Values of d_model, at least two.
        lrs: Learning rates, at least three.
        seeds: The number of seeds per point.
        known_points: Finished runs of an interrupted sweep; they are not run again.
        save: Receives all finished runs after each run, so that an interrupted sweep can be resumed.
        log_line: Receives one line per run.

    Returns:
        The runs of the sweep.

    Raises:
        ConfigError: If `run.steps` is missing, or there are too few widths or learning rates.
    """
    if config.run.steps is None:
        raise ConfigError("a learning-rate sweep needs a number of steps", hint="set run.steps")
    if len(set(widths)) < 2 or len(set(lrs)) < 3:
        raise ConfigError("a sweep needs at least two widths and three learning rates")
    done = {point.key: point for point in known_points}
    points: list[SweepPoint] = []
    # the widest models first: they show early how long the sweep takes
    for width in sorted(widths, reverse=True):
        for parametrisation in PARAMETRISATIONS:
            for lr in lrs:
                plan = at_width(config, width, parametrisation, lr=lr)
                for seed in range(config.run.seed, config.run.seed + seeds):
                    key = parametrisation, width, lr, seed
                    if key not in done:
                        done[key] = SweepPoint(*key, _last_loss(with_seed(plan, seed)))
                        log_line(f"{parametrisation}, width {width}, lr {lr:.3g}: loss {done[key].loss:.4f}")
                        save(LrTransfer(list(done.values())))
                    points.append(done[key])
    return LrTransfer(points)


def _last_loss(plan: RunConfig) -> float:
    with open_assembly(plan) as work:
        trainer = Trainer(work.model, work.objective, work.stream, plan, precision=work.precision)
        try:
            history = trainer.fit().history
        except RunError:
            return math.inf
    losses = [row["loss"] for row in history][-max(1, len(history) // 10) :]
    return sum(losses) / len(losses)


def save_sweep(
    sweep: LrTransfer,
    directory: Path,
    *,
    settings: dict[str, Any],  # Any: JSON values
    data: dict[str, str],  # digests
) -> None:
    """Write lr-sweep.json, from which a sweep can be resumed: runs, shared settings and data digests."""
    results = {
        "what": "mean training loss over the last tenth of the steps, by learning rate and width",
        "settings": settings,
        "data": data,
        "best": {each: sweep.best(each) for each in {point.parametrisation for point in sweep.points}},
        "runs": [{**dataclasses.asdict(point), "loss": _to_json(point.loss)} for point in sweep.points],
    }
    replace_text(directory / RESULTS_FILE, json.dumps(results, indent=2) + "\n")


def load_points(
    directory: Path,
    *,
    settings: dict[str, Any],  # Any: JSON values
    data: dict[str, str],  # digests
) -> list[SweepPoint]:
    """Return the finished runs of an interrupted sweep with the same settings and data."""
    path = directory / RESULTS_FILE
    if not path.is_file():
        return []
    saved = json.loads(path.read_text())
    if (saved["settings"], saved.get("data")) != (settings, data):
        log.warning("%s has runs with other settings or data: the sweep starts over", path)
        return []
    return [SweepPoint(**{**run, "loss": float(run["loss"])}) for run in saved["runs"]]


def _to_json(loss: float) -> float | str:
    """Replace infinity and NaN, which JSON does not support, by a string."""
    return loss if math.isfinite(loss) else str(loss)
