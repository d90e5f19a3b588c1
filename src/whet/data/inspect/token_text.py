"""Display tokens as readable text, with visible special tokens and white space and no control characters."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_INVISIBLE = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Zl",
    "Zp",
}  # control and format characters, surrogates, private use, line separators
_MAX_TOKENS_PER_CHARACTER = 4  # a UTF-8 character has at most 4 bytes


@dataclass(frozen=True)
class Piece:
    """A token, or several tokens that form one character."""

    text: str
    ids: tuple[int, ...]
    supervised: bool
    special: bool = False
    weight: float = 1.0  # loss weight, if supervised


def to_visible_text(text: str) -> str:
    """Return the text on one line, with a symbol for every invisible character."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character == "\n":
        return "↵"
    if character == "\t":
        return "⇥"
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


class TokenText:
    """Display the tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}

    def special_token_name(self, token: int) -> str:
        """Return the name of a special token in angle brackets (⟨⟩), which hardly ever occur in text."""
        name = to_visible_text(str(self._tokenizer.convert_ids_to_tokens(token)))
        return f"⟨{name[1:-1] if name.startswith('<') and name.endswith('>') else name}⟩"

    def pieces(
        self, tokens: Sequence[int], supervised: Sequence[bool], weights: Sequence[float] | None = None
    ) -> tuple[Piece, ...]:
        """Return each token, or the tokens of one character, with its supervision mark and weight."""
        if weights is None:
            weights = [1.0] * len(tokens)
        pieces: list[Piece] = []
        pending: list[int] = []
        context: list[int] = []  # leading spaces depend on the previous token
        for index, (token, is_supervised, weight) in enumerate(zip(tokens, supervised, weights, strict=True)):
            if token in self._special:
                pieces.append(Piece(self.special_token_name(token), (token,), is_supervised, True, weight))
                context = [token]
                continue
            pending.append(token)
            text = self._text(context, pending)
            next_index = index + 1
            continues = (
                text.endswith("\ufffd")
                and len(pending) < _MAX_TOKENS_PER_CHARACTER
                and next_index < len(tokens)
                and tokens[next_index] not in self._special
                and (supervised[next_index], weights[next_index]) == (is_supervised, weight)
            )
            if not continues:
                pieces.append(Piece(_show_white_space(text), tuple(pending), is_supervised, weight=weight))
                context, pending = pending[-1:], []
        return tuple(pieces)

    def _text(self, context: list[int], tokens: list[int]) -> str:
        prefix, full = self._decode(context), self._decode([*context, *tokens])
        return full.removeprefix(prefix) if full.startswith(prefix) else self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False) if tokens else ""
        return text


def _show_white_space(text: str) -> str:
    """Make white space visible that would be overlooked. Line breaks are kept after their symbol."""
    shown = to_visible_text(text).replace("↵", "↵\n") if "\n" in text else to_visible_text(text)
    return shown.replace(" ", "·") if text.isspace() and text != " " else shown
