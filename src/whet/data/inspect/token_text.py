"""Tokens as a person can read them: special ones and white space visible, nothing a terminal would obey."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # control codes, marks that turn the text around, halves
_LONGEST_CHARACTER = 4  # tokens: no character has more bytes


@dataclass(frozen=True)
class Piece:
    """A token, or the tokens that make one character."""

    text: str
    ids: tuple[int, ...]
    supervised: bool
    special: bool = False


def visible(text: str) -> str:
    """The text on one line, with a sign for every character that cannot be seen."""
    return "".join(map(_sign, text))


def _sign(character: str) -> str:
    if character == "\n":
        return "↵"
    if character == "\t":
        return "⇥"
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


class TokenText:
    """Shows the tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}

    def name(self, token: int) -> str:
        """A special token's name, in brackets of its own: nothing in a text looks like it."""
        name = visible(str(self._tokenizer.convert_ids_to_tokens(token)))
        return f"⟨{name[1:-1] if name.startswith('<') and name.endswith('>') else name}⟩"

    def pieces(self, tokens: Sequence[int], supervised: Sequence[bool]) -> tuple[Piece, ...]:
        """Each token, or the few that make a character, with its mark."""
        found: list[Piece] = []
        waiting: list[int] = []
        before: list[int] = []  # spaces in front of a word depend on what stands before it
        for place, (token, mark) in enumerate(zip(tokens, supervised, strict=True)):
            if token in self._special:
                found.append(Piece(self.name(token), (token,), mark, special=True))
                before = [token]
                continue
            waiting.append(token)
            text = self._text(before, waiting)
            after = place + 1
            goes_on = (
                text.endswith("\ufffd")
                and len(waiting) < _LONGEST_CHARACTER
                and after < len(tokens)
                and tokens[after] not in self._special
                and supervised[after] == mark
            )
            if not goes_on:
                found.append(Piece(_spaced(text), tuple(waiting), mark))
                before, waiting = waiting[-1:], []
        return tuple(found)

    def _text(self, before: list[int], tokens: list[int]) -> str:
        front, both = self._decode(before), self._decode([*before, *tokens])
        return both.removeprefix(front) if both.startswith(front) else self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False) if tokens else ""
        return text


def _spaced(text: str) -> str:
    """White space that would be overlooked gets a sign; a line ends where it ended."""
    shown = visible(text).replace("↵", "↵\n") if "\n" in text else visible(text)
    return shown.replace(" ", "·") if text.isspace() and text != " " else shown
