"""Numbers of parameters, gathered by layer, in the order of the layers."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from whet.models.language_model import LanguageModel

T = TypeVar("T")


class Layers:
    """Which layer each parameter belongs to. A model without blocks counts the modules it is made of."""

    def __init__(self, model: nn.Module) -> None:
        blocks = list(model.blocks()) if isinstance(model, LanguageModel) else _parts(model)
        self._count = len(blocks)
        self._layer_of = {id(p): layer for layer, block in enumerate(blocks) for p in block.parameters()}

    def __len__(self) -> int:
        return self._count

    def root_sums(
        self, parameters: Sequence[torch.Tensor], norms: Sequence[float | None]
    ) -> tuple[list[float | None], float]:
        """The norm of each layer from those of its parameters (None: it has none), and that of the rest."""
        gathered = self.gathered(parameters, [[] if norm is None else [norm] for norm in norms])
        rest = [n for p, n in zip(parameters, norms, strict=True) if id(p) not in self._layer_of and n]
        return [_root_sum(found) if found else None for found in gathered], _root_sum(rest)

    def gathered(self, parameters: Sequence[torch.Tensor], items: Sequence[Sequence[T]]) -> list[list[T]]:
        """What the parameters of each layer bring; what is outside the layers is left out."""
        found: list[list[T]] = [[] for _ in range(self._count)]
        for parameter, each in zip(parameters, items, strict=True):
            if (layer := self._layer_of.get(id(parameter))) is not None:
                found[layer] += each
        return found


def _parts(model: nn.Module) -> list[nn.Module]:
    """Children, and the members of those that are lists."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else [child]
    return [part for part in found if any(True for _ in part.parameters())]


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """Their standard deviation, as of a whole population."""
    middle = mean(values)
    return float(mean([(value - middle) ** 2 for value in values]) ** 0.5)


def _root_sum(norms: Sequence[float]) -> float:
    return float(sum(norm**2 for norm in norms) ** 0.5)
