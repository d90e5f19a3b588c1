"""The coordinate check of muP: after some steps, activation sizes must not depend on the width."""

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
from whet.models.rope import Rotation, apply_rope
from whet.runs.assemble import open_assembly
from whet.studies.mup_widths import PARAMETRISATIONS, Parametrisation, at_width, slope, with_seed
from whet.training.trainer import Trainer

log = logging.getLogger("whet")

FLAT = 0.1  # slopes below this count as flat


@dataclass(frozen=True)
class Sizes:
    """The RMS of one activation at each width, before the first step and after the last."""

    first: list[float]
    last: list[float]

    def slope(self, widths: Sequence[int]) -> float:
        """Return the slope of log(size) after the last step over log(width); infinite if a run overflowed."""
        if not all(map(math.isfinite, self.last)):
            return math.inf
        return slope([math.log(width) for width in widths], [math.log(size) for size in self.last])


@dataclass(frozen=True)
class CoordinateCheck:
    """The results of a coordinate check, by parametrization and activation."""

    widths: list[int]
    steps: int
    seeds: int
    sizes: dict[Parametrisation, dict[str, Sizes]]

    def slopes(self, parametrisation: Parametrisation) -> dict[str, float]:
        """Return the slope of every activation."""
        return {name: sizes.slope(self.widths) for name, sizes in self.sizes[parametrisation].items()}

    def is_flat(self, parametrisation: Parametrisation) -> bool:
        """Return whether no activation grows or shrinks with the width."""
        return all(abs(each) < FLAT for each in self.slopes(parametrisation).values())


def coordinate_check(
    config: RunConfig,
    *,
    widths: Sequence[int],
    steps: int,
    seeds: int = 1,
    log_line: Callable[[str], None] = log.info,
) -> CoordinateCheck:
    """Measure the activations of the first batch before and after training, at every width.

    Args:
        config: A run with `model.preset` and `optim.mup`.
        widths: Values of d_model, at least two.
        steps: The number of training steps.
        seeds: The number of seeds; sizes are geometric means over them.
        log_line: Receives one line per width and parametrization.

    Returns:
        The activation sizes with muP and with standard parametrization.

    Raises:
        ConfigError: If there are fewer than two widths, or the config does not use muP.
    """
    if len(set(widths)) < 2:
        raise ConfigError("a coordinate check needs at least two widths")
    sizes: dict[Parametrisation, dict[str, Sizes]] = {}
    for parametrisation in PARAMETRISATIONS:
        by_name = sizes.setdefault(parametrisation, {})
        for width in widths:
            plan = at_width(config, width, parametrisation)
            runs = [_measure_run(with_seed(plan, config.run.seed + n), steps) for n in range(seeds)]
            log_line(f"{parametrisation}, width {width}: {steps} steps, {seeds} seed{'s' * (seeds > 1)}")
            for name in runs[0]:
                each = by_name.setdefault(name, Sizes([], []))
                each.first.append(_geometric_mean(run[name][0] for run in runs))
                each.last.append(_geometric_mean(run[name][1] for run in runs))
    return CoordinateCheck(list(widths), steps, seeds, sizes)


def _measure_run(plan: RunConfig, steps: int) -> dict[str, tuple[float, float]]:
    """Return the activation sizes before and after a run; infinite after a run that failed."""
    with open_assembly(plan) as work:
        assert isinstance(work.model, Decoder)
        batches = list(islice(iter(work.stream), steps))
        tokens = batches[0][0].tokens.to(work.device)
        first = _activation_sizes(work.model, tokens)
        trainer = Trainer(
            work.model, work.objective, batches, plan, total_steps=steps, precision=work.precision
        )
        try:
            trainer.fit()
        except RunError:
            last = dict.fromkeys(first, math.inf)
        else:
            last = _activation_sizes(work.model, tokens)
    return {name: (first[name], last[name]) for name in first}


def _activation_sizes(model: Decoder, tokens: torch.Tensor) -> dict[str, float]:
    return {name: root_mean_square(values) for name, values in coordinates(model, tokens).items()}


def _geometric_mean(values: Iterator[float]) -> float:
    """Return the geometric mean, because slopes are fitted to logarithms."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


@torch.no_grad()
def coordinates(model: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return embedding, attention scores and output of each layer, and logits, for tokens [B, T]."""
    activations = {"embedding": model.embed(tokens)}
    hooks = []
    for number, block in enumerate(model.layers, start=1):

        def record_scores(module: nn.Module, arguments: tuple[object, ...], number: int = number) -> None:
            assert isinstance(module, SelfAttention)
            activations[f"attention {number}"] = _scores(module, *arguments[:2])  # type: ignore[arg-type]  # the arguments of forward

        def record_output(_: nn.Module, __: object, output: torch.Tensor, number: int = number) -> None:
            activations[f"block {number}"] = output

        attention = getattr(block, "self_attn", None)
        if attention is not None:
            hooks.append(attention.register_forward_pre_hook(record_scores))
        hooks.append(block.register_forward_hook(record_output))
    was_training = model.training
    try:
        activations["logits"] = model.eval()(tokens)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return activations


def _scores(attention: SelfAttention, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Return the attention scores before the softmax, at the unmasked positions."""
    queries, keys, _ = attention.project(x)
    if rotation is not None:
        queries, keys = apply_rope(queries, *rotation), apply_rope(keys, *rotation)
    spec = attention.spec
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    scores = queries @ keys.repeat_interleave(spec.heads // spec.kv_heads, dim=1).mT * scale
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return scores[..., visible]


def root_mean_square(x: torch.Tensor) -> float:
    """Return the root mean square of a tensor."""
    return float(x.double().square().mean().sqrt())
