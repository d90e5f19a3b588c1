"""One step: gradients of all its micro-batches, and one update, unless something is not finite."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from whet.data.batches import Batch
from whet.errors import RunError
from whet.hardware import Precision
from whet.models.language_model import Trainable
from whet.objectives.objective import Objective
from whet.parallel.gradient_sync import GradientSum, is_sharded
from whet.parallel.process_group import World
from whet.parallel.tensor_parallel import NeighbourGradients
from whet.training.grad_clip import clip, excess, rescale, total_norm
from whet.training.grad_scaler import LossScale
from whet.training.loss import taken, total_weights, weighted_loss
from whet.training.optim.optimizers import divides_itself, masked_step
from whet.training.prefetch import PendingUpdate, Reading


class TrainStep:
    """Computes the gradients of steps and makes updates; it knows nothing of what lies between them."""

    def __init__(
        self,
        model: Trainable,
        objective: Objective,
        learner: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Precision,
        max_norm: float | None,
        world: World,
    ) -> None:
        self.model = model
        self.objective = objective
        self.learner = learner
        self.optimizer = optimizer
        self.precision = precision
        self.max_norm = max_norm
        self.world = world
        self.device = model.device
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if optimized - {id(p) for p in learner.parameters()}:
            raise RunError(
                "the optimizer has parameters that are not in the model",
                hint="make it from the parameters of the model that is trained",
            )
        trainable = [p for p in learner.parameters() if p.requires_grad]
        self.trained = [p for p in trainable if id(p) in optimized]
        self._not_optimized = [p for p in trainable if id(p) not in optimized]
        self.loss_scale = LossScale(2.0**16) if precision.compute == torch.float16 else LossScale()
        self._sum = GradientSum(self.trained, world)
        self._neighbours = NeighbourGradients(self.trained, world)
        self._sharded = is_sharded(learner)
        self._divides_itself = divides_itself(optimizer) and not self._sharded

    def gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run forward and backward over a step; returns the loss and the metrics, as sums on the device.

        Sums are divided by `weights`, or by the weights of these micro-batches.
        """
        if not all(module.training for module in self.learner.modules()):  # asking is quicker than setting
            self.learner.train()
        weights = weights or total_weights(self.objective, micro_batches)
        sums = {"loss": torch.zeros((), device=self.device)}
        mine = list(taken(self.world, micro_batches, matched=self._sharded))
        exchanging = "gathering layers and adding up gradients" if self._sharded else None
        for number, (_, batch, counts) in enumerate(mine, start=1):
            self.world.watch.doing(f"micro-batch {number} of {len(mine)}", exchanging=exchanging)
            share, metrics = weighted_loss(
                self.model, self.objective, batch.to(self.device), weights=weights, precision=self.precision
            )
            if number == len(mine):
                self._sum.expect_last()
            (share * (self.loss_scale.value if counts else 0.0)).backward()
            if not counts:
                continue
            for name, value in {"loss": share.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value
        self._sum.finish()
        self._neighbours.align()
        return sums

    def unscaled_gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """The same without the loss scale of fp16; an overflow is computed again, with a smaller one."""
        while True:
            self.clear_gradients()
            sums = self.gradients(micro_batches, weights)
            gradients = self._present_gradients()
            rescale(gradients, 1.0 / self.loss_scale.value)
            if total_norm(gradients).isfinite() or not self.loss_scale.shrink_after(sums["loss"].item()):
                return sums

    def update_from_unscaled(self, *, lr: float) -> tuple[float, bool]:
        """Update from gradients without a loss scale; returns their norm and whether it was skipped."""
        # `update` divides by the loss scale; both are exact, as it is a power of two
        rescale(self._present_gradients(), self.loss_scale.value)
        _, norm, skipped = self.update({"loss": torch.zeros((), device=self.device)}, lr=lr).read()
        return norm, skipped

    def update(
        self,
        sums: dict[str, torch.Tensor],
        *,
        lr: float,
        before_update: Callable[[], None] = lambda: None,
    ) -> PendingUpdate:
        """Queue an update that the device skips where the loss or a gradient is not finite."""
        gradients = self._present_gradients()
        rescale(gradients, 1.0 / self.loss_scale.value)
        norm, divisor = total_norm(gradients), None
        if self.max_norm is not None and self._divides_itself and norm.dtype == torch.float32:
            divisor = excess(norm, self.max_norm)
        elif self.max_norm is not None:
            clip(gradients, self.max_norm, norm)
        skip = (~(norm.isfinite() & self.world.add_up(sums["loss"]).isfinite())).float()
        before_update()
        masked_step(self.optimizer, lr=lr, skip=skip, divisor=divisor)  # which clears the gradients it used
        self._clear_others()
        # everything up to here was queued without waiting
        return PendingUpdate(Reading(skip, norm, *sums.values()), list(sums), self.world)

    def clear_gradients(self) -> None:
        """Drop all gradients, also of parameters that the optimizer does not have."""
        self.optimizer.zero_grad(set_to_none=True)
        self._clear_others()

    def _clear_others(self) -> None:
        for parameter in self._not_optimized:
            parameter.grad = None

    def _present_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.trained if p.grad is not None]
