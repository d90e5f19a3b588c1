"""Sampling settings, and the sampling of next tokens from logits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from whet.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. Temperature 0 is greedy decoding.

    The settings are applied in this order: repetition_penalty, temperature, top_k, top_p, min_p.

    Args:
        temperature: the divisor of the logits. 0: take the most likely token.
        top_p: sample from the smallest set of tokens with this total probability, in (0, 1].
        top_k: sample from this number of most likely tokens. 0: no limit.
        min_p: exclude tokens below this fraction of the most likely token's probability, in [0, 1].
        repetition_penalty: as in transformers, the logits of tokens in the prompt or in the generated text
            are divided by it if they are positive, and multiplied by it if they are negative.

    Raises:
        ConfigError: a setting is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f"temperature {self.temperature} is negative")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} is not in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is negative")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p {self.min_p} is not in [0, 1]")
        if not self.repetition_penalty > 0:
            raise ConfigError(
                f"repetition_penalty {self.repetition_penalty} is not positive",
                hint="1 has no effect; 1.1 to 1.3 reduces repetition",
            )


def row_seeds(count: int, *, seed: int | None) -> list[int]:
    """Return one seed per row, derived from `seed`, or from the system's random source if it is None.

    torch's global random state is not used, because generation must not change the run that it is part of.
    """
    root = random.SystemRandom().getrandbits(63) if seed is None else seed
    return [random.Random(f"{root}/{row}").getrandbits(63) for row in range(count)]


class TokenSampler:
    """Samples the next token of every row, depending on the row's logits, tokens and seed only.

    A call neither synchronizes with the device nor changes a shape, so that a CUDA graph can capture it.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sampling = sampling
        self.count = torch.zeros(1, dtype=torch.long, device=device)  # tokens sampled so far
        self.keys = self.hashed_ids = self.seen = None
        if sampling.temperature:
            self.keys = _noise_keys(seeds, max_tokens).to(device)  # [rows, max_tokens]
            self.hashed_ids = _hash_(torch.arange(vocab_size, dtype=torch.int32, device=device))
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[list(prompt)] = True
            self.seen = seen.to(device)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next token of each row, and its log-probability under the raw logits [rows, V]."""
        # contiguous, because reading a transposed matmul output row by row is slow
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
        scores = logits
        if self.seen is not None:
            scores = penalize_repetition(scores, self.seen, self.sampling.repetition_penalty)
        if self.keys is None or self.hashed_ids is None:
            tokens = scores.argmax(-1)
        else:
            noise = _exponential_noise(self.hashed_ids, self.keys.index_select(1, self.count))
            tokens = sample_tokens(scores, self.sampling, noise)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        self.count += 1
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with the rows of these indices only."""
        self.keys = None if self.keys is None else self.keys[rows]
        self.seen = None if self.seen is None else self.seen[rows]


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Apply the repetition penalty to the logits [rows, V] of the tokens in the mask `seen` [rows, V]."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample_tokens(logits: torch.Tensor, sampling: Sampling, noise: torch.Tensor) -> torch.Tensor:
    """Sample one token per row of logits [rows, V], with exponential noise [rows, V] (the Gumbel-max trick).

    Rounding changes the result only if two candidates are nearly equal. A search in the cumulative
    probabilities would lose precision in the tail.
    """
    candidates = filter_logits(logits / sampling.temperature, sampling)
    return (candidates - noise.log()).argmax(-1)


def filter_logits(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Set the logits of tokens excluded by top_k, top_p and min_p, in this order, to minus infinity."""
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        preceding = probabilities.cumsum(-1) - probabilities  # total probability of the more likely tokens
        excluded = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, preceding >= sampling.top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    if sampling.min_p:
        probabilities = logits.softmax(-1)
        floor = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, -torch.inf)
    return logits


def _noise_keys(seeds: Sequence[int], count: int) -> torch.Tensor:
    """Return 32 random bits per row and token, [rows, count]; a larger count appends bits."""
    rows = [np.frombuffer(random.Random(str(seed)).randbytes(4 * count), dtype="<i4") for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def _exponential_noise(hashed_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return exponentially distributed values [rows, V] for hashed token ids [V] and keys [rows, 1].

    They are computed by a hash function, so they are equal on every device and need no random state.
    """
    # remainder_ makes the bits unsigned; small values keep full precision, as they select unlikely tokens
    bits = _hash_(hashed_ids ^ keys).float().remainder_(2.0**32)
    return bits.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _hash_(bits: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit integers in place (Wellons' lowbias32)."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
