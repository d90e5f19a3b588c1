"""How far a student's hidden states are from a teacher's, after layers that are paired with one another."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from whet.errors import ConfigError, ModelError
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel

States = Mapping[int, torch.Tensor]  # [B, T, width] by layer


class HiddenMatching:
    """A distance for each pair of layers, averaged over the pairs.

    Where the widths differ, a projection of the student's states is learned with the rest.
    """

    def __init__(
        self,
        student: LanguageModel,
        teacher: LanguageModel,
        layers: Mapping[int, int],
        *,
        kind: Literal["mse", "cosine"] = "mse",
        weight: float = 1.0,
    ) -> None:
        self.layers = dict(layers)
        self.kind = kind
        self.weight = weight
        self.student_layers, self.teacher_layers = tuple(layers), tuple(layers.values())
        for model, wanted in ((student, self.student_layers), (teacher, self.teacher_layers)):
            _check(model, wanted)
        width, wider = (model.head().weight.shape[1] for model in (student, teacher))
        self.projections: nn.ModuleDict | None = None
        if width != wider:
            self.projections = nn.ModuleDict(
                {f"after-{layer}": nn.Linear(width, wider, bias=False) for layer in layers}
            )

    def distance(self, own: States, theirs: States, chosen: torch.Tensor) -> torch.Tensor:
        """The SUM over the chosen positions, in float32 or wider; the teacher's states are given."""
        total = chosen.new_zeros((), dtype=torch.float32)
        for layer, other in self.layers.items():
            found = own[layer].flatten(0, 1).index_select(0, chosen)
            if self.projections is not None:
                found = self.projections[f"after-{layer}"](found)
            wide = torch.promote_types(found.dtype, torch.float32)
            wanted = theirs[other].detach().flatten(0, 1).index_select(0, chosen).to(wide)
            total = total + self._distances(found.to(wide), wanted).sum()
        return total / len(self.layers)

    def _distances(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if self.kind == "cosine":
            return 1 - F.cosine_similarity(found, wanted, dim=-1)
        return (found - wanted).square().mean(-1)


def _check(model: LanguageModel, layers: Iterable[int]) -> None:
    if not isinstance(model, Decoder):
        raise ModelError(
            f"{model.name} runs through transformers: its hidden states cannot be matched",
            hint="leave objective.hidden out",
        )
    count = len(list(model.blocks()))
    if wrong := [layer for layer in layers if not 1 <= layer <= count]:
        raise ConfigError(f"objective.hidden: {model.name} has no layer {wrong[0]}: it has 1 to {count}")


@contextlib.contextmanager
def layer_outputs(model: LanguageModel, layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """What some layers, counted from 1, return during a forward pass; the next one is not watched."""
    seen: dict[int, torch.Tensor] = {}
    wanted = set(layers)

    def keep(number: int) -> Any:  # Any: torch's type of a hook
        return lambda _module, _inputs, output: seen.__setitem__(number, output)

    blocks = enumerate(model.blocks(), start=1) if wanted else ()
    hooks = [block.register_forward_hook(keep(number)) for number, block in blocks if number in wanted]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    if wanted - seen.keys():
        raise ConfigError("hidden states cannot be seen in a compiled model", hint="set run.compile to false")
