"""The `model` section of the quality-decision task, and the defaults of its runs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from whet.config.section import KeyInfo, ObjectiveSection, Positive, ReadBy, Section

Size = Literal["nano", "tiny", "medium", "full"]
Arm = Literal["softmax", "sheaf-padic", "dense"]
STEPS: dict[str, int] = {"nano": 20, "tiny": 50, "medium": 100, "full": 100}
ROUTER = r"^router\."  # the router's parameters, by name
_PADIC = KeyInfo(read_by=ReadBy("arm", ("sheaf-padic",)))
_LARGEST_CODE = 2**20  # more would not come back from fp32 as they went in


class Quality(Section):
    """A model of the quality-decision task, trained from scratch: docs/quality.md."""

    quality: Size = Field(description="size of a model for the quality-decision task, see docs/quality.md")
    arm: Arm = Field(
        "softmax", description="how rows find their experts, or dense: a twin of the same size without any"
    )
    base: Annotated[int, _PADIC] = Field(
        5, ge=2, le=97, description="sheaf-padic: the base p in which router logits are written"
    )
    digits: Annotated[int, _PADIC] = Field(
        6, gt=0, le=20, description="sheaf-padic: how many digits they have"
    )
    tie_digits: Annotated[Positive, _PADIC] = Field(
        4, description="sheaf-padic: experts whose logits agree in this many leading digits are tied"
    )
    clamp: Annotated[float, _PADIC] = Field(
        8.0, gt=0, description="sheaf-padic: logits are cut to -clamp .. clamp"
    )

    @model_validator(mode="after")
    def _digits_fit(self) -> "Quality":
        if self.tie_digits > self.digits:
            raise ValueError(f"tie_digits={self.tie_digits} is more than digits={self.digits}")
        if self.base**self.digits > _LARGEST_CODE:
            raise ValueError(f"{self.digits} digits in base {self.base} are too many: at most 2**20 codes")
        return self


def is_quality(model: object) -> bool:
    """Whether a `model` section, checked or not, is one of these."""
    return isinstance(model, Quality) or (isinstance(model, Mapping) and "quality" in model)


def with_quality_defaults(values: dict[str, Any]) -> dict[str, Any]:  # Any: not yet checked
    """A config of these models with the task's own defaults, where it says nothing else."""
    model = values["model"]
    size, arm = (
        (model.quality, model.arm)
        if isinstance(model, Quality)
        else (model["quality"], model.get("arm", "softmax"))
    )
    given = {name: section for name, section in values.items() if isinstance(section, Mapping)}
    run, optim = dict(given.get("run", {})), given.get("optim", {})
    own: dict[str, dict[str, Any]] = {  # Any: not yet checked
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
        run["steps"] = STEPS.get(str(size), 1)  # of an unknown size, only that is worth an error
    if run.get("batch_size") is None and run.get("batch_tokens") is None:
        run["batch_size"] = 128
    given["run"] = run
    filled = {name: {**defaults, **given.get(name, {})} for name, defaults in own.items()}
    return {**values, **{name: s for name, s in filled.items() if name not in values or name in given}}


def unfit_key(values: Mapping[str, Any]) -> str | None:  # Any: the values of a checked config
    """Return what is wrong with the first key that asks for something these models do not have."""
    if values["model"].arm == "dense" and values["optim"].router_lr_scale is not None:
        return "optim.router_lr_scale needs a router, and model.arm: dense has none"
    wrong = {
        "method.kind must be full": values["method"].kind != "full",
        "objective.kind must be regression": values["objective"].kind != "regression",
        "eval.generate needs a language model": values["eval"].generate,
        "eval.metrics needs a language model": bool(values["eval"].metrics),
        "data.curriculum needs a language model": values["data"].curriculum is not None,
        "data.format must be tabular": values["data"].format not in ("auto", "tabular"),
        "optim.mup needs a language model": values["optim"].mup is not None,
        "run.fp8 needs a language model": values["run"].fp8,
        "run.compile needs a language model": values["run"].compile,
        "run.grad_checkpoint needs a language model": values["run"].grad_checkpoint,
    }
    of_texts = ("max_length", "too_long", "pack", "supervise")
    data, fields = values["data"], type(values["data"]).model_fields
    wrong |= {
        f"data.{key} is about texts": getattr(data, key) != fields[key].get_default() for key in of_texts
    }
    wrong |= {f"experts.{key} needs a language model": bool(given) for key, given in values["experts"]}
    return next(
        (f"{key}: model.quality reads rows of numbers" for key, is_wrong in wrong.items() if is_wrong), None
    )


class RegressionObjective(ObjectiveSection):
    """Regression: the squared error of the quality-decision task."""

    output = "numbers"
    answer_level_kinds = ("regression",)

    kind: Literal["regression"] = Field(description="mean squared error over rows and outputs")
    gluing: float = Field(
        0.0, ge=0, description="weight of the disagreement of two experts on the rows they share"
    )
