"""Which parameters decay, and which have settings of their own."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from whet.adapters.adapter import adapted, adapters_off
from whet.adapters.modules_to_save import ModuleToSave
from whet.config.optim import LORA_B, ROUTERS, Optim, ParameterGroup
from whet.errors import ConfigError
from whet.models.decoder import Decoder
from whet.models.heads import ClassificationHead


@dataclass(frozen=True)
class GroupSettings:
    """Parameters that are updated in the same way."""

    pattern: str | None  # None: those no pattern is found in
    lr_scale: float
    weight_decay: float
    parameters: list[nn.Parameter]
    mup: float = 1.0  # what muP multiplies the rate by

    def for_torch(self, lr: float) -> dict[str, Any]:  # Any: torch's parameter groups
        """As torch's optimizers take it, for a rate of `lr`; `masked_step` reads lr_scale.

        They shrink weights by rate * decay, which muP's factor must leave as it is: weights of a wide model
        are to be forgotten as fast as those of a narrow one (arXiv 2203.03466, appendix B.3).
        """
        scale, decay = self.lr_scale * self.mup, self.weight_decay / self.mup
        return {"params": self.parameters, "lr": lr * scale, "weight_decay": decay, "lr_scale": scale}

    def describe(self, usual_decay: float, *, without: str = "norms, biases, embeddings") -> str:
        """One phrase for the log; `without`: what usually has no decay."""
        size = _short(sum(p.numel() for p in self.parameters))
        count = f"{len(self.parameters)} tensor{'s' if len(self.parameters) > 1 else ''} ({size})"
        decay = f"decay {self.weight_decay:g}" if self.weight_decay else "no decay"
        if self.mup != 1:
            decay += f", muP lr x {self.mup:g}"
        if self.pattern is not None:
            return f"pattern {self.pattern!r}: {count}, lr x {self.lr_scale:g}, {decay}"
        who = f" ({without})" if usual_decay and not self.weight_decay else ""
        return f"{count}, {decay}{who}"


def parameter_groups(section: Optim, model: nn.Module) -> list[GroupSettings]:
    """The trainable parameters by pattern and decay: matrices decay; norms and biases do not.

    Embeddings (and with them a tied head) decay only with optim.decay_embeddings.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("nothing to train: every parameter is frozen")
    embeddings = set() if section.decay_embeddings else _embeddings(model)
    factors = mup_factors(section, model)
    usual: tuple[str | None, ParameterGroup] = None, ParameterGroup()
    rules = dict([usual, *section.groups.items()])
    found: dict[str | None, dict[tuple[float, float], list[nn.Parameter]]] = {
        pattern: {} for pattern in rules
    }
    for name, p in trainable.items():
        pattern = next((pattern for pattern in section.groups if re.search(pattern, name)), None)
        decay = rules[pattern].weight_decay
        if decay is None:
            decay = section.weight_decay if p.dim() > 1 and id(p) not in embeddings else 0.0
        found[pattern].setdefault((decay, factors.get(name, 1.0)), []).append(p)
    for pattern in section.groups:
        if not found[pattern]:
            raise ConfigError(
                _without_parameters(section, pattern),
                hint=f"their names are like {', '.join(list(trainable)[:4])}",
            )
    return [
        GroupSettings(pattern, rules[pattern].lr_scale, decay, parameters, mup)
        for pattern, alike in found.items()
        for (decay, mup), parameters in sorted(alike.items(), key=lambda item: [-n for n in item[0]])
    ]


def _without_parameters(section: Optim, pattern: str) -> str:
    """What is wrong with a group that nothing is in, by the key that asked for it."""
    if pattern == ROUTERS and section.router_lr_scale is not None:
        return "optim.router_lr_scale: no router is trained, those of optim.groups aside"
    if pattern == LORA_B:
        return "method.lr_ratio: no B of an adapter is trained, those of optim.groups aside"
    return f"optim.groups: {pattern!r} is in no trainable parameter's name, earlier patterns' aside"


def mup_factors(section: Optim, model: nn.Module) -> dict[str, float]:
    """What muP multiplies the rate of each parameter by, where it is not 1."""
    if (ratio := mup_ratio(section, model)) == 1:
        return {}
    from whet.models.from_scratch.mup import POWERS, role_of

    by_muon = hidden_matrices(model) if section.name == "muon" else set()
    found = {}
    for name, p in model.named_parameters():
        powers = POWERS[role_of(name, p)]
        usual = powers.sgd if section.name == "sgd" else powers.adam
        found[name] = ratio ** (powers.muon if id(p) in by_muon else usual)
    return found


def mup_ratio(section: Optim, model: nn.Module) -> float:
    """How many times as wide as its base the model is; 1 without muP."""
    if section.mup is None:
        return 1.0
    if not isinstance(model, Decoder):
        raise ConfigError("optim.mup knows the weights of whet's own decoders, and there are others to train")
    from whet.models.from_scratch.mup import width_ratio

    return width_ratio(model.spec, section.mup)


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the matrices between the embeddings and the head: those a Muon step makes sense for."""
    outside = _embeddings(model) | _output_matrices(model)
    outside |= {id(m.score.weight) for m in model.modules() if isinstance(m, ClassificationHead)}
    return {id(p) for p in model.parameters() if p.dim() == 2 and id(p) not in outside}


def _output_matrices(model: nn.Module) -> set[int]:
    """Ids of the head's matrix, and of the copy that is trained in its place."""
    if not callable(head := getattr(model, "head", None)):
        return set()
    with adapters_off(model):
        weight = head().weight
    copies = (module for _, module in adapted(model) if isinstance(module, ModuleToSave))
    return {
        id(weight),
        *(id(copy.trained.weight) for copy in copies if getattr(copy.base, "weight", None) is weight),
    }


def _embeddings(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
