"""The `model` section of the quality-decision task, its objective, and the defaults of its runs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from whet.config.section import KeyInfo, ObjectiveSection, Positive, Section, UsedWhen

Size = Literal["nano", "tiny", "medium", "full"]
Arm = Literal["softmax", "sheaf-padic", "dense"]
STEPS: dict[str, int] = {"nano": 20, "tiny": 50, "medium": 100, "full": 100}
ROUTER = r"^router\."  # names of the router parameters
_PADIC = KeyInfo(used_when=UsedWhen("arm", ("sheaf-padic",)))
_LARGEST_CODE = 2**20  # larger codes do not survive a round trip through fp32


class Quality(Section):
    """A model for the quality-decision task, trained from scratch (docs/quality.md)."""

    quality: Size = Field(description="model size for the quality-decision task, see docs/quality.md")
    arm: Arm = Field(
        "softmax", description="routing of rows to experts; dense: a model of the same size without experts"
    )
    base: Annotated[int, _PADIC] = Field(
        5, ge=2, le=97, description="sheaf-padic: base p of the router logits' digits"
    )
    digits: Annotated[int, _PADIC] = Field(
        6, gt=0, le=20, description="sheaf-padic: number of digits of a router logit"
    )
    tie_digits: Annotated[Positive, _PADIC] = Field(
        4, description="sheaf-padic: experts whose logits agree in this many leading digits are tied"
    )
    clamp: Annotated[float, _PADIC] = Field(
        8.0, gt=0, description="sheaf-padic: router logits are clamped to [-clamp, clamp]"
    )

    @model_validator(mode="after")
    def _check_digits(self) -> "Quality":
        if self.tie_digits > self.digits:
            raise ValueError(f"tie_digits={self.tie_digits} is larger than digits={self.digits}")
        if self.base**self.digits > _LARGEST_CODE:
            raise ValueError(
                f"{self.digits} digits in base {self.base} give more than 2**20 codes: lower one of them"
            )
        return self


def is_quality(model: object) -> bool:
    """Return whether a `model` section, validated or not, is a quality model."""
    return isinstance(model, Quality) or (isinstance(model, Mapping) and "quality" in model)


def with_quality_defaults(values: dict[str, Any]) -> dict[str, Any]:  # Any: not yet checked
    """Return the values of a quality model's config, with the task's defaults for keys that are not set."""
    model = values["model"]
    size, arm = (
        (model.quality, model.arm)
        if isinstance(model, Quality)
        else (model["quality"], model.get("arm", "softmax"))
    )
    sections = {name: section for name, section in values.items() if isinstance(section, Mapping)}
    run, optim = dict(sections.get("run", {})), sections.get("optim", {})
    task_defaults: dict[str, dict[str, Any]] = {  # Any: not yet checked
        "method": {"kind": "full"},
        "objective": {"kind": "regression"},
        "data": {"train": "synth:quality:512"},
        "optim": {
            "lr": 0.01,
            "weight_decay": 0.0 if optim.get("name") == "sgd" else 0.01,
            "clip": 0.5,
            "warmup": 5,
            "groups": {} if arm == "dense" or optim.get("router_lr_scale") else {ROUTER: {"lr_scale": 0.1}},
        },
        "run": {},
    }
    if run.get("steps") is None and run.get("epochs") is None:
        run["steps"] = STEPS.get(str(size), 1)  # an unknown size is reported by the validation
    if run.get("batch_size") is None and run.get("batch_tokens") is None:
        run["batch_size"] = 128
    sections["run"] = run
    filled = {name: {**defaults, **sections.get(name, {})} for name, defaults in task_defaults.items()}
    return {**values, **{name: s for name, s in filled.items() if name not in values or name in sections}}


def quality_problem(values: Mapping[str, Any]) -> str | None:  # Any: values of a validated config
    """Return the problem with the first key that quality models do not support, or None."""
    if values["model"].arm == "dense" and values["optim"].router_lr_scale is not None:
        return "optim.router_lr_scale needs a router, but model.arm: dense has none"
    problems = {
        "method.kind must be full": values["method"].kind != "full",
        "objective.kind must be regression": values["objective"].kind != "regression",
        "eval.generate needs a language model": values["eval"].generate,
        "eval.metrics needs a language model": bool(values["eval"].metrics),
        "eval.tasks needs a language model": values["eval"].tasks is not None,
        "data.curriculum needs a language model": values["data"].curriculum is not None,
        "data.format must be tabular": values["data"].format not in ("auto", "tabular"),
        "optim.mup needs a language model": values["optim"].mup is not None,
        "run.fp8 needs a language model": values["run"].fp8,
        "run.compile needs a language model": values["run"].compile,
        "run.grad_checkpoint needs a language model": values["run"].grad_checkpoint,
    }
    text_keys = (
        "max_length",
        "too_long",
        "pack",
        "supervise",
        "supervise_thinking",
        "template",
        "template_args",
    )
    data, fields = values["data"], type(values["data"]).model_fields
    problems |= {
        f"data.{key} only applies to text": getattr(data, key) != fields[key].get_default()
        for key in text_keys
    }
    problems |= {f"experts.{key} needs a language model": bool(value) for key, value in values["experts"]}
    return next(
        (
            f"{problem}: model.quality reads rows of numbers"
            for problem, applies in problems.items()
            if applies
        ),
        None,
    )


class RegressionObjective(ObjectiveSection):
    """Regression: mean squared error, for the quality-decision task."""

    output = "numbers"
    sequence_level_kinds = ("regression",)

    kind: Literal["regression"] = Field(description="regression: mean squared error over rows and outputs")
    gluing: float = Field(
        0.0, ge=0, description="weight of the disagreement between two experts on their shared rows; 0: off"
    )
