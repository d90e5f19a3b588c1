"""What the trainer asks of any model, whatever goes in and comes out."""

import abc
from typing import Any

import torch
from torch import nn


class Trainable(nn.Module, abc.ABC):
    """Parameters that know where they are and what they belong to."""

    name: str | None = None  # what it was asked for by

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:  # Any: JSON values
        """The architecture as plain JSON."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device
