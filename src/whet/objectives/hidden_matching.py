"""Distance between the hidden states of a student and a teacher, for pairs of layers."""

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
    """The distance between hidden states, averaged over pairs of layers.

    If the widths differ, a projection of the student's states is trained, too.

    Args:
        student: The student.
        teacher: The teacher.
        layers: The layer of the teacher for each layer of the student, counted from 1.
        kind: Mean squared error, or 1 - cosine similarity.
        weight: The weight of the distance in the loss.
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
        for model, indices in ((student, self.student_layers), (teacher, self.teacher_layers)):
            _check_layers(model, indices)
        student_width, teacher_width = (model.head().weight.shape[1] for model in (student, teacher))
        self.projections: nn.ModuleDict | None = None
        if student_width != teacher_width:
            self.projections = nn.ModuleDict(
                {f"after-{layer}": nn.Linear(student_width, teacher_width, bias=False) for layer in layers}
            )

    def distance(
        self, student_states: States, teacher_states: States, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the SUM of distances over positions in float32 or wider; the teacher gets no gradient."""
        total = positions.new_zeros((), dtype=torch.float32)
        for student_layer, teacher_layer in self.layers.items():
            student = student_states[student_layer].flatten(0, 1).index_select(0, positions)
            if self.projections is not None:
                student = self.projections[f"after-{student_layer}"](student)
            wide = torch.promote_types(student.dtype, torch.float32)
            teacher = teacher_states[teacher_layer].detach().flatten(0, 1).index_select(0, positions).to(wide)
            total = total + self._distances(student.to(wide), teacher).sum()
        return total / len(self.layers)

    def _distances(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        if self.kind == "cosine":
            return 1 - F.cosine_similarity(student, teacher, dim=-1)
        return (student - teacher).square().mean(-1)


def _check_layers(model: LanguageModel, layers: Iterable[int]) -> None:
    if not isinstance(model, Decoder):
        raise ModelError(
            f"{model.name} runs through transformers, where hidden states cannot be matched",
            hint="remove objective.hidden",
        )
    count = len(list(model.blocks()))
    if missing := [layer for layer in layers if not 1 <= layer <= count]:
        raise ConfigError(f"objective.hidden: {model.name} has no layer {missing[0]}, only 1 to {count}")


@contextlib.contextmanager
def layer_outputs(model: LanguageModel, layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Capture the outputs of layers, counted from 1, during a forward pass in a `with` block."""
    outputs: dict[int, torch.Tensor] = {}
    indices = set(layers)

    def capture(index: int) -> Any:  # Any: torch's type of a hook
        return lambda _module, _inputs, output: outputs.__setitem__(index, output)

    blocks = enumerate(model.blocks(), start=1) if indices else ()
    hooks = [block.register_forward_hook(capture(index)) for index, block in blocks if index in indices]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
    if indices - outputs.keys():
        raise ConfigError(
            "objective.hidden cannot capture the hidden states of a compiled model",
            hint="set run.compile=false",
        )
