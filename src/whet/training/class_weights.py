"""What is kept beside a trained head: the weights of its classes, and the temperature it was divided by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.adapters.classifier_files import StoredHead
from whet.config.classify import ClassifyObjective
from whet.errors import ModelError
from whet.models.weights import read_json
from whet.storage import write_json

CLASS_WEIGHTS = "class_weights.json"
CALIBRATION = "calibration.json"


@dataclass(frozen=True)
class WeightedHead(StoredHead):
    """A head, what each of its classes counted when it was trained, and how it was calibrated."""

    class_weights: list[float]
    calibration: dict[str, float] | None = None

    def write(self, directory: Path) -> None:
        """Write the head's files, the weights by the names of the classes, and the temperature if any."""
        super().write(directory)
        write_json(directory / CLASS_WEIGHTS, dict(zip(self.info.classes, self.class_weights, strict=True)))
        if self.calibration is not None:
            write_json(directory / CALIBRATION, self.calibration)


def read_class_weights(directory: Path, classes: list[str]) -> list[float] | None:
    """What each class counted; None where it was not kept."""
    path = directory / CLASS_WEIGHTS
    if not path.is_file():
        return None
    found = read_json(path)
    good = all(type(weight) in (int, float) and weight > 0 for weight in found.values())
    if set(found) != set(classes) or not good:
        raise ModelError(f"{path} does not hold a number above 0 for each of {len(classes)} classes")
    return [float(found[name]) for name in classes]


def read_calibration(directory: Path) -> dict[str, Any] | None:  # Any: JSON values
    """The temperature that a head was divided by; None where it was not calibrated."""
    path = directory / CALIBRATION
    return read_json(path) if path.is_file() else None


def are_counted(section: ClassifyObjective) -> bool:
    """Whether the weights are those of a training set, and so not to be told from the config alone."""
    if section.class_weights == "auto":
        return not (section.multi_label or section.oversample)
    return section.class_weights in ("inverse", "sqrt_inverse", "effective")
