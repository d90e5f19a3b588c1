"""The `eval` section and early stopping."""

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from whet.config.placeholder import parse_placeholder
from whet.config.section import KeyInfo, Positive, Section, Text

_CHANGEABLE = KeyInfo(may_change_on_resume=True)
_RESERVED_NAMES = ("loss", "perplexity", "bits_per_byte", "s")  # eval_loss, eval_perplexity, ...


class EarlyStop(Section):
    """Early stopping: end the run when a metric stops improving."""

    metric: Text = Field(
        "eval_loss",
        description="evaluation metric that must improve; losses and divergences should fall, scores rise",
    )
    patience: Positive = Field(3, description="evaluations without improvement after which the run stops")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as an improvement")


class BenchmarkTasks(Section):
    """Benchmark tasks of lm-evaluation-harness that are evaluated during a run."""

    names: Annotated[list[Text], Field(min_length=1)] = Field(
        description="names of tasks or groups that lm-evaluation-harness has, and task files (YAML)"
    )
    every: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="steps between evaluations of the tasks, a multiple of eval.every; null: eval.every"
    )
    limit: Positive | None = Field(None, description="number of items per task; null: all")
    shots: Annotated[int, Field(ge=0)] | None = Field(
        None, description="number of examples in each prompt; null: that of the task"
    )
    chat: bool = Field(False, description="render prompts with the chat template of the model")


class Evaluation(Section):
    """Evaluation during a run: before the first step, at intervals, and after the last step."""

    every: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="steps between evaluations; null: only before the first and after the last step"
    )
    batches: Annotated[Positive | None, _CHANGEABLE] = Field(
        None, description="maximum micro-batches for the validation loss; null: the full validation set"
    )
    generate: bool = Field(
        False, description="also generate a response to each prompt and report exact match"
    )
    metrics: dict[str, Text] = Field(
        {},
        description="custom metrics, functions of (answers, records) by name: package.module:function, "
        "path/to/file.py:function, or python:NAME for one passed from Python; logged as eval_NAME",
    )
    max_new_tokens: Annotated[Positive, _CHANGEABLE] = Field(
        256, description="maximum tokens per generated response"
    )
    tasks: BenchmarkTasks | None = Field(
        None,
        description="benchmark tasks of lm-evaluation-harness, logged as eval_TASK_METRIC: a list of names "
        "and task files, or a mapping; null: none",
    )
    early_stop: EarlyStop | None = Field(
        None, description="stop the run when a metric stops improving; null: never"
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _names_to_section(cls, tasks: Any) -> Any:  # Any: YAML or Python values
        if isinstance(tasks, str):
            tasks = [tasks]
        return {"names": tasks} if isinstance(tasks, list) else tasks

    @model_validator(mode="after")
    def _check_intervals(self) -> "Evaluation":
        if self.tasks is None or self.tasks.every is None or self.every is None:
            return self
        if self.tasks.every % self.every:
            raise ValueError(
                f"tasks.every ({self.tasks.every}) must be a multiple of eval.every ({self.every})"
            )
        return self

    @property
    def interval(self) -> int | None:
        """Steps between evaluations: eval.every, or eval.tasks.every if only that is set."""
        return self.tasks.every if self.every is None and self.tasks is not None else self.every

    def evaluates_tasks_at(self, step: int) -> bool:
        """Return whether an evaluation after this step, which is not the last, includes the tasks."""
        every = None if self.tasks is None else self.tasks.every or self.every
        return self.tasks is not None and (step == 0 or (every is not None and step % every == 0))

    @field_validator("metrics", mode="before")
    @classmethod
    def _reject_callables(cls, metrics: Any) -> Any:  # Any: YAML or Python values
        for name, metric in metrics.items() if isinstance(metrics, dict) else ():
            if callable(metric):
                raise ValueError(
                    f"{name} is a Python object, which a config cannot contain: pass it as an argument, "
                    f"whet.train(config, metrics={{{name!r}: function}})"
                )
        return metrics

    @field_validator("metrics")
    @classmethod
    def _check_references(cls, metrics: dict[str, str]) -> dict[str, str]:
        for name, reference in metrics.items():
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(f"{name!r}: a metric name may only contain letters, digits, _ and -")
            if name in _RESERVED_NAMES:
                raise ValueError(f"eval_{name} is a built-in metric: choose another name")
            module, _, function = reference.rpartition(":")
            if parse_placeholder(reference) is None and not (module and function):
                raise ValueError(
                    f"{reference!r} is not a function: write package.module:function "
                    "or path/to/file.py:function"
                )
        return metrics
