"""The `eval` section and early stopping."""

from pydantic import Field

from whet.config.section import Positive, Section, Text


class EarlyStop(Section):
    """When to stop because nothing improves."""

    metric: Text = Field(
        "eval_loss",
        description="what must improve, of an evaluation's row; losses and divergences fall, scores rise",
    )
    patience: Positive = Field(3, description="evaluations without improvement before the run stops")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as one")


class Evaluation(Section):
    """Evaluation during a run: before the first step, at intervals, after the last."""

    every: Positive | None = Field(None, description="steps between evaluations; null: first and last only")
    batches: Positive | None = Field(
        None, description="validation loss on at most this many micro-batches; null: the whole set"
    )
    generate: bool = Field(False, description="also exact match: generate each answer and compare")
    max_new_tokens: Positive = Field(256, description="longest generated answer")
    early_stop: EarlyStop | None = Field(None, description="stop when a metric no longer improves")
