"""The router of the quality models: a plain softmax router, or whet's sheaf-padic router.

No definition of `sheaf-padic` is public, so this one is whet's. A logit is clamped to -clamp .. clamp and
encoded as an integer of `digits` digits in base p. Two experts agree in their first k digits if the first k
digits of the distance between their integers are zero. Experts that agree in the first `tie_digits` digits
are tied, and the lowest index wins.

The distance is compared, and not the digits, because 0.1444 and 0.2000 (in base 5) are neighbors without a
common digit. Comparing digits would only round to a coarser grid, and noise would swap experts at the edges
of the grid. With distances, noise never swaps experts that are nearly equal. It can only swap a pair whose
distance differs from the width of a tie by less than the noise.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

IN_DIM, EXPERTS, TOP_K = 96, 4, 2


@dataclass(frozen=True)
class Padic:
    """The encoding of logits: their range, base and digits, and how many equal leading digits make a tie."""

    base: int = 5
    digits: int = 6
    tie_digits: int = 4
    clamp: float = 8.0

    @property
    def largest(self) -> int:
        """The largest integer of an encoded logit."""
        return self.base**self.digits - 1

    @property
    def tie(self) -> int:
        """The width of a tie: integers closer than this agree in the first `tie_digits` digits."""
        return int(self.base ** (self.digits - self.tie_digits))

    def encode(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits as integers from 0 to `largest`; NaN becomes 0."""
        clamped = (
            logits.float().nan_to_num(-self.clamp, self.clamp, -self.clamp).clamp(-self.clamp, self.clamp)
        )
        return ((clamped + self.clamp) * (self.largest / (2 * self.clamp))).round().long()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the logits of encoded integers."""
        return codes.float() * (2 * self.clamp / self.largest) - self.clamp


class _RoundTrip(torch.autograd.Function):
    """Encodes and decodes logits, with a straight-through gradient."""

    @staticmethod
    def forward(_: Any, logits: torch.Tensor, padic: Padic) -> torch.Tensor:  # Any: autograd's context
        """Return the decoded logits; NaN stays NaN, so that the trainer detects it."""
        decoded = padic.decode(padic.encode(logits)).to(logits.dtype)
        return torch.where(logits.isnan(), logits, decoded)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        """Pass the gradient through unchanged."""
        return gradients[0], None


@dataclass(frozen=True)
class PadicRouting:
    """The experts that each row is routed to, and their weights."""

    chosen: torch.Tensor  # [B, TOP_K] expert indices, best first
    weights: torch.Tensor  # [B, TOP_K] softmax over all experts at the chosen ones, not renormalized

    def entropy(self) -> torch.Tensor:
        """Return -sum w ln w [B] over the chosen experts of each row, in nats."""
        return -torch.special.xlogy(self.weights, self.weights).sum(-1)

    def leaders(self) -> torch.Tensor:
        """Return a one-hot tensor [B, EXPERTS] of the (first) expert with the largest weight."""
        largest = self.weights == self.weights.amax(-1, keepdim=True)
        leader = self.chosen.masked_fill(~largest, EXPERTS).amin(-1)
        return torch.nn.functional.one_hot(leader.clamp(max=EXPERTS - 1), EXPERTS).to(self.weights.dtype)


class PadicRouter(nn.Linear):
    """Computes the logits of the experts for each row, and selects two experts."""

    def __init__(self, padic: Padic | None = None) -> None:
        super().__init__(IN_DIM, EXPERTS)
        self.padic = padic
        self.routing_records: list[PadicRouting] | None = (
            None  # if it is a list, every routing is appended to it
        )

    def route(self, rows: torch.Tensor) -> PadicRouting:
        """Return the two best experts of each row [B, IN_DIM], and their weights."""
        logits = self(rows)
        if self.padic is None:
            chosen = top_by_value(logits)
        else:
            chosen = top_by_digits(self.padic.encode(logits), tie=self.padic.tie)
            logits = _RoundTrip.apply(logits, self.padic)
        routing = PadicRouting(chosen, logits.softmax(-1).gather(-1, chosen))
        if self.routing_records is not None:
            self.routing_records.append(routing)
        return routing


def top_by_value(logits: torch.Tensor) -> torch.Tensor:
    """Return the indices [..., TOP_K] of the largest logits, the lowest index first among equal ones."""
    return logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., :TOP_K]


def top_by_digits(codes: torch.Tensor, *, tie: int) -> torch.Tensor:
    """Return the indices [..., TOP_K] of the best experts, selected one after the other.

    Each is the lowest index among the remaining experts whose code is closer than `tie` to the largest one.
    """
    remaining = codes.clone()
    chosen = []
    for _ in range(TOP_K):
        tied = remaining > remaining.amax(-1, keepdim=True) - tie
        chosen.append(tied.long().argmax(-1, keepdim=True))  # argmax returns the first of equal values
        remaining.scatter_(-1, chosen[-1], torch.iinfo(remaining.dtype).min // 2)
    return torch.cat(chosen, -1)
