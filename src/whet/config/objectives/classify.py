"""Config keys of classification (objective.kind: classify)."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.section import KeyInfo, ObjectiveSection, Positive, Text

Pooling = Literal["last", "mean", "first"]
Weighting = Literal["auto", "none", "inverse", "sqrt_inverse", "effective"]
_NOT_IN_THE_LOSS = KeyInfo(changes_loss=False)


class ClassifyObjective(ObjectiveSection):
    """Classification: a head on the model predicts one class per text, or several."""

    default_targets = "qv"
    output = "class"
    sequence_level_kinds = ("classify",)

    kind: Literal["classify"] = Field(
        description="classification of records {input, label} or {input, labels}"
    )
    classes: Positive | list[Text] = Field(description="class names, or the number of classes")
    multi_label: bool = Field(False, description="a text can have several classes, or none")
    pooling: Annotated[Pooling, _NOT_IN_THE_LOSS] = Field(
        "last",
        description="head input: hidden state of the last non-padding token, mean of all, or the first",
    )
    bias: Annotated[bool, _NOT_IN_THE_LOSS] = Field(
        False, description="add a bias to the head; transformers' heads have none"
    )
    class_weights: Weighting | list[float] = Field(
        "auto",
        description="loss weight of each class: a scheme or one number per class; auto: sqrt_inverse if the "
        "largest class has more than twice the examples of the smallest",
    )
    normalise: Literal["samples", "weights"] = Field(
        "samples",
        description="divide the weighted loss by the number of samples, or by the sum of their weights",
    )
    oversample: bool = Field(False, description="repeat examples of rare classes instead of weighting them")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="label smoothing: target probability spread over all classes; 0: off"
    )
    focal: float = Field(
        0.0, ge=0, description="gamma of the focal loss, which down-weights easy examples; 0: off"
    )
    valid_share: Annotated[float, _NOT_IN_THE_LOSS] = Field(
        0.2,
        ge=0,
        le=0.5,
        description="fraction of each class held out of data.train for validation if data.valid is not set",
    )
    calibrate: Annotated[bool, _NOT_IN_THE_LOSS] = Field(
        False,
        description="fit a temperature on the validation records after training and fold it into the head",
    )
    probe: Annotated[bool, _NOT_IN_THE_LOSS] = Field(
        True,
        description="also fit a linear probe on the features of the model before training, as a baseline",
    )

    @property
    def names(self) -> list[str]:
        """The class names, or "0", "1", ... if only their number is given."""
        return list(self.classes) if isinstance(self.classes, list) else [*map(str, range(self.classes))]

    @field_validator("classes")
    @classmethod
    def _check_unique(cls, classes: int | list[str]) -> int | list[str]:
        if isinstance(classes, list) and len(set(classes)) < len(classes):
            raise ValueError("two classes have the same name")
        return classes

    @model_validator(mode="after")
    def _check_consistent(self) -> "ClassifyObjective":
        count = len(self.names)
        if count < (1 if self.multi_label else 2):
            raise ValueError("classes: at least two are needed, or one with multi_label")
        weights = self.class_weights
        if isinstance(weights, list) and (len(weights) != count or min(weights, default=0) <= 0):
            raise ValueError(
                f"class_weights: the list needs one number above 0 for each of the {count} classes"
            )
        if self.multi_label:
            for key, is_set in (
                ("oversample", self.oversample),
                ("normalise: weights", self.normalise == "weights"),
                ("class_weights: effective", weights == "effective"),
            ):
                if is_set:
                    raise ValueError(f"{key} cannot be combined with multi_label")
        if self.oversample and weights not in ("auto", "none"):
            raise ValueError("oversample and class_weights both balance the classes: set only one of them")
        return self
