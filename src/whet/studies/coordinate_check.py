"""The coordinate check of muP: after some steps, activations are as large at every width."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from whet.config.run_config import RunConfig
from whet.errors import ConfigError, RunError
from whet.models.attention import SelfAttention
from whet.models.decoder import Decoder
from whet.models.rope import Rotation, rotate
from whet.runs.assemble import assembled
from whet.studies.mup_widths import PARAMETRISATIONS, Parametrisation, at_width, slope, with_seed
from whet.training.trainer import Trainer

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


@torch.no_grad()
def coordinates(model: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of tokens [B, T]: embedding, scores of attention and output of each layer, logits."""
    found = {"embedding": model.embed(tokens)}
    hooks = []
    for number, block in enumerate(model.layers, start=1):

        def keep_scores(module: nn.Module, arguments: tuple[object, ...], number: int = number) -> None:
            assert isinstance(module, SelfAttention)
            found[f"attention {number}"] = _scores(module, *arguments[:2])  # type: ignore[arg-type]  # as forward has them

        def keep_output(_: nn.Module, __: object, output: torch.Tensor, number: int = number) -> None:
            found[f"block {number}"] = output

        attention = getattr(block, "self_attn", None)
        if attention is not None:
            hooks.append(attention.register_forward_pre_hook(keep_scores))
        hooks.append(block.register_forward_hook(keep_output))
    was_training = model.training
    try:
        found["logits"] = model.eval()(tokens)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def _scores(attention: SelfAttention, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """What goes into the softmax, of the pairs of positions that see each other."""
    queries, keys, _ = attention.project(x)
    if rotation is not None:
        queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
    spec = attention.spec
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    scores = queries @ keys.repeat_interleave(spec.heads // spec.kv_heads, dim=1).mT * scale
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return scores[..., visible]


def scale_of(x: torch.Tensor) -> float:
    """The root mean square of a tensor's numbers."""
    return float(x.double().square().mean().sqrt())
