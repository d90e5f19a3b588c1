"""Python objects in a config: the text `python:NAME:HASH` stands for one that is passed to `whet.train`."""

import re
from typing import NamedTuple

HASH_DIGITS = 16
_FORM = re.compile(rf"python:([A-Za-z0-9_.-]+)(?::([0-9a-f]{{{HASH_DIGITS}}}))?")


class Placeholder(NamedTuple):
    """The name of an object, and the start of its SHA-256; None where any object of that name will do."""

    name: str
    digest: str | None

    def __str__(self) -> str:
        return f"python:{self.name}" + (f":{self.digest}" if self.digest else "")


def parse_placeholder(text: object) -> Placeholder | None:
    """Return what `python:NAME` or `python:NAME:HASH` names; None for any other value."""
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    return Placeholder(match[1], match[2]) if match else None


def make_placeholder(name: str, digest: str) -> str:
    """Return the text for an object with this name and SHA-256."""
    return str(Placeholder(name, digest[:HASH_DIGITS]))


def is_object_name(name: object) -> bool:
    """Return whether a placeholder can carry this name."""
    return parse_placeholder(f"python:{name}") == Placeholder(str(name), None)
