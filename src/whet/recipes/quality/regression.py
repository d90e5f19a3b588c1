"""Squared error of the quality task, what its router does, and how far experts that share rows agree."""

from collections.abc import Mapping

import torch

from whet.data.batches import Batch
from whet.objectives.objective import Loss, Objective
from whet.recipes.quality.tabular_model import Decision, TabularModel, disagreement, shared_by


class Regression(Objective):
    """Mean squared error over rows and outputs.

    Each expert is a section over the rows it reads. Two sections glue when they say the same where both are
    defined; how far they do not is reported for each pair, and penalised with weight `gluing`.
    """

    unit = "rows"
    # the last shows early that a router collapses
    progress: Mapping[str, str] = {"grad_norm": "grad norm", "router_entropy_mean": "router entropy"}

    def __init__(self, *, gluing: float = 0.0) -> None:
        self.coefficients = {"loss": 1.0, **({"gluing": gluing} if gluing else {})}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Rows: each is read by one pair of experts, so they are the units of both terms."""
        return dict.fromkeys(self.coefficients, float(batch.supervised))

    def loss(self, model: TabularModel, batch: Batch) -> Loss:
        """The summed loss, and what the router did."""
        decision = model.decide(batch.column("features"))
        outputs = decision.outputs
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        error = (wide - batch.column("outcomes")).square().mean(-1)
        sums = {"loss": error.sum()}
        metrics = {} if decision.routing is None else _router_metrics(decision)
        if "gluing" in self.coefficients and decision.sections is not None:
            sums["gluing"] = disagreement(decision.sections).sum()
        return Loss(sums, metrics)


@torch.no_grad()
def _router_metrics(decision: Decision) -> dict[str, torch.Tensor]:
    """Sums over rows: of entropy, of who leads, of who shares and how far these disagree."""
    routing, sections = decision.routing, decision.sections
    assert routing is not None
    assert sections is not None
    shared = shared_by(routing)
    return {
        "router_entropy_mean": routing.entropy().float().sum(),
        "per_expert_share": routing.leaders().float().sum(0),
        "pair_share": shared.sum(0),
        "pair_disagreement": (shared * disagreement(sections)[:, None]).sum(0),
    }
