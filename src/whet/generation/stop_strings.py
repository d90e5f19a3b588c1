"""Stop strings: texts that end an answer, wherever tokens begin and end."""

from collections.abc import Callable, Sequence
from typing import Any

from whet.data.tokens.tokenize import is_byte, special_tokens
from whet.errors import ConfigError
from whet.generation.engine import StopWatcher


def check_stops(stops: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several, as a tuple."""
    found = (stops,) if isinstance(stops, str) else tuple(stops)
    if "" in found:
        raise ConfigError("an empty stop string would end every answer before it begins")
    return found


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def stop_watch(tokenizer: Any, stops: Sequence[str]) -> StopWatcher:  # Any: a transformers tokenizer
    """For `complete`: ends a row when its text has a stop string in it; `cut` then removes that."""
    stops = check_stops(stops)
    special = _special(tokenizer, stops)

    def watch(_: int, tokens: list[int]) -> bool:
        text = decoded(tokenizer, tokens)
        return tokens[-1] not in special and not any(stop in text for stop in stops)

    return watch


class TextStream:
    """Turns a growing row into pieces of text, and never shows a part of a stop string."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], on_text: Callable[[str], None] | None
    ) -> None:  # Any: a transformers tokenizer
        self.tokenizer, self.stops = tokenizer, check_stops(stops)
        self.on_text = on_text
        self._special = _special(tokenizer, self.stops)
        self._shown = 0

    def watch(self, _: int, tokens: list[int]) -> bool:
        """For `complete`: show what is certain; False when a stop string is complete."""
        text = decoded(self.tokenizer, tokens)
        before = cut(text, self.stops)
        # an unfinished character decodes to U+FFFD: wait for its other bytes
        certain = self._settled(before, tokens).rstrip("\ufffd")
        self._show(certain[: len(certain) - self._possible_start(certain)] if before == text else before)
        return before == text and tokens[-1] not in self._special

    def finish(self, tokens: list[int]) -> str:
        """Show the rest; returns the whole answer."""
        text = cut(decoded(self.tokenizer, tokens), self.stops)
        self._show(text)
        return text

    def _settled(self, text: str, tokens: list[int]) -> str:
        """The text without what bytes make of it at its end: a tokenizer reads all bytes in a row at once."""
        if self.on_text is None:
            return text
        settled, name = len(tokens), self.tokenizer.convert_ids_to_tokens
        while settled and is_byte(name(tokens[settled - 1]) or ""):
            settled -= 1
        return text if settled == len(tokens) else decoded(self.tokenizer, tokens[:settled])

    def _possible_start(self, text: str) -> int:
        """How many characters at the end of the text may be the start of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)

    def _show(self, text: str) -> None:
        if self.on_text is not None and len(text) > self._shown:
            self.on_text(text[self._shown :])
            self._shown = len(text)


def _special(tokenizer: Any, stops: Sequence[str]) -> set[int]:  # Any: a transformers tokenizer
    """The special tokens among stop strings: no text has them."""
    known = special_tokens(tokenizer) if stops and tokenizer is not None else {}
    return {known[stop] for stop in stops if stop in known}


def decoded(tokenizer: Any, tokens: list[int]) -> str:  # Any: a transformers tokenizer
    """The text of tokens, special ones left out."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text
