"""The base of the optimizers that have no kernel of torch's which can be masked."""

import abc
from collections.abc import Callable
from typing import Any

import torch

OptimizerState = dict[str, torch.Tensor]
ParamGroup = dict[str, Any]  # Any: torch's parameter groups


class MaskedOptimizer(torch.optim.Optimizer, abc.ABC):
    """One tensor at a time, and a step that the device can take back.

    With `found_inf` at 1 a step changes neither weights nor state, as with torch's fused kernels. Gradients
    of zero would not do: weights would still decay, averages shrink, momentum push and counters count. So
    each tensor and its state are copied, updated, and the right ones chosen on the device, not the host: that
    is why counters are tensors, too. Only one tensor and its state exist twice at any time.
    """

    found_inf: torch.Tensor | None = None

    @abc.abstractmethod
    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """What is remembered of a parameter before its first update."""

    @abc.abstractmethod
    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Change a parameter and its state in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update, from the gradients that are there or that the closure makes; returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, group)
        return loss

    def _step_one(self, p: torch.Tensor, group: ParamGroup) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state.update(self.create_state(p, group))
        if self.found_inf is None:
            self.update(p, p.grad, state, group)
            return
        skip = self.found_inf.to(p.device).bool()
        kept = [(tensor, tensor.clone()) for tensor in (p, *state.values())]
        self.update(p, p.grad, state, group)
        for tensor, before in kept:
            torch.where(skip, before, tensor, out=tensor)
