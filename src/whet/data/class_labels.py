"""What class, or which classes, a record says it belongs to: numbers for the head."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from whet.errors import DataError

_BOOLEANS = {"True", "False"}  # the names of classes that YAML took for truth values


class Labels:
    """The classes of a task, by name and by number."""

    def __init__(self, names: Sequence[str], *, multi_label: bool = False) -> None:
        self.names = list(names)
        self.multi_label = multi_label
        self._places = {name: place for place, name in enumerate(self.names)}

    def values(self, fields: dict[str, Any]) -> tuple[float, ...]:  # Any: JSON values
        """The index of the class; with `multi_label` a target from 0 to 1 for each class."""
        if self.multi_label:
            given = fields["labels"] if "labels" in fields else [fields["label"]]
            return self._marks(given)
        if "label" not in fields:
            raise DataError(
                "a record with labels, and one class is asked for",
                hint="set objective.multi_label: true, or give it a label",
            )
        return (float(self._place(fields["label"])),)

    def _marks(self, labels: Sequence[Any]) -> tuple[float, ...]:  # Any: JSON values
        """A number from 0 to 1 for each class is its target; anything else is a list of classes."""
        count = len(self.names)
        if len(labels) != count and any(is_fraction(each) for each in labels):
            raise DataError(
                f"{len(labels)} soft labels, and there are {count} classes",
                hint="soft labels are one number from 0 to 1 for each of objective.classes, in that order",
            )
        if len(labels) == count and all(not isinstance(each, str) and 0 <= each <= 1 for each in labels):
            return tuple(float(each) for each in labels)
        chosen = {self._place(label) for label in labels}
        return tuple(float(place in chosen) for place in range(count))

    def _place(self, label: Any) -> int:  # Any: a JSON value
        """The class of this name; a number that is no name counts from 0."""
        count, name = len(self.names), str(label)
        if isinstance(label, float) and name not in self._places and not is_fraction(label):
            label = int(label)  # tables whose columns have gaps hold 1.0 for 1
            name = str(label)
        for each in (name, name.lower()) if isinstance(label, bool) else (name,):
            if each in self._places:
                return self._places[each]
        if isinstance(label, bool) and count != 2:
            raise DataError(
                f"label {label} is none of objective.classes", hint="a truth value can only mean one of two"
            )
        if isinstance(label, str):
            near = get_close_matches(label, self.names, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            shown = ", ".join([*self.names[:20], *(["..."] if count > 20 else [])])
            quotes = "" if _BOOLEANS.isdisjoint(self.names) else "; YAML reads yes and no so: quote them"
            raise DataError(
                f"label {label[:50]!r} is none of objective.classes", hint=f"{meant}they are: {shown}{quotes}"
            )
        if is_fraction(label):
            raise DataError(f"label {label} is not a class: a class is a name or a whole number")
        if not 0 <= label < count:
            raise DataError(
                f"label {label} is out of range: there are {count} classes, 0 to {count - 1}",
                hint="list or count all of them in objective.classes",
            )
        return int(label)


def is_fraction(label: Any) -> bool:  # Any: a JSON value
    """Whether a label is a number, and not a whole one."""
    return isinstance(label, float) and not (math.isfinite(label) and label.is_integer())
