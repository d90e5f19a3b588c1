"""Stop strings: texts that end a completion, even if they start or end within a token."""

from collections.abc import Callable, Sequence
from typing import Any

from whet.data.tokens.tokenize import is_byte_token, special_tokens
from whet.errors import ConfigError
from whet.generation.engine import StopWatcher


def check_stops(stops: str | Sequence[str]) -> tuple[str, ...]:
    """Return one or several stop strings as a tuple; raise ConfigError if one is empty."""
    strings = (stops,) if isinstance(stops, str) else tuple(stops)
    if "" in strings:
        raise ConfigError("an empty stop string would end every completion at once: leave it out")
    return strings


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


def stop_watcher(tokenizer: Any, stops: Sequence[str]) -> StopWatcher:  # Any: a transformers tokenizer
    """Return a `watch` function for generation that ends a row when its text contains a stop string.

    The stop string remains in the row's text: remove it with `truncate_at_stop`.
    """
    stops = check_stops(stops)
    special = _special_ids(tokenizer, stops)

    def watch(_: int, tokens: list[int]) -> bool:
        text = decode(tokenizer, tokens)
        return tokens[-1] not in special and not any(stop in text for stop in stops)

    return watch


class TextStream:
    """Emits the text of a growing row piece by piece, and never emits a part of a stop string.

    Args:
        tokenizer: a transformers tokenizer.
        stops: the stop strings.
        on_text: called with each piece. None: nothing is emitted.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], on_text: Callable[[str], None] | None
    ) -> None:  # Any: a transformers tokenizer
        self.tokenizer, self.stops = tokenizer, check_stops(stops)
        self.on_text = on_text
        self._special = _special_ids(tokenizer, self.stops)
        self._emitted = 0  # characters

    def watch(self, _: int, tokens: list[int]) -> bool:
        """Emit the text that later tokens cannot change; return False when a stop string is complete.

        Pass it as the `watch` argument of generation.
        """
        text = decode(self.tokenizer, tokens)
        before_stop = truncate_at_stop(text, self.stops)
        # an incomplete character decodes to U+FFFD: wait for its remaining bytes
        final = self._without_trailing_bytes(before_stop, tokens).rstrip("\ufffd")
        self._emit(
            final[: len(final) - self._partial_stop_length(final)] if before_stop == text else before_stop
        )
        return before_stop == text and tokens[-1] not in self._special

    def finish(self, tokens: list[int]) -> str:
        """Emit the remaining text, and return the full text, truncated before the first stop string."""
        text = truncate_at_stop(decode(self.tokenizer, tokens), self.stops)
        self._emit(text)
        return text

    def _without_trailing_bytes(self, text: str, tokens: list[int]) -> str:
        """Return the text without byte tokens at its end: a further byte can change how they decode."""
        if self.on_text is None:
            return text
        count, name = len(tokens), self.tokenizer.convert_ids_to_tokens
        while count and is_byte_token(name(tokens[count - 1]) or ""):
            count -= 1
        return text if count == len(tokens) else decode(self.tokenizer, tokens[:count])

    def _partial_stop_length(self, text: str) -> int:
        """Return the number of characters at the end of the text that may start a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)

    def _emit(self, text: str) -> None:
        if self.on_text is not None and len(text) > self._emitted:
            self.on_text(text[self._emitted :])
            self._emitted = len(text)


def _special_ids(tokenizer: Any, stops: Sequence[str]) -> set[int]:  # Any: a transformers tokenizer
    """Return the ids of stop strings that are special tokens, because decoded text does not contain these."""
    ids = special_tokens(tokenizer) if stops and tokenizer is not None else {}
    return {ids[stop] for stop in stops if stop in ids}


def decode(tokenizer: Any, tokens: list[int]) -> str:  # Any: a transformers tokenizer
    """Return the text of tokens, without special tokens."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text
