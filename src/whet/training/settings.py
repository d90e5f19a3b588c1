"""Settings of a Trainer besides its model, objective, data and optimizer."""

from dataclasses import dataclass, field
from typing import Literal

from whet.config.run import Checkpoint
from whet.config.run_config import RunConfig
from whet.config.section import PrecisionName
from whet.errors import RunError, check_positive


@dataclass(frozen=True)
class TrainSettings:
    """How a Trainer steps, evaluates and saves. Comments name the corresponding config keys."""

    precision: PrecisionName = "auto"  # run.precision
    clip: float | None = 1.0  # optim.clip: maximum gradient norm
    on_nonfinite: Literal["stop", "skip"] = "stop"  # run.on_nonfinite
    nonfinite_limit: int = 10  # run.nonfinite_limit
    eval_every: int | None = None  # eval.every: steps between evaluations
    best_metric: str | None = None  # metric that selects the best step; None: eval_loss, else eval_reward
    restores_best: bool = False  # load the weights of the best step at the end
    freeze_pad_row: bool = False  # optim.freeze_pad_row
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @classmethod
    def from_config(cls, config: RunConfig) -> "TrainSettings":
        """Return the settings that a config describes."""
        run, early = config.run, config.eval.early_stop
        return cls(
            precision=run.precision,
            clip=config.optim.clip,
            on_nonfinite=run.on_nonfinite,
            nonfinite_limit=run.nonfinite_limit,
            eval_every=config.eval.interval,
            best_metric=None if early is None else early.metric,
            restores_best=early is not None,
            freeze_pad_row=config.optim.freeze_pad_row,
            checkpoint=config.checkpoint,
        )

    def evaluates_at(self, step: int) -> bool:
        """Return whether an evaluation is due after this step."""
        return self.eval_every is not None and step % self.eval_every == 0


def resolve_total_steps(total_steps: int | None, config: RunConfig | None) -> int | None:
    """Return the number of steps of a run: the given one, that of the config, or None if there is neither."""
    steps = total_steps if total_steps is not None or config is None else config.run.steps
    if steps is not None:
        check_positive(total_steps=steps)
    elif config is not None:
        raise RunError("a trainer needs total_steps if the config counts epochs")
    return steps
