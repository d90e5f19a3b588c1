"""Capture the inputs and outputs of modules."""

import contextlib
import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import nn

from whet.errors import ConfigError
from whet.models.language_model import LanguageModel, eager_layers

Keep = Callable[[torch.Tensor], torch.Tensor]


class ActivationCapture:
    """Captures the inputs and outputs of modules within a `with` block.

        with ActivationCapture(model, ["layers.*.mlp"]) as captured:
            model(tokens)
        captured.outputs["layers.0.mlp"]  # [B, T, D]

    Captured tensors are detached and stay on their device. If a module is called several times, the last call
    counts. Names are in the order of the model: layer 2 comes before layer 10.

    Args:
        model: The model.
        modules: Names of modules, as in `model.named_modules()`, or patterns such as `layers.*.mlp`; by
            default the layers of the model.
        keep: A function that reduces a tensor before it is stored.

    Raises:
        ConfigError: If a name or pattern matches no module.
    """

    def __init__(
        self, model: nn.Module, modules: Iterable[str] | None = None, *, keep: Keep | None = None
    ) -> None:
        self.model = model
        self.modules = select_modules(model, modules)
        self.keep: Keep = keep or (lambda tensor: tensor)
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "ActivationCapture":
        if isinstance(self.model, LanguageModel):
            self._stack.enter_context(eager_layers(self.model))  # hooks have no effect on compiled layers
        for name, module in self.modules.items():
            handle = module.register_forward_hook(self._make_hook(name))
            self._stack.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for captured in (self.inputs, self.outputs):
            ordered = [(name, captured[name]) for name in self.modules if name in captured]
            captured.clear()
            captured.update(ordered)

    def norms(self) -> dict[str, float]:
        """Return the root mean square of each output."""
        return {name: float(x.float().square().mean().sqrt()) for name, x in self.outputs.items()}

    def _make_hook(
        self, name: str
    ) -> Callable[[nn.Module, Any, Any], None]:  # Any: inputs and outputs of modules
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            for captured, value in ((self.inputs, inputs), (self.outputs, output)):
                first = value[0] if isinstance(value, tuple) and value else value
                if isinstance(first, torch.Tensor):
                    captured[name] = self.keep(first.detach())

        return hook


def select_modules(model: nn.Module, patterns: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return the modules that match names or patterns, by name; without patterns, the layers."""
    named_modules = dict(model.named_modules())
    if patterns is None:
        layers = {id(block) for block in model.blocks()} if isinstance(model, LanguageModel) else set()
        if not layers:
            raise ConfigError(f"{type(model).__name__} has no layers to capture. Pass the names of modules.")
        return {name: module for name, module in named_modules.items() if id(module) in layers}
    selected = set()
    for pattern in patterns:
        matches = [name for name in named_modules if fnmatchcase(name, pattern)]
        if not matches:
            similar = difflib.get_close_matches(pattern, named_modules, n=1)
            raise ConfigError(
                f"no module of {type(model).__name__} matches {pattern!r}",
                hint=f"did you mean {similar[0]!r}?" if similar else "model.named_modules() lists them",
            )
        selected |= set(matches)
    return {name: module for name, module in named_modules.items() if name in selected}
