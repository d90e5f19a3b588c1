"""One step: gradients of all its micro-batches, and one update, unless something is not finite."""

import abc
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.errors import RunError, StorageError
from whet.hardware import Precision, choose_precision, peak_gib
from whet.models.heads import WithHeads
from whet.models.language_model import Trainable
from whet.objectives.objective import Objective
from whet.parallel.gradient_sync import GradientSum, is_sharded
from whet.parallel.process_group import World
from whet.parallel.tensor_parallel import NeighbourGradients
from whet.storage import replace_text
from whet.training.callbacks import Metrics
from whet.training.grad_clip import clip, excess, rescale, total_norm
from whet.training.loss import loss_weight, taken, total_weights, weighted_loss
from whet.training.optim.lr_schedules import create_schedule
from whet.training.optim.optimizers import create_optimizer, divides_itself, masked_step
from whet.training.prefetch import Computed, Mark, Reading, device_random, restore_device_random
from whet.training.state import RunState

log = logging.getLogger("whet")


class TrainStep(abc.ABC):
    """What a trainer knows of single steps; what lies between them (`save` and the like) it leaves to it."""

    def __init__(
        self,
        model: Trainable,
        objective: Objective,
        batches: Iterable[list[Batch]],
        config: RunConfig,
        *,
        total_steps: int,
        directory: Path | None,
        precision: Precision | None,
        world: World,
    ) -> None:
        self.model = model
        self.objective = objective
        self.source = batches
        self.batches: Iterator[list[Batch]] = iter(batches)
        self.config = config
        self.world = world
        self.total_steps = total_steps
        self.directory = directory
        self.device = model.device
        self.precision = precision or choose_precision(config.run.precision, self.device)
        if config.optim.freeze_pad_row:
            from whet.models.pad_row import freeze_pad_row

            freeze_pad_row(model)
        self.learner: nn.Module = model if objective.heads is None else WithHeads(model, objective.heads)
        self.optimizer = create_optimizer(config.optim_groups, self.learner)
        self.lr_at = create_schedule(config.optim, self.total_steps)
        self.trained = [p for p in self.learner.parameters() if p.requires_grad]
        self.gradients = GradientSum(self.trained, world)
        self.neighbours = NeighbourGradients(self.trained, world)
        self.matched = is_sharded(self.learner)
        self.divides_itself = divides_itself(self.optimizer) and not self.matched
        self.state = RunState()
        if self.precision.compute == torch.float16:
            self.state.loss_scale.value = 2.0**16
        # on a CPU there is nothing to gain, fp16 may compute a step again, and ranks must agree in between
        self.looks_ahead = (
            self.device.type == "cuda" and self.precision.compute != torch.float16 and world.size == 1
        )
        self._ahead: Computed | None = None
        self.loss_weight = 0.0  # of the last step: what its loss is a mean over
        self.objective_metrics: frozenset[str] = frozenset()  # names of what the objective says of it
        self._clock = self._step_ended = time.perf_counter()

    @abc.abstractmethod
    def save(self) -> None:
        """Keep what the run is now."""

    @abc.abstractmethod
    def _before_update(self) -> None:
        """Wait until weights and moments may change."""

    @abc.abstractmethod
    def _model_is_wanted_after(self, step: int) -> bool:
        """Whether somebody reads or changes the model between this step and the next."""

    def step(self, micro_batches: Sequence[Batch]) -> Metrics:
        """One update from all micro-batches: sums over them, divided once by the weights of all of them."""
        started, began = time.perf_counter(), Mark(self.device)
        return self._completed(
            Computed(micro_batches, self._gradients(micro_batches), began), started=started
        )

    def collect_gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Put the gradients of some micro-batches into the parameters, without an update.

        Sums are divided by `weights`, or by the weights of these micro-batches. Returns the loss and metrics.
        """
        scale = self.state.loss_scale
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            sums = self._gradients(micro_batches, weights)
            gradients = [p.grad for p in self.trained if p.grad is not None]
            rescale(gradients, 1.0 / scale.value)
            # an overflow of fp16: the same again, smaller
            if total_norm(gradients).isfinite() or not scale.shrink_after(sums["loss"].item()):
                return sums

    def apply_gradients(self) -> Metrics:
        """Make one update from the gradients in the parameters, clipped and at the schedule's rate."""
        # `_update` divides by the loss scale; both are exact, as it is a power of two
        rescale([p.grad for p in self.trained if p.grad is not None], self.state.loss_scale.value)
        lr = self.lr_at(self.state.step + 1)
        _, norm, skipped = self._update({"loss": torch.zeros((), device=self.device)}, lr=lr)()
        if skipped:
            raise RunError(f"the gradient norm is {norm}: no weight was changed")
        self.state.loss_scale.note_good_step()
        self.state.step += 1
        return {"lr": lr, "grad_norm": norm}

    def _next_step(self) -> Metrics:
        """The next step of the stream; on a GPU the one after it is queued before its numbers are read."""
        started = time.perf_counter() if self._ahead is None else self._step_ended
        computed, self._ahead = self._ahead or self._computed(), None
        return self._completed(computed, started=started, go_on=self._may_look_ahead(self.state.step + 1))

    def _computed(self) -> Computed:
        """The gradients of the stream's next step."""
        began = Mark(self.device)
        if not hasattr(self.source, "state"):
            return Computed(batches := self._next_batches(), self._gradients(batches), began)
        position, random = self.source.state(), device_random(self.device)
        return Computed(batches := self._next_batches(), self._gradients(batches), began, position, random)

    def _may_look_ahead(self, step: int) -> bool:
        """Whether nothing but numbers is wanted between this step and the next."""
        able = self.looks_ahead and hasattr(self.source, "seek")
        return able and step < self.total_steps and not self._model_is_wanted_after(step)

    def _stay_here(self) -> None:
        """Forget what was computed ahead: the run stands right after its last update."""
        if self._ahead is not None:
            self.optimizer.zero_grad(set_to_none=True)
            self.source.seek(self._ahead.position)  # type: ignore[attr-defined]  # else nothing is ahead
            restore_device_random(self.device, self._ahead.random)
            self._ahead = None

    def _completed(self, computed: Computed, *, started: float, go_on: bool = False) -> Metrics:
        """Update, and say what came of it."""
        lr, scale = self.lr_at(self.state.step + 1), self.state.loss_scale
        scale_before, micro_batches = scale.value, computed.micro_batches
        update = self._update(computed.sums, lr=lr)
        if go_on:
            self._ahead = self._computed()
        found, norm, skipped = update()
        while skipped and scale.shrink_after(found["loss"]):  # an overflow of fp16: the same again, smaller
            found, norm, skipped = self._update(self._gradients(micro_batches), lr=lr)()
        if skipped:
            scale.value = scale_before  # it was not to blame
            self._report_nonfinite(computed, found["loss"], norm)
            found["skipped"] = True
        else:
            scale.note_good_step()
        if self.precision.compute == torch.float16:
            found["loss_scale"] = scale.value
        self.state.nonfinite_in_a_row = self.state.nonfinite_in_a_row + 1 if skipped else 0
        self.state.step += 1
        self.world.watch.at_step(self.state.step)
        seconds = self._seconds(computed, started)
        self.objective_metrics = frozenset(found)
        self.loss_weight = loss_weight(self.objective, micro_batches)
        tokens = sum(batch.real_tokens for batch in micro_batches)
        supervised = sum(batch.supervised for batch in micro_batches)
        return {
            **found,
            "lr": lr,
            "grad_norm": norm,
            "tokens": tokens,
            "supervised_tokens": supervised,
            **self.state.count(tokens, supervised),
            "tokens_per_s": tokens / seconds,
            "step_s": seconds,
            "elapsed_s": self.state.elapsed_s,
            "peak_gib": self.state.peak(peak_gib(self.device)),
        }

    def _seconds(self, computed: Computed, started: float) -> float:
        """How long a step took; it ended when the device was done with it, not when the host knew.

        The host learns of it late where it was queueing the next step meanwhile: the time that takes belongs
        to the next step, which would else seem to take none when it is the last.
        """
        ended = time.perf_counter()
        on_device = computed.began.seconds_until(self._reading.arrived)
        if on_device is not None:
            ended = min(ended, started + on_device)
        self._step_ended = ended
        self.state.elapsed_s = ended - self._clock
        return ended - started

    def _gradients(
        self, micro_batches: Sequence[Batch], weights: dict[str, float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Forward and backward of a step: gradients in the parameters; the loss and the metrics."""
        if not all(module.training for module in self.learner.modules()):  # asking is quicker than setting
            self.learner.train()
        weights = weights or total_weights(self.objective, micro_batches)
        sums = {"loss": torch.zeros((), device=self.device)}
        mine = list(taken(self.world, micro_batches, matched=self.matched))
        exchanging = "gathering layers and adding up gradients" if self.matched else None
        for number, (_, batch, counts) in enumerate(mine, start=1):
            self.world.watch.doing(f"micro-batch {number} of {len(mine)}", exchanging=exchanging)
            share, metrics = weighted_loss(
                self.model, self.objective, batch.to(self.device), weights=weights, precision=self.precision
            )
            if number == len(mine):
                self.gradients.expect_last()
            (share * (self.state.loss_scale.value if counts else 0.0)).backward()
            if not counts:
                continue
            for name, value in {"loss": share.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value
        self.gradients.finish()
        self.neighbours.align()
        return sums

    def _update(
        self, sums: dict[str, torch.Tensor], *, lr: float
    ) -> Callable[[], tuple[Metrics, float, bool]]:
        """An update unless something is not finite; later: metrics, norm, and whether it was not."""
        gradients = [p.grad for p in self.trained if p.grad is not None]
        rescale(gradients, 1.0 / self.state.loss_scale.value)
        norm = total_norm(gradients)
        limit, divisor = self.config.optim.clip, None
        if limit is not None and self.divides_itself and norm.dtype == torch.float32:
            divisor = excess(norm, limit)
        elif limit is not None:
            clip(gradients, limit, norm)
        skip = (~(norm.isfinite() & self.world.add_up(sums["loss"]).isfinite())).float()
        self._before_update()
        masked_step(self.optimizer, lr=lr, skip=skip, divisor=divisor)
        # everything up to here was queued without waiting
        reading = self._reading = Reading(skip, norm, *sums.values())

        def read() -> tuple[Metrics, float, bool]:
            skipped, norm_value, *values = reading.values()
            return self.world.sums(dict(zip(sums, values, strict=True))), norm_value, bool(skipped)

        return read

    def _next_batches(self) -> list[Batch]:
        """The micro-batches of the next step."""
        try:
            with self.world.watch.patiently("preparing a step"):  # an epoch's order, or rollouts
                return next(self.batches)
        except StopIteration:
            raise RunError(
                f"the batches ran out after step {self.state.step} of {self.total_steps}",
                hint="batches must yield one list of micro-batches for each step",
            ) from None

    def _report_nonfinite(self, computed: Computed, loss: float, norm: float) -> None:
        """The weights did not change; keep what is needed to find out why, and stop or go on."""
        step = self.state.step + 1
        message = f"step {step}: loss {loss}, gradient norm {norm}: the weights were left as they were"
        if self.directory is not None and self.world.is_main:
            message += f"; {keep_batch(self.directory, step, computed.micro_batches, loss=loss, norm=norm)}"
        run = self.config.run
        in_a_row = self.state.nonfinite_in_a_row + 1
        if run.on_nonfinite == "skip" and in_a_row < run.nonfinite_limit:
            log.warning(message)
            return
        if run.on_nonfinite == "skip":
            message += f"; {in_a_row} such steps in a row, and run.nonfinite_limit is {run.nonfinite_limit}"
        self._stay_here()
        if computed.position is not None:
            self.source.seek(computed.position)  # type: ignore[attr-defined]  # it has a state, so it can seek
        self.save()
        raise RunError(
            message,
            hint="look at the records, set run.on_nonfinite to skip, or start anew with a lower optim.lr",
        )


def keep_batch(
    directory: Path, step: int, micro_batches: Sequence[Batch], *, loss: float, norm: float
) -> str:
    """Write the records and tokens of a step beside its run; say where they are, or why they are not."""
    path = directory / f"nonfinite-step-{step:06d}.json"
    culprits = [{"records": batch.origins, "tokens": batch.tokens.tolist()} for batch in micro_batches]
    found = {"loss": str(loss), "grad_norm": str(norm), "micro_batches": culprits}
    try:
        replace_text(path, json.dumps(found, indent=2) + "\n")
    except StorageError as error:
        return error.message
    return f"the batch is in {path}"
