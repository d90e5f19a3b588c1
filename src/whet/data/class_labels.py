"""Convert the labels of records to class indices or multi-label targets."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from whet.errors import DataError

_BOOLEANS = {"True", "False"}  # class names that YAML parsed as booleans


class ClassLabels:
    """The classes of a classification task, by name and by index."""

    def __init__(self, names: Sequence[str], *, multi_label: bool = False) -> None:
        self.names = list(names)
        self.multi_label = multi_label
        self._indices = {name: index for index, name in enumerate(self.names)}

    def label_values(self, fields: dict[str, Any]) -> tuple[float, ...]:  # Any: JSON values
        """Return the class index, or with `multi_label` a target from 0 to 1 for each class."""
        if self.multi_label:
            labels = fields["labels"] if "labels" in fields else [fields["label"]]
            return self._targets(labels)
        if "label" not in fields:
            raise DataError(
                "the record has labels, but the objective expects a single label",
                hint="set objective.multi_label: true, or use the field label",
            )
        return (float(self._class_index(fields["label"])),)

    def _targets(self, labels: Sequence[Any]) -> tuple[float, ...]:  # Any: JSON values
        """Return one target per class: the labels themselves if they are soft labels, else 0 or 1."""
        count = len(self.names)
        if len(labels) != count and any(is_fraction(label) for label in labels):
            raise DataError(
                f"the record has {len(labels)} soft labels, but there are {count} classes",
                hint="write one number from 0 to 1 per class, in the order of objective.classes",
            )
        if len(labels) == count and all(not isinstance(label, str) and 0 <= label <= 1 for label in labels):
            return tuple(float(label) for label in labels)
        selected = {self._class_index(label) for label in labels}
        return tuple(float(index in selected) for index in range(count))

    def _class_index(self, label: Any) -> int:  # Any: a JSON value
        """Return the index of a class, given by name or, if no class has this name, by index."""
        count, name = len(self.names), str(label)
        if isinstance(label, float) and name not in self._indices and not is_fraction(label):
            label = int(label)  # tables with missing values store 1 as 1.0
            name = str(label)
        for candidate in (name, name.lower()) if isinstance(label, bool) else (name,):
            if candidate in self._indices:
                return self._indices[candidate]
        if isinstance(label, bool) and count != 2:
            raise DataError(
                f"label {label} is not in objective.classes", hint="a boolean label needs exactly two classes"
            )
        if isinstance(label, str):
            similar = get_close_matches(label, self.names, n=1)
            suggestion = f"did you mean {similar[0]!r}? " if similar else ""
            names = ", ".join([*self.names[:20], *(["..."] if count > 20 else [])])
            quote_hint = (
                ""
                if _BOOLEANS.isdisjoint(self.names)
                else "; YAML parses yes and no as booleans, so quote them"
            )
            raise DataError(
                f"label {label[:50]!r} is not in objective.classes",
                hint=f"{suggestion}classes: {names}{quote_hint}",
            )
        if is_fraction(label):
            raise DataError(f"label {label} is not a class: use a class name or an integer")
        if not 0 <= label < count:
            raise DataError(
                f"label {label} is out of range: the {count} classes are 0 to {count - 1}",
                hint="list all classes, or their number, in objective.classes",
            )
        return int(label)


def is_fraction(label: Any) -> bool:  # Any: a JSON value
    """Return whether a label is a number that is not an integer."""
    return isinstance(label, float) and not (math.isfinite(label) and label.is_integer())
