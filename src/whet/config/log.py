"""The `log` section: metrics, sinks, samples and probes."""

from typing import Literal

from pydantic import Field, field_validator

from whet.config.section import Positive, Section, Text

SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Samples(Section):
    """Sample generations in samples.jsonl: before the first step, at intervals, and after the last step."""

    prompts: list[Text] = Field(min_length=1, description="prompts to complete, the same ones every time")
    every: Positive | None = Field(
        None, description="steps between samples; null: only before the first and after the last step"
    )
    max_tokens: Positive = Field(64, description="maximum tokens per completion")

    @field_validator("prompts")
    @classmethod
    def _check_not_empty(cls, prompts: list[str]) -> list[str]:
        if not all(prompt.strip() for prompt in prompts):
            raise ValueError("a prompt is empty")
        return prompts


class Probes(Section):
    """Diagnostics on a fixed batch: steps between measurements, null: off. Training is unaffected."""

    gradients: Positive | None = Field(200, description="gradient norm per layer, every this many steps")
    weights: Positive | None = Field(
        200, description="weight norm per layer and distance from the initial weights, every this many steps"
    )
    activations: Positive | None = Field(
        500, description="RMS and sparsity of each layer's output, every this many steps"
    )
    attention: Positive | None = Field(
        500, description="entropy of the attention weights per layer, every this many steps"
    )
    noise: Positive | None = Field(
        2000, description="gradient noise scale, estimated from four batches, every this many steps"
    )
    rank: Positive | None = Field(
        2000, description="effective rank of the trained matrices per layer, every this many steps"
    )
    curvature: Positive | None = Field(
        50, description="std / mean of the gradient norms over a window of this many steps, at every step"
    )
    sparsity_eps: float = Field(
        1e-3, gt=0, description="activations: absolute values below this count as zero"
    )


class Log(Section):
    """Logging during a run."""

    every: Positive = Field(
        1,
        description="steps between training entries in metrics.jsonl and the sinks; each entry covers "
        "the steps since the previous one",
    )
    sinks: list[SinkName] = Field([], description="experiment trackers that also receive the metrics")
    samples: Samples | None = Field(
        None, description="generate samples from fixed prompts during the run; null: none"
    )
    probes: Probes | None = Field(
        None, description="diagnostics on a fixed batch; null: none; {}: all, at their default intervals"
    )

    @field_validator("sinks")
    @classmethod
    def _check_unique(cls, sinks: list[SinkName]) -> list[SinkName]:
        if len(set(sinks)) < len(sinks):
            raise ValueError("a sink is listed twice")
        return sinks
