"""Parameter groups: weight decay, learning-rate scales and muP factors of each parameter."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from whet.adapters.adapter import adapters_off, named_adapters
from whet.adapters.modules_to_save import ModuleToSave
from whet.config.optim import LORA_B, ROUTERS, Optim, ParameterGroup
from whet.errors import ConfigError
from whet.models.decoder import Decoder
from whet.models.heads import ClassificationHead


@dataclass(frozen=True)
class GroupSettings:
    """Parameters with the same optimizer settings."""

    pattern: str | None  # of optim.groups; None: parameters that match no pattern
    lr_scale: float
    weight_decay: float
    parameters: list[nn.Parameter]
    mup: float = 1.0  # muP's factor of the learning rate

    def for_torch(self, lr: float) -> dict[str, Any]:  # Any: torch's parameter groups
        """Return the parameter group for torch's optimizers, with the `lr_scale` that `masked_step` reads.

        Optimizers shrink weights by learning rate * decay. muP's factor must not change that product, because
        a wide model should forget weights as fast as a narrow one (arXiv 2203.03466, appendix B.3).
        """
        scale, decay = self.lr_scale * self.mup, self.weight_decay / self.mup
        return {"params": self.parameters, "lr": lr * scale, "weight_decay": decay, "lr_scale": scale}

    def describe(self, default_decay: float, *, without: str = "norms, biases, embeddings") -> str:
        """Return a description for the log; `without` names the parameters that have no decay by default."""
        size = _format_count(sum(p.numel() for p in self.parameters))
        count = f"{len(self.parameters)} tensor{'s' if len(self.parameters) > 1 else ''} ({size})"
        decay = f"decay {self.weight_decay:g}" if self.weight_decay else "no decay"
        if self.mup != 1:
            decay += f", muP lr x {self.mup:g}"
        if self.pattern is not None:
            return f"pattern {self.pattern!r}: {count}, lr x {self.lr_scale:g}, {decay}"
        exempt = f" ({without})" if default_decay and not self.weight_decay else ""
        return f"{count}, {decay}{exempt}"


def parameter_groups(section: Optim, model: nn.Module) -> list[GroupSettings]:
    """Return the trainable parameters of a model, grouped by pattern, weight decay and muP factor.

    By default matrices decay, norms and biases do not. Embeddings, and with them a tied head, decay only with
    optim.decay_embeddings.

    Raises:
        ConfigError: If nothing is trainable, or a pattern of optim.groups matches no parameter.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("nothing to train: all parameters are frozen")
    embeddings = set() if section.decay_embeddings else _embeddings(model)
    factors = mup_factors(section, model)
    default: tuple[str | None, ParameterGroup] = None, ParameterGroup()
    rules = dict([default, *section.groups.items()])
    grouped: dict[str | None, dict[tuple[float, float], list[nn.Parameter]]] = {
        pattern: {} for pattern in rules
    }
    for name, p in trainable.items():
        pattern = next((pattern for pattern in section.groups if re.search(pattern, name)), None)
        decay = rules[pattern].weight_decay
        if decay is None:
            decay = section.weight_decay if p.dim() > 1 and id(p) not in embeddings else 0.0
        grouped[pattern].setdefault((decay, factors.get(name, 1.0)), []).append(p)
    for pattern in section.groups:
        if not grouped[pattern]:
            raise ConfigError(
                _empty_group_message(section, pattern),
                hint=f"trainable parameters are named like {', '.join(list(trainable)[:4])}",
            )
    return [
        GroupSettings(pattern, rules[pattern].lr_scale, decay, parameters, mup)
        for pattern, by_settings in grouped.items()
        for (decay, mup), parameters in sorted(by_settings.items(), key=lambda item: [-n for n in item[0]])
    ]


def _empty_group_message(section: Optim, pattern: str) -> str:
    """Return the error for a group without parameters, with the config key that created it."""
    if pattern == ROUTERS and section.router_lr_scale is not None:
        return "optim.router_lr_scale: no routers are trained, apart from those in optim.groups"
    if pattern == LORA_B:
        return "method.lr_ratio: no adapter has a trainable matrix B, apart from those in optim.groups"
    return f"optim.groups: {pattern!r} matches no trainable parameter that earlier patterns do not match"


def mup_factors(section: Optim, model: nn.Module) -> dict[str, float]:
    """Return muP's learning-rate factor of each parameter by name; empty without muP or at the base width."""
    if (ratio := mup_ratio(section, model)) == 1:
        return {}
    from whet.models.from_scratch.mup import POWERS, parameter_role

    by_muon = hidden_matrices(model) if section.name == "muon" else set()
    factors = {}
    for name, p in model.named_parameters():
        powers = POWERS[parameter_role(name, p)]
        power = powers.sgd if section.name == "sgd" else powers.adam
        factors[name] = ratio ** (powers.muon if id(p) in by_muon else power)
    return factors


def mup_ratio(section: Optim, model: nn.Module) -> float:
    """Return the width of the model relative to its muP base width; 1 without muP."""
    if section.mup is None:
        return 1.0
    if not isinstance(model, Decoder):
        raise ConfigError("optim.mup supports only whet's own decoders, without additional trained modules")
    from whet.models.from_scratch.mup import width_ratio

    return width_ratio(model.spec, section.mup)


def hidden_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the matrices between the embeddings and the head, which Muon is meant for."""
    outside = _embeddings(model) | _output_matrices(model)
    outside |= {id(m.score.weight) for m in model.modules() if isinstance(m, ClassificationHead)}
    return {id(p) for p in model.parameters() if p.dim() == 2 and id(p) not in outside}


def _output_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the output head's matrix and of a copy that is trained in its place."""
    if not callable(head := getattr(model, "head", None)):
        return set()
    with adapters_off(model):
        weight = head().weight
    copies = (module for _, module in named_adapters(model) if isinstance(module, ModuleToSave))
    return {
        id(weight),
        *(id(copy.trained.weight) for copy in copies if getattr(copy.base, "weight", None) is weight),
    }


def _embeddings(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _format_count(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
