"""Which parameters decay, and which have settings of their own."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from whet.config.optim import Optim, ParameterGroup
from whet.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """Parameters that are updated in the same way."""

    pattern: str | None  # None: those no pattern is found in
    lr_scale: float
    weight_decay: float
    parameters: list[nn.Parameter]

    def for_torch(self) -> dict[str, Any]:  # Any: torch's parameter groups
        """As torch's optimizers take it; `masked_step` reads lr_scale."""
        return {"params": self.parameters, "weight_decay": self.weight_decay, "lr_scale": self.lr_scale}

    def describe(self, usual_decay: float) -> str:
        """One phrase for the log."""
        size = _short(sum(p.numel() for p in self.parameters))
        count = f"{len(self.parameters)} tensor{'s' if len(self.parameters) > 1 else ''} ({size})"
        decay = f"decay {self.weight_decay:g}" if self.weight_decay else "no decay"
        if self.pattern is not None:
            return f"pattern {self.pattern!r}: {count}, lr x {self.lr_scale:g}, {decay}"
        who = " (norms, biases, embeddings)" if usual_decay and not self.weight_decay else ""
        return f"{count}, {decay}{who}"


def parameter_groups(section: Optim, model: nn.Module) -> list[Group]:
    """The trainable parameters by pattern and decay: matrices decay; norms, biases and embeddings do not."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("nothing to train: every parameter is frozen")
    embeddings = _embeddings(model)
    usual: tuple[str | None, ParameterGroup] = None, ParameterGroup()
    rules = dict([usual, *section.groups.items()])
    found: dict[str | None, dict[float, list[nn.Parameter]]] = {pattern: {} for pattern in rules}
    for name, p in trainable.items():
        pattern = next((pattern for pattern in section.groups if re.search(pattern, name)), None)
        decay = rules[pattern].weight_decay
        if decay is None:
            decay = section.weight_decay if p.dim() > 1 and id(p) not in embeddings else 0.0
        found[pattern].setdefault(decay, []).append(p)
    for pattern in section.groups:
        if not found[pattern]:
            raise ConfigError(
                f"optim.groups: {pattern!r} is in no trainable parameter's name, earlier patterns' aside",
                hint=f"their names are like {', '.join(list(trainable)[:4])}",
            )
    return [
        Group(pattern, rules[pattern].lr_scale, decay, parameters)
        for pattern, by_decay in found.items()
        for decay, parameters in sorted(by_decay.items(), key=lambda item: -item[0])
    ]


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the matrices between the embeddings and the head: those a Muon step makes sense for."""
    outside = _embeddings(model)
    if callable(head := getattr(model, "head", None)):
        outside.add(id(head().weight))
    return {id(p) for p in model.parameters() if p.dim() == 2 and id(p) not in outside}


def _embeddings(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
