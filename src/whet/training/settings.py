"""What a trainer needs to know besides model, objective, data and optimizer."""

from dataclasses import dataclass, field
from typing import Literal

from whet.config.run import Checkpoint
from whet.config.run_config import RunConfig
from whet.config.section import PrecisionName


@dataclass(frozen=True)
class TrainSettings:
    """How a Trainer steps, evaluates and saves; a config has the same keys."""

    precision: PrecisionName = "auto"  # run.precision
    clip: float | None = 1.0  # optim.clip: the largest gradient norm
    on_nonfinite: Literal["stop", "skip"] = "stop"  # run.on_nonfinite
    nonfinite_limit: int = 10  # run.nonfinite_limit
    eval_every: int | None = None  # eval.every: steps between evaluations
    best_metric: str | None = None  # what the best step is chosen by; None: eval_loss, or eval_reward
    restores_best: bool = False  # the best weights are put back at the end
    freeze_pad_row: bool = False  # optim.freeze_pad_row
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @classmethod
    def of(cls, config: RunConfig) -> "TrainSettings":
        """Return the settings of a config."""
        run, early = config.run, config.eval.early_stop
        return cls(
            precision=run.precision,
            clip=config.optim.clip,
            on_nonfinite=run.on_nonfinite,
            nonfinite_limit=run.nonfinite_limit,
            eval_every=config.eval.every,
            best_metric=None if early is None else early.metric,
            restores_best=early is not None,
            freeze_pad_row=config.optim.freeze_pad_row,
            checkpoint=config.checkpoint,
        )
