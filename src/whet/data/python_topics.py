"""Half a megabyte of English that every Python brings along: the topics of its own help."""

import platform
from typing import Literal

from whet.errors import DataError

PYTHON = f"Python {platform.python_version()}"  # the text changes with it
_TRAIN_SHARE = 0.9


def python_topics(split: Literal["train", "valid"], n: int) -> list[dict[str, str]]:
    """The first 90% of the bytes as one text, or the last 10%."""
    from pydoc_data.topics import topics

    if n != 1:
        raise DataError(f"it is one text, not {n}")
    text = "\n".join(topics.values())
    boundary = len(text.encode()[: int(len(text.encode()) * _TRAIN_SHARE)].decode(errors="ignore"))
    return [{"text": text[:boundary] if split == "train" else text[boundary:]}]
