"""Muon (arXiv 2502.16982) for the matrices inside a model, AdamW for everything else, as one optimizer."""

import torch

from whet.ops.dispatch import chosen_paths
from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup


class Muon(MaskedOptimizer):
    """torch's Muon and AdamW, each over its own groups, with one state and one learning rate.

    One rate serves both: torch scales an orthogonalised update to the size AdamW's have (`match_rms_adamw`).
    Muon's own constants are torch's: momentum 0.95 with Nesterov, five Newton-Schulz steps.
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
                fused=chosen_paths().fused_optimizer,
            )
        super().__init__([group for rule in self.rules.values() for group in rule.param_groups], {"lr": lr})

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """What torch's optimizers would begin with."""
        if group["rule"] == "muon":
            return {"momentum_buffer": torch.zeros_like(p)}
        zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=p.device), **zeros}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Lend torch's optimizer this one parameter: the state and the groups are here."""
        rule = self.rules[group["rule"]]
        rule.state = self.state
        rule.param_groups = [{**group, "params": [p]}]
        rule.step()
