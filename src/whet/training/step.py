"""One training step: the gradients of its micro-batches and one update, unless a value is non-finite."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from whet.data.batches import Batch
from whet.hardware import Precision
from whet.models.language_model import Trainable
from whet.objectives.objective import Objective
from whet.parallel.gradient_sync import GradientReducer, is_sharded
from whet.parallel.process_group import World
from whet.parallel.tensor_parallel import ReplicatedGradientSync
from whet.training.grad_clip import clip, clip_divisor, rescale, total_norm
from whet.training.grad_scaler import LossScale
from whet.training.loss import share_batches, total_weights, weighted_loss
from whet.training.optim.optimizers import masked_step, partition_parameters, supports_grad_divisor
from whet.training.prefetch import HostCopy, PendingUpdate


class TrainStep:
    """Computes the gradients of steps and applies updates."""

    def __init__(
        self,
        model: Trainable,
        objective: Objective,
        trained_module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Precision,
        max_norm: float | None,
        world: World,
    ) -> None:
        self.model = model
        self.objective = objective
        self.trained_module = trained_module
        self.optimizer = optimizer
        self.precision = precision
        self.max_norm = max_norm
        self.world = world
        self.device = model.device
        self.trained, self._not_optimized = partition_parameters(optimizer, trained_module)
        self.loss_scale = LossScale(2.0**16) if precision.compute == torch.float16 else LossScale()
        self._gradient_sum = GradientReducer(self.trained, world)
        self._neighbour_gradients = ReplicatedGradientSync(self.trained, world)
        self._sharded = is_sharded(trained_module)
        self._supports_grad_divisor = supports_grad_divisor(optimizer) and not self._sharded

    def gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run forward and backward over a step, and return the loss and the metrics as tensors on the device.

        Sums are divided by `weights`, or by the total weights of these micro-batches.
        """
        if not all(module.training for module in self.trained_module.modules()):  # cheaper than train()
            self.trained_module.train()
        weights = weights or total_weights(self.objective, micro_batches)
        sums = {"loss": torch.zeros((), device=self.device)}
        shares = list(share_batches(self.world, micro_batches, matched=self._sharded))
        collective = "gathering layers and adding up gradients" if self._sharded else None
        for number, (_, batch, counts) in enumerate(shares, start=1):
            self.world.watchdog.report_activity(
                f"micro-batch {number} of {len(shares)}", collective=collective
            )
            loss, metrics = weighted_loss(
                self.model, self.objective, batch.to(self.device), weights=weights, precision=self.precision
            )
            if number == len(shares):
                self._gradient_sum.expect_last_backward()
            (loss * (self.loss_scale.value if counts else 0.0)).backward()
            if not counts:
                continue
            for name, value in {"loss": loss.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value
        self._gradient_sum.finish()
        self._neighbour_gradients.synchronize()
        return sums

    def unscaled_gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Compute gradients as `gradients` does, without the loss scale; an fp16 overflow is retried."""
        while True:
            self.clear_gradients()
            sums = self.gradients(micro_batches, weights)
            gradients = self._existing_gradients()
            rescale(gradients, 1.0 / self.loss_scale.value)
            if total_norm(gradients).isfinite() or not self.loss_scale.shrink_after(sums["loss"].item()):
                return sums

    def update_from_unscaled(self, *, lr: float) -> tuple[float, bool]:
        """Apply gradients without a loss scale; return their norm and whether the update was skipped."""
        # `update` divides by the loss scale. Both operations are exact, because it is a power of two.
        rescale(self._existing_gradients(), self.loss_scale.value)
        _, norm, skipped = self.update({"loss": torch.zeros((), device=self.device)}, lr=lr).read()
        return norm, skipped

    def update(
        self, sums: dict[str, torch.Tensor], *, lr: float, before_update: Callable[[], None] = lambda: None
    ) -> PendingUpdate:
        """Queue an update that the device skips if the loss or a gradient is non-finite."""
        gradients = self._existing_gradients()
        rescale(gradients, 1.0 / self.loss_scale.value)
        norm, divisor = total_norm(gradients), None
        if self.max_norm is not None and self._supports_grad_divisor and norm.dtype == torch.float32:
            divisor = clip_divisor(norm, self.max_norm)
        elif self.max_norm is not None:
            clip(gradients, self.max_norm, norm)
        skip = (~(norm.isfinite() & self.world.all_reduce_sum(sums["loss"]).isfinite())).float()
        before_update()
        masked_step(self.optimizer, lr=lr, skip=skip, divisor=divisor)  # also clears the gradients it used
        self._clear_unused_gradients()
        # Nothing so far has waited for the device.
        return PendingUpdate(HostCopy(skip, norm, *sums.values()), list(sums), self.world)

    def clear_gradients(self) -> None:
        """Drop all gradients, including those of parameters that are not in the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        self._clear_unused_gradients()

    def _clear_unused_gradients(self) -> None:
        for parameter in self._not_optimized:
            parameter.grad = None

    def _existing_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.trained if p.grad is not None]
