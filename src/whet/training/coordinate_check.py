"""The coordinate check of muP: after some steps, the numbers inside a model are as large at every width."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from whet.analysis.coordinates import coordinates, scale_of
from whet.config.sections import RunConfig
from whet.errors import ConfigError, RunError
from whet.models.decoder import Decoder
from whet.training.run import assembled
from whet.training.trainer import Trainer
from whet.training.widths import PARAMETRISATIONS, Parametrisation, at_width, slope, with_seed

log = logging.getLogger("whet")

FLAT = 0.1  # the steepest slope that still counts as none


@dataclass(frozen=True)
class Sizes:
    """The root mean square of one activation at each width: before the first step, after the last."""

    first: list[float]
    last: list[float]

    def slope(self, widths: Sequence[int]) -> float:
        """Of log size after the last step over log width; infinite where a run overflowed."""
        if not all(map(math.isfinite, self.last)):
            return math.inf
        return slope([math.log(width) for width in widths], [math.log(size) for size in self.last])


@dataclass(frozen=True)
class CoordinateCheck:
    """What was found, by parametrisation and activation."""

    widths: list[int]
    steps: int
    seeds: int
    sizes: dict[Parametrisation, dict[str, Sizes]]

    def slopes(self, parametrisation: Parametrisation) -> dict[str, float]:
        """The slope of each activation."""
        found = self.sizes[parametrisation]
        return {name: sizes.slope(self.widths) for name, sizes in found.items()}

    def is_flat(self, parametrisation: Parametrisation) -> bool:
        """Whether no activation grows or shrinks with the width."""
        return all(abs(each) < FLAT for each in self.slopes(parametrisation).values())


def coordinate_check(
    config: RunConfig,
    *,
    widths: Sequence[int],
    steps: int,
    seeds: int = 1,
    tell: Callable[[str], None] = log.info,
) -> CoordinateCheck:
    """Train a model at each width, by muP and as usual, and look at the first batch before and after."""
    if len(set(widths)) < 2:
        raise ConfigError("a coordinate check compares at least two widths")
    sizes: dict[Parametrisation, dict[str, Sizes]] = {}
    for parametrisation in PARAMETRISATIONS:
        found = sizes.setdefault(parametrisation, {})
        for width in widths:
            plan = at_width(config, width, parametrisation)
            runs = [_sizes_in(with_seed(plan, config.run.seed + n), steps) for n in range(seeds)]
            tell(f"{parametrisation}, width {width}: {steps} steps, {seeds} times")
            for name in runs[0]:
                each = found.setdefault(name, Sizes([], []))
                each.first.append(_geometric_mean(run[name][0] for run in runs))
                each.last.append(_geometric_mean(run[name][1] for run in runs))
    return CoordinateCheck(list(widths), steps, seeds, sizes)


def _sizes_in(plan: RunConfig, steps: int) -> dict[str, tuple[float, float]]:
    """Sizes before and after a run; infinite after one that broke off."""
    with assembled(plan) as work:
        assert isinstance(work.model, Decoder)
        batches = list(islice(iter(work.stream), steps))
        tokens = batches[0][0].tokens.to(work.device)
        first = _scales(work.model, tokens)
        trainer = Trainer(
            work.model, work.objective, batches, plan, total_steps=steps, precision=work.precision
        )
        try:
            trainer.fit()
        except RunError:
            last = dict.fromkeys(first, math.inf)
        else:
            last = _scales(work.model, tokens)
    return {name: (first[name], last[name]) for name in first}


def _scales(model: Decoder, tokens: torch.Tensor) -> dict[str, float]:
    return {name: scale_of(values) for name, values in coordinates(model, tokens).items()}


def _geometric_mean(values: Iterator[float]) -> float:
    """The mean in the logarithms that the slope is fitted to."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
