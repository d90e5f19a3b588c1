"""Placeholders for Python objects in a config: `python:NAME:HASH` stands for one passed to `whet.train`."""

import re
from typing import NamedTuple

HASH_DIGITS = 16
_PATTERN = re.compile(rf"python:([A-Za-z0-9_.-]+)(?::([0-9a-f]{{{HASH_DIGITS}}}))?")


class Placeholder(NamedTuple):
    """The name of an object and the first digits of its SHA-256; None accepts any object of that name."""

    name: str
    digest: str | None

    def __str__(self) -> str:
        return f"python:{self.name}" + (f":{self.digest}" if self.digest else "")


def parse_placeholder(text: object) -> Placeholder | None:
    """Parse `python:NAME` or `python:NAME:HASH`; return None for any other value."""
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    return Placeholder(match[1], match[2]) if match else None


def make_placeholder(name: str, digest: str) -> str:
    """Return the placeholder text for an object with this name and SHA-256."""
    return str(Placeholder(name, digest[:HASH_DIGITS]))


def is_object_name(name: object) -> bool:
    """Return whether this is a valid name for a placeholder."""
    return parse_placeholder(f"python:{name}") == Placeholder(str(name), None)
