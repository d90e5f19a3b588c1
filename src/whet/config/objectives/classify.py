"""The keys of classification."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.section import KeyInfo, ObjectiveSection, Positive, Text

Pooling = Literal["last", "mean", "first"]
Weighting = Literal["auto", "none", "inverse", "sqrt_inverse", "effective"]
_NOT_IN_THE_LOSS = KeyInfo(changes_loss=False)


class ClassifyObjective(ObjectiveSection):
    """Classification: a head on the model says which class a text belongs to, or which classes."""

    default_targets = "qv"
    output = "class"
    answer_level_kinds = ("classify",)

    kind: Literal["classify"] = Field(description="records are {input, label} or {input, labels}")
    classes: Positive | list[Text] = Field(description="the classes' names, or how many there are")
    multi_label: bool = Field(False, description="a text may belong to several classes, or to none")
    pooling: Annotated[Pooling, _NOT_IN_THE_LOSS] = Field(
        "last", description="what the head reads: the last real token, the mean of all, or the first"
    )
    bias: Annotated[bool, _NOT_IN_THE_LOSS] = Field(
        False, description="a bias in the head; transformers' heads have none"
    )
    class_weights: Weighting | list[float] = Field(
        "auto",
        description="what a sample of each class counts; auto: sqrt_inverse where the largest class has more "
        "than twice the smallest",
    )
    normalise: Literal["samples", "weights"] = Field(
        "samples", description="what the weighted sum is divided by: the samples, or their weights"
    )
    oversample: bool = Field(False, description="repeat the samples of rarer classes, instead of weights")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over all classes")
    focal: float = Field(0.0, ge=0, description="focal loss: its gamma; what is known counts less")
    valid_share: Annotated[float, _NOT_IN_THE_LOSS] = Field(
        0.2,
        ge=0,
        le=0.5,
        description="held out of data.train, of each class alike, where data.valid is empty",
    )
    calibrate: Annotated[bool, _NOT_IN_THE_LOSS] = Field(
        False, description="after training, fit a temperature on the validation records into the head"
    )
    probe: Annotated[bool, _NOT_IN_THE_LOSS] = Field(
        True, description="also fit a linear classifier on the untrained model's features"
    )

    @property
    def names(self) -> list[str]:
        """The names of the classes; numbers where there are none."""
        return list(self.classes) if isinstance(self.classes, list) else [*map(str, range(self.classes))]

    @field_validator("classes")
    @classmethod
    def _different_classes(cls, classes: int | list[str]) -> int | list[str]:
        if isinstance(classes, list) and len(set(classes)) < len(classes):
            raise ValueError("two classes have the same name")
        return classes

    @model_validator(mode="after")
    def _fits_together(self) -> "ClassifyObjective":
        count = len(self.names)
        if count < (1 if self.multi_label else 2):
            raise ValueError("classes: there must be at least two, or one with multi_label")
        weights = self.class_weights
        if isinstance(weights, list) and (len(weights) != count or min(weights, default=0) <= 0):
            raise ValueError(f"class_weights: a list needs one number above 0 for each of {count} classes")
        if self.multi_label:
            for key, given in (
                ("oversample", self.oversample),
                ("normalise: weights", self.normalise == "weights"),
                ("class_weights: effective", weights == "effective"),
            ):
                if given:
                    raise ValueError(f"{key} is for one class a text, not for multi_label")
        if self.oversample and weights not in ("auto", "none"):
            raise ValueError("oversample and class_weights balance the same thing twice: choose one")
        return self
