"""Which experts a row goes to, and with what weight: plain softmax, or whet's sheaf-padic router.

No definition of `sheaf-padic` is public, so this one is whet's own. A logit is cut to -clamp .. clamp and
written as a whole number of `digits` digits in base p. Two experts agree in their first k digits when the
first k digits of the distance between their numbers are zero: of the distance, because 0.1444 and 0.2000 (in
base 5) are neighbours that have no digit in common, and telling them apart by their own digits would be
nothing but rounding to a coarser grid, with the edges of that grid as the places where noise swaps experts.
Experts that agree are tied, and the lowest index wins. So experts that are nearly equal are never swapped by
noise; only a pair whose distance is itself within the noise of the tie's width can change places.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

IN_DIM, EXPERTS, TOP_K = 96, 4, 2


@dataclass(frozen=True)
class Padic:
    """How logits are written: their range, base and digits, and how many leading digits make a tie."""

    base: int = 5
    digits: int = 6
    tie_digits: int = 4
    clamp: float = 8.0

    @property
    def largest(self) -> int:
        """The largest number that can be written."""
        return self.base**self.digits - 1

    @property
    def tie(self) -> int:
        """Numbers nearer than this agree in the first `tie_digits` digits."""
        return int(self.base ** (self.digits - self.tie_digits))

    def encode(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as whole numbers from 0 to `largest`; what is not a number is 0."""
        inside = (
            logits.float().nan_to_num(-self.clamp, self.clamp, -self.clamp).clamp(-self.clamp, self.clamp)
        )
        return ((inside + self.clamp) * (self.largest / (2 * self.clamp))).round().long()

    def decode(self, numbers: torch.Tensor) -> torch.Tensor:
        """The logits that whole numbers stand for."""
        return numbers.float() * (2 * self.clamp / self.largest) - self.clamp


class _Decoded(torch.autograd.Function):
    """Encoded and decoded logits, with the gradient of the logits themselves."""

    @staticmethod
    def forward(_: Any, logits: torch.Tensor, padic: Padic) -> torch.Tensor:  # Any: autograd's context
        """What is left of the logits; a NaN stays one, so that the trainer hears of it."""
        decoded = padic.decode(padic.encode(logits)).to(logits.dtype)
        return torch.where(logits.isnan(), logits, decoded)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        """Straight through."""
        return gradients[0], None


@dataclass(frozen=True)
class PadicRouting:
    """Where each row goes."""

    chosen: torch.Tensor  # [B, TOP_K] experts, the first choice first
    weights: torch.Tensor  # [B, TOP_K] the softmax over all experts at the chosen ones, as it is

    def entropy(self) -> torch.Tensor:
        """-sum w ln w of each row, in nats."""
        return -torch.special.xlogy(self.weights, self.weights).sum(-1)

    def leaders(self) -> torch.Tensor:
        """[B, EXPERTS], 1 where a row's largest weight is; the lowest index of equals."""
        largest = self.weights == self.weights.amax(-1, keepdim=True)
        leader = self.chosen.masked_fill(~largest, EXPERTS).amin(-1)
        return torch.nn.functional.one_hot(leader.clamp(max=EXPERTS - 1), EXPERTS).to(self.weights.dtype)


class PadicRouter(nn.Linear):
    """Scores of the experts for a row, and the choice of two of them."""

    def __init__(self, padic: Padic | None = None) -> None:
        super().__init__(IN_DIM, EXPERTS)
        self.padic = padic
        self.record: list[PadicRouting] | None = None  # a list: what is chosen is added to it

    def route(self, rows: torch.Tensor) -> PadicRouting:
        """The two best experts of each row."""
        logits = self(rows)
        if self.padic is None:
            chosen = top_by_value(logits)
        else:
            chosen = top_by_digits(self.padic.encode(logits), tie=self.padic.tie)
            logits = _Decoded.apply(logits, self.padic)
        routing = PadicRouting(chosen, logits.softmax(-1).gather(-1, chosen))
        if self.record is not None:
            self.record.append(routing)
        return routing


def top_by_value(logits: torch.Tensor) -> torch.Tensor:
    """The largest, one by one; of equal ones the lowest index."""
    return logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., :TOP_K]


def top_by_digits(numbers: torch.Tensor, *, tie: int) -> torch.Tensor:
    """The best, one by one: of those nearer than `tie` to the largest that is left, the lowest index."""
    left = numbers.clone()
    chosen = []
    for _ in range(TOP_K):
        tied = left > left.amax(-1, keepdim=True) - tie
        chosen.append(tied.long().argmax(-1, keepdim=True))  # argmax of equals is the first of them
        left.scatter_(-1, chosen[-1], torch.iinfo(left.dtype).min // 2)
    return torch.cat(chosen, -1)
