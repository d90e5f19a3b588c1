"""Lion (arXiv 2302.06675): the sign of an average of gradients, with decoupled weight decay."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """One moment a weight, every update of the same size.

    Like torch's fused optimizers it reads `found_inf`: set to 1 on the device, a step changes nothing at all.
    """

    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],  # Any: parameters, or torch's dictionaries of parameter groups
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; there is no loss to return."""
        for group in self.param_groups:
            (fast, slow), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                keep = 1.0 if self.found_inf is None else 1.0 - self.found_inf.to(p.device, p.dtype)
                grad = p.grad.nan_to_num() * keep  # NaN times zero would still be NaN
                direction = average.lerp(grad, 1 - fast).sign_()
                p.mul_(1 - lr * decay * keep).sub_(direction * (lr * keep))
                average.add_((grad - average) * ((1 - slow) * keep))
