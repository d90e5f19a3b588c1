"""Picking the next token."""

import random
from dataclasses import dataclass

import torch

from whet.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; otherwise a draw from what top_k, top_p and min_p leave."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature {self.temperature} is negative")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} is not in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is negative")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p {self.min_p} is not in [0, 1]")


def row_generators(count: int, *, seed: int | None) -> list[torch.Generator]:
    """One random stream a row, so that a row's tokens do not depend on its neighbours.

    None of torch's global randomness is used: generating during a run must not change the run.
    """
    root = random.SystemRandom().getrandbits(63) if seed is None else seed
    seeds = [random.Random(f"{root}/{row}").getrandbits(63) for row in range(count)]
    return [torch.Generator().manual_seed(row_seed) for row_seed in seeds]


def sample(logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]) -> torch.Tensor:
    """The next token of each row of logits [B, V]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = _filtered(logits.float() / sampling.temperature, sampling).softmax(-1)
    # a race of exponentials is a draw from the distribution, with one stream a row
    noise = torch.stack(
        [torch.empty(logits.shape[-1]).exponential_(generator=generator) for generator in generators]
    ).to(logits.device)
    return (probabilities / noise).argmax(-1)


def _filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits with everything outside top_k, top_p and min_p at minus infinity, in this order."""
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        removed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(removed, -torch.inf)
    if sampling.min_p:
        probabilities = logits.softmax(-1)
        floor = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, -torch.inf)
    return logits
