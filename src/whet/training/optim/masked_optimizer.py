"""Base class of optimizers without a fused torch kernel, whose step a flag on the device can skip."""

import abc
from collections.abc import Callable
from typing import Any

import torch

OptimizerState = dict[str, torch.Tensor]
ParamGroup = dict[str, Any]  # Any: torch's parameter groups


class MaskedOptimizer(torch.optim.Optimizer, abc.ABC):
    """Updates one tensor at a time, and skips the step on the device if a flag is set.

    If `found_inf` is 1, a step changes neither weights nor state, as with torch's fused kernels. Zeroing the
    gradients is not enough, because weight decay, averages, momentum and counters would still change.
    Instead, each tensor and its state are copied and updated, and the device selects the old or new values.
    Counters are tensors for this reason. Only one tensor and its state exist twice at any time.
    """

    found_inf: torch.Tensor | None = None

    @abc.abstractmethod
    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Return the initial state of a parameter."""

    @abc.abstractmethod
    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Update a parameter and its state in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one update, and return the loss if a closure is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_tensor(p, group)
        return loss

    def _step_tensor(self, p: torch.Tensor, group: ParamGroup) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state.update(self.create_state(p, group))
        if self.found_inf is None:
            self.update(p, p.grad, state, group)
            return
        skip = self.found_inf.to(p.device).bool()
        copies = [(tensor, tensor.clone()) for tensor in (p, *state.values())]
        self.update(p, p.grad, state, group)
        for tensor, before in copies:
            torch.where(skip, before, tensor, out=tensor)
