"""The objective of the quality task: mean squared error, router metrics and the gluing term."""

from collections.abc import Mapping

import torch

from whet.data.batches import Batch
from whet.objectives.objective import Loss, Objective
from whet.recipes.quality.tabular_model import Decision, TabularModel, disagreement, one_hot_pairs


class Regression(Objective):
    """Mean squared error over rows and outputs, with an optional penalty on disagreeing experts.

    In terms of sheaves, each expert is a section over the rows that it reads, and two sections glue if they
    agree on their shared rows. The disagreement of each pair of experts is a metric, and is added to the
    loss with the weight `gluing`.

    Args:
        gluing: Weight of the disagreement in the loss.
    """

    unit = "rows"
    # a falling router entropy is an early sign of router collapse
    progress: Mapping[str, str] = {"grad_norm": "grad norm", "router_entropy_mean": "router entropy"}

    def __init__(self, *, gluing: float = 0.0) -> None:
        self.coefficients = {"loss": 1.0, **({"gluing": gluing} if gluing else {})}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of rows, the unit of both terms: one pair of experts reads each row."""
        return dict.fromkeys(self.coefficients, float(batch.supervised))

    def loss(self, model: TabularModel, batch: Batch) -> Loss:
        """Return the loss terms and the router metrics, summed over rows."""
        decision = model.decide(batch.column("features"))
        outputs = decision.outputs
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        error = (outputs - batch.column("outcomes")).square().mean(-1)
        sums = {"loss": error.sum()}
        metrics = {} if decision.routing is None else _router_metrics(decision)
        if "gluing" in self.coefficients and decision.sections is not None:
            sums["gluing"] = disagreement(decision.sections).sum()
        return Loss(sums, metrics)


@torch.no_grad()
def _router_metrics(decision: Decision) -> dict[str, torch.Tensor]:
    """Return sums over rows: entropy, rows per leading expert, and shared rows and disagreement per pair."""
    routing, sections = decision.routing, decision.sections
    assert routing is not None
    assert sections is not None
    shared = one_hot_pairs(routing)
    return {
        "router_entropy_mean": routing.entropy().float().sum(),
        "per_expert_share": routing.leaders().float().sum(0),
        "pair_share": shared.sum(0),
        "pair_disagreement": (shared * disagreement(sections)[:, None]).sum(0),
    }
