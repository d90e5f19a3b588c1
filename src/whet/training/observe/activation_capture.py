"""What modules take and give, caught on the way."""

import contextlib
import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import nn

from whet.errors import ConfigError
from whet.models.language_model import LanguageModel, uncompiled

Keep = Callable[[torch.Tensor], torch.Tensor]


class ActivationCapture:
    """Inputs and outputs of chosen modules, for the time of a `with` block.

        with ActivationCapture(model, ["layers.*.mlp"]) as captured:
            model(tokens)
        captured.outputs["layers.0.mlp"]  # [B, T, D]

    `modules` are names, as in `model.named_modules()`, or patterns; without any, the model's layers. What is
    kept is detached and on its device, of a module that is called several times the last; `keep` may make
    less of it. Names come in the order of the model: layer 2 before layer 10.
    """

    def __init__(
        self, model: nn.Module, modules: Iterable[str] | None = None, *, keep: Keep | None = None
    ) -> None:
        self.model = model
        self.modules = chosen_modules(model, modules)
        self.keep: Keep = keep or (lambda tensor: tensor)
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "ActivationCapture":
        if isinstance(self.model, LanguageModel):
            self._held.enter_context(uncompiled(self.model))  # a compiled layer sees no new hooks
        for name, module in self.modules.items():
            handle = module.register_forward_hook(self._catcher(name))
            self._held.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
        for found in (self.inputs, self.outputs):
            ordered = [(name, found[name]) for name in self.modules if name in found]
            found.clear()
            found.update(ordered)

    def norms(self) -> dict[str, float]:
        """The root mean square of each output."""
        return {name: float(x.float().square().mean().sqrt()) for name, x in self.outputs.items()}

    def _catcher(self, name: str) -> Callable[[nn.Module, Any, Any], None]:  # Any: what modules take and give
        def catch(_: nn.Module, inputs: Any, output: Any) -> None:
            for found, value in ((self.inputs, inputs), (self.outputs, output)):
                first = value[0] if isinstance(value, tuple) and value else value
                if isinstance(first, torch.Tensor):
                    found[name] = self.keep(first.detach())

        return catch


def chosen_modules(model: nn.Module, wanted: Iterable[str] | None) -> dict[str, nn.Module]:
    """Modules by their names; a name or pattern that fits none is an error."""
    every = dict(model.named_modules())
    if wanted is None:
        layers = {id(block) for block in model.blocks()} if isinstance(model, LanguageModel) else set()
        if not layers:
            raise ConfigError(f"{type(model).__name__} has no layers to capture: name the modules")
        return {name: module for name, module in every.items() if id(module) in layers}
    chosen = set()
    for pattern in wanted:
        fitting = [name for name in every if fnmatchcase(name, pattern)]
        if not fitting:
            near = difflib.get_close_matches(pattern, every, n=1)
            raise ConfigError(
                f"no module of {type(model).__name__} is called {pattern!r}",
                hint=f"did you mean {near[0]!r}?" if near else "model.named_modules() lists them",
            )
        chosen |= set(fitting)
    return {name: module for name, module in every.items() if name in chosen}
