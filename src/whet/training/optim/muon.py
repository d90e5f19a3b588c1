"""Muon (arXiv 2502.16982) for hidden matrices and AdamW for all other parameters, as one optimizer."""

import torch

from whet.ops.dispatch import current_paths
from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup


class Muon(MaskedOptimizer):
    """torch's Muon and AdamW as one optimizer with one state and one learning rate.

    Both use the same learning rate, because torch scales Muon's orthogonalized updates to the size of
    AdamW's (`match_rms_adamw`). Muon's constants are those of torch: Nesterov momentum of 0.95 and five
    Newton-Schulz steps.

    Args:
        matrices: Parameter groups for Muon; all parameters must be matrices.
        others: Parameter groups for AdamW.
        lr: The learning rate of both.
        betas: The betas of AdamW.
        eps: The epsilon of AdamW.
    """

    def __init__(
        self,
        matrices: list[ParamGroup],
        others: list[ParamGroup],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.rules: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self.rules["muon"] = torch.optim.Muon(
                [{**group, "rule": "muon"} for group in matrices], lr=lr, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            self.rules["adamw"] = torch.optim.AdamW(
                [{**group, "rule": "adamw"} for group in others],
                lr=lr,
                betas=betas,
                eps=eps,
                fused=current_paths().fused_optimizer,
            )
        super().__init__([group for rule in self.rules.values() for group in rule.param_groups], {"lr": lr})

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Return the initial state of torch's Muon or AdamW."""
        if group["rule"] == "muon":
            return {"momentum_buffer": torch.zeros_like(p)}
        zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=p.device), **zeros}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Run a step of torch's optimizer with this one parameter and its state."""
        rule = self.rules[group["rule"]]
        rule.state = self.state
        rule.param_groups = [{**group, "params": [p]}]
        rule.step()
