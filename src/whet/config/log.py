"""What is written and measured while a run goes."""

from typing import Literal

from pydantic import Field, field_validator

from whet.config.section import Positive, Section, Text

SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Samples(Section):
    """What the model says on the way, in samples.jsonl: before the first step, at intervals, at the end."""

    prompts: list[Text] = Field(min_length=1, description="what it is asked, always the same")
    every: Positive | None = Field(None, description="steps between samples; null: before and after only")
    max_tokens: Positive = Field(64, description="longest answer")

    @field_validator("prompts")
    @classmethod
    def _not_empty(cls, prompts: list[str]) -> list[str]:
        if not all(prompt.strip() for prompt in prompts):
            raise ValueError("a prompt is empty")
        return prompts


class Probes(Section):
    """Measurements on a fixed batch: steps between two of them, or null for none. They change nothing."""

    gradients: Positive | None = Field(200, description="gradient norms by layer")
    weights: Positive | None = Field(200, description="weight norms by layer, and the way from the start")
    activations: Positive | None = Field(500, description="size and sparsity of the layers' outputs")
    attention: Positive | None = Field(500, description="entropy of the attention weights by layer")
    noise: Positive | None = Field(2000, description="gradient noise scale, from four batches")
    rank: Positive | None = Field(2000, description="effective rank of the trained matrices by layer")
    curvature: Positive | None = Field(
        50, description="in every row: std / mean of the gradient norms of the last so many steps"
    )
    sparsity_eps: float = Field(1e-3, gt=0, description="activations: entries nearer to zero count as none")


class Log(Section):
    """What is written while it runs."""

    every: Positive = Field(
        1,
        description="steps between training rows of metrics.jsonl and the sinks; each covers them all",
    )
    sinks: list[SinkName] = Field([], description="where rows go beside metrics.jsonl")
    samples: Samples | None = Field(None, description="what the model says on the way")
    probes: Probes | None = Field(
        None, description="measurements on a fixed batch; {}: all, at their usual steps"
    )

    @field_validator("sinks")
    @classmethod
    def _each_once(cls, sinks: list[SinkName]) -> list[SinkName]:
        if len(set(sinks)) < len(sinks):
            raise ValueError("a sink is named twice")
        return sinks
