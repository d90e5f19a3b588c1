"""The `eval` section and early stopping."""

import re
from typing import Annotated, Any

from pydantic import Field, field_validator

from whet.config.placeholder import parse_placeholder
from whet.config.section import KeyInfo, Positive, Section, Text

_CHANGEABLE = KeyInfo(may_change_on_resume=True)
_OF_EVERY_RUN = ("loss", "perplexity", "bits_per_byte", "s")  # eval_loss, ...


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

    every: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="steps between evaluations; null: first and last only"
    )
    batches: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="validation loss on at most this many micro-batches; null: the whole set"
    )
    generate: bool = Field(False, description="also exact match: generate each answer and compare")
    metrics: dict[str, Text] = Field(
        {},
        description="functions of (answers, records), by name: package.module:function, "
        "path/to/file.py:function, or python:NAME for one passed from Python; their values are eval_NAME",
    )
    max_new_tokens: Annotated[Positive, _CHANGEABLE] = Field(256, description="longest generated answer")
    early_stop: EarlyStop | None = Field(None, description="stop when a metric no longer improves")

    @field_validator("metrics", mode="before")
    @classmethod
    def _are_named(cls, metrics: Any) -> Any:  # Any: YAML values, or what a caller gave
        for name, metric in metrics.items() if isinstance(metrics, dict) else ():
            if callable(metric):
                raise ValueError(
                    f"{name} is a Python object, which a config cannot hold: pass it beside the config, "
                    f"whet.train(config, metrics={{{name!r}: function}})"
                )
        return metrics

    @field_validator("metrics")
    @classmethod
    def _can_be_imported(cls, metrics: dict[str, str]) -> dict[str, str]:
        for name, reference in metrics.items():
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"{name!r}: the name of a metric has letters, digits, _ and - only")
            if name in _OF_EVERY_RUN:
                raise ValueError(f"eval_{name} is what every evaluation has: choose another name")
            module, _, function = reference.rpartition(":")
            if parse_placeholder(reference) is None and not (module and function):
                raise ValueError(
                    f"{reference!r} is no function: write package.module:function or path/to/file.py:function"
                )
        return metrics
