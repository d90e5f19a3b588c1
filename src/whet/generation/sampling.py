"""Picking the next token."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from whet.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; otherwise a draw from what top_k, top_p and min_p leave.

    `repetition_penalty` comes first, as in transformers: logits of tokens that the prompt or the answer
    already has are divided by it where they are positive, and multiplied where they are negative.
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
                hint="1 changes nothing; 1.1 to 1.3 makes repetitions rarer",
            )


def row_seeds(count: int, *, seed: int | None) -> list[int]:
    """One seed a row, from one for all of them, or from the system's randomness.

    None of torch's global randomness is used: generating during a run must not change the run.
    """
    root = random.SystemRandom().getrandbits(63) if seed is None else seed
    return [random.Random(f"{root}/{row}").getrandbits(63) for row in range(count)]


class Picker:
    """Picks every row's next token; a row's choice depends on its logits, its tokens and its seed only.

    Nothing here waits for the device or changes a shape, so a CUDA graph can hold it.
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
        self.count = torch.zeros(1, dtype=torch.long, device=device)  # tokens picked so far
        self.keys = self.scrambled = self.seen = None
        if sampling.temperature:
            self.keys = _noise_keys(seeds, max_tokens).to(device)  # [rows, max_tokens]
            self.scrambled = _scramble(torch.arange(vocab_size, dtype=torch.int32, device=device))
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[list(prompt)] = True
            self.seen = seen.to(device)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each row of logits [rows, V], and its log-probability under those very logits."""
        # contiguous: reading a transposed product row by row is slow
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
        scores = logits
        if self.seen is not None:
            scores = penalised(scores, self.seen, self.sampling.repetition_penalty)
        if self.keys is None or self.scrambled is None:
            chosen = scores.argmax(-1)
        else:
            noise = _noise(self.scrambled, self.keys.index_select(1, self.count))
            chosen = draw(scores, self.sampling, noise)
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        self.count += 1
        return chosen, logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row that is not listed."""
        self.keys = None if self.keys is None else self.keys[rows]
        self.seen = None if self.seen is None else self.seen[rows]


def penalised(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits [rows, V] with those of the tokens in `seen` [rows, V] made less likely."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: torch.Tensor, sampling: Sampling, noise: torch.Tensor) -> torch.Tensor:
    """A token of each row of logits [rows, V]; noise: exponential numbers [rows, V].

    A race of exponentials (or Gumbel's trick) is a draw from the distribution. Rounding changes its winner
    only where two are about equal; a search in the cumulated probabilities would be lost in the tail.
    """
    left = filtered(logits / sampling.temperature, sampling)
    return (left - noise.log()).argmax(-1)


def filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits with everything outside top_k, top_p and min_p at minus infinity, in this order."""
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        removed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(removed, -torch.inf)
    if sampling.min_p:
        probabilities = logits.softmax(-1)
        floor = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < floor, -torch.inf)
    return logits


def _noise_keys(seeds: Sequence[int], count: int) -> torch.Tensor:
    """32 random bits [rows, count] for each token; a larger count leaves the first ones as they are."""
    rows = [np.frombuffer(random.Random(str(seed)).randbytes(4 * count), dtype="<i4") for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def _noise(scrambled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Exponential numbers [rows, V] from scrambled token ids [V] and keys [rows, 1].

    Made from a hash, on the device, so that they are the same on every device and need no stream of numbers.
    """
    # without a sign, and small ones with all their digits: by them unlikely tokens are drawn
    bits = _scramble(scrambled ^ keys).float().remainder_(2.0**32)
    return bits.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _scramble(bits: torch.Tensor) -> torch.Tensor:
    """A hash of 32-bit integers in which every bit depends on every other (Wellons' lowbias32), in place."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
