"""From text to token ids, many texts at once, on the threads of the Rust tokenizer."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from whet.data.tokens.chat_template import AskedRendering, Rendering
from whet.data.tokens.examples import Example
from whet.data.tokens.long_texts import LONG, Tokens, encode_long
from whet.data.tokens.loss_mask import tokens_inside
from whet.error_boundary import panics_hidden, wrong_input
from whet.errors import DataError


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, the answer expected and the record of both, for answers by generation."""

    tokens: list[int]
    text: str  # what a person would say was asked
    answer: str
    origin: str
    group: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON values


class Encoder:
    """Makes ids in one place, so that no BOS is doubled and every mark is exact."""

    def __init__(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(
                "this tokenizer has no fast version, which tells where each token stands in the text"
            )
        backend.no_truncation()  # a tokenizer.json may ask for both: whet cuts and pads itself
        backend.no_padding()
        self._backend = _untrimmed(backend)
        self._eos: int | None = tokenizer.eos_token_id
        self._around = _around(tokenizer)

    def encode(self, renderings: Sequence[Rendering]) -> list[Example | DataError]:
        """Each text as an example, or what is wrong with it."""
        return self.examples(renderings, self.encodings(renderings))

    def examples(
        self, renderings: Sequence[Rendering], encodings: Sequence[Any]
    ) -> list[Example | DataError]:
        """The same, from what `encodings` returned."""
        return [
            encoding if isinstance(encoding, DataError) else self._example(rendering, encoding)
            for rendering, encoding in zip(renderings, encodings, strict=True)
        ]

    def example(self, rendering: Rendering) -> Example:
        """One text as an example that has something to learn."""
        [found] = self.encode([rendering])
        if isinstance(found, DataError):
            raise found
        return found

    def question(self, asked: AskedRendering) -> Question:
        """A prompt as ids, ready to be continued."""
        [encoding] = self.encodings([asked.prompt])
        if isinstance(encoding, DataError):
            raise encoding
        tokens, _ = self._tokens(asked.prompt, encoding)
        return Question(tokens.tolist(), asked.asked, asked.answer, asked.prompt.origin, asked.group)

    def encodings(self, renderings: Sequence[Rendering]) -> list[Any]:
        """What the tokenizer makes of each text, or an error: most of the work, done without Python's lock.

        Any: tokenizers' Encoding, or a DataError.
        """
        found: list[Any] = [None] * len(renderings)
        for plain in (False, True):
            places = [place for place, rendering in enumerate(renderings) if rendering.plain is plain]
            chosen = [renderings[place] for place in places]
            for place, encoding in zip(places, self._batch(chosen, special=plain), strict=True):
                found[place] = encoding
        return found

    def _long(self, rendering: Rendering, *, special: bool) -> Tokens | DataError:
        def encode(text: str) -> Any:  # Any: tokenizers' Encoding
            return self._backend.encode(text, add_special_tokens=special)

        around = self._around if special else (0, 0)
        try:
            with _tokenizing(f"{rendering.origin}: "):
                return encode_long(rendering.text, encode, around=around, origin=rendering.origin)
        except DataError as error:
            return error

    def _batch(self, renderings: Sequence[Rendering], *, special: bool) -> list[Any]:  # Any: as above
        if len(renderings) == 1 and len(renderings[0].text) > LONG:
            return [self._long(renderings[0], special=special)]
        if any(len(rendering.text) > LONG for rendering in renderings):
            return [encoding for r in renderings for encoding in self._batch([r], special=special)]
        whole = all(_whole(rendering) for rendering in renderings)
        encode = self._backend.encode_batch_fast if whole else self._backend.encode_batch  # without offsets
        origin = renderings[0].origin if len(renderings) == 1 else ""
        try:
            with _tokenizing(origin and f"{origin}: "):
                encodings: list[Any] = encode([r.text for r in renderings], add_special_tokens=special)
        except DataError as error:  # half of a surrogate pair, say, or an expression that backtracks
            if len(renderings) == 1:
                return [error]
            return [encoding for r in renderings for encoding in self._batch([r], special=special)]
        return encodings

    def _example(self, rendering: Rendering, encoding: Any) -> Example | DataError:  # Any: as above
        if rendering.judged:
            return _judged_example(rendering, encoding.ids)
        tokens, marks = self._tokens(rendering, encoding)
        if not marks[1:].any():
            return DataError(
                f"{rendering.origin}: no token of this example is supervised",
                hint="it needs an assistant message without weight: 0, a completion or a text",
            )
        return Example(tokens, marks, rendering.origin, rendering.values)

    def _tokens(self, rendering: Rendering, encoding: Any) -> tuple[np.ndarray, np.ndarray]:  # Any: as above
        """Ids and marks; a token is learned when any of its characters lies in a learned span."""
        ids = encoding.ids
        front, back = self._around if rendering.plain else (0, 0)
        size = _open_size(ids, back, self._eos)  # whet writes an EOS where a text has ended
        back -= len(ids) - size
        eos = self._eos if rendering.plain and rendering.ended else None
        tokens = np.empty(size + 1, dtype=np.uint32)
        tokens[:size] = ids if size == len(ids) else ids[:size]
        marks = np.zeros(size + 1, dtype=bool)
        if _whole(rendering):
            marks[front : size - back] = True
        else:
            marks[:size] = tokens_inside(encoding.offsets[:size], rendering.spans)
        has_eos = size > 0 and ids[size - 1] == eos and marks[size - 1]  # the text's own, and learned
        if eos is not None and not has_eos:
            tokens[size], marks[size] = eos, True
            size += 1
        return tokens[:size], marks[:size]


def open_ids(tokenizer: Any, text: str) -> list[int]:  # Any: a transformers tokenizer
    """The ids of a text that goes on: with the tokenizer's BOS, without its EOS."""
    ids = tokenize(tokenizer, text, special=True)
    _, back = _around(tokenizer)
    return ids[: _open_size(ids, back, tokenizer.eos_token_id)]


def tokenize(tokenizer: Any, text: str, *, special: bool) -> list[int]:  # Any: a transformers tokenizer
    """Return the ids of a text, with or without the special tokens around it."""
    with _tokenizing():
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])


@contextlib.contextmanager
def _tokenizing(prefix: str = "") -> Iterator[None]:
    """Turn a failure of the tokenizers library into an error; its Rust code panics where a regex gives up."""
    hint = "change the text; or the tokenizer is damaged: copy the files of the model again"
    with (
        panics_hidden(),
        wrong_input(f"{prefix}the tokenizer cannot read this text", kind=DataError, hint=hint),
    ):
        yield


def _around(tokenizer: Any) -> tuple[int, int]:  # Any: a transformers tokenizer
    """How many special tokens a tokenizer puts before and after a text of its own accord."""
    with _tokenizing():
        mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    if not mask:  # nothing is around a text of which nothing is left
        return 0, 0
    text = [place for place, special in enumerate(mask) if not special] or [0]
    return text[0], len(mask) - 1 - text[-1]


def _open_size(ids: Sequence[int], back: int, eos: int | None) -> int:
    """How many ids there are before the EOS that the tokenizer wrote of its own accord, if it did."""
    return len(ids) - back if back and list(ids[-back:]) == [eos] * back else len(ids)


def _untrimmed(backend: Tokenizer) -> Tokenizer:
    """The same tokenizer, in which a token stands where all its characters are, white space included."""
    found = backend.post_processor
    if found is None or b'"trim_offsets":true' not in found.__getstate__():
        return backend
    settings = json.loads(backend.to_str())
    whole = settings["post_processor"]
    for part in whole.get("processors", [whole]):
        if "trim_offsets" in part:
            part["trim_offsets"] = False
    return Tokenizer.from_str(json.dumps(settings))


def _judged_example(rendering: Rendering, ids: Sequence[int]) -> Example | DataError:
    """All tokens of a text, and one more: an example's last token is only ever a target, and never read."""
    if not len(ids):
        return DataError(f"{rendering.origin}: a text without a token cannot be classified")
    tokens = np.append(np.asarray(ids, dtype=np.uint32), np.uint32(ids[-1]))
    return Example(tokens, np.ones(len(tokens), dtype=bool), rendering.origin, rendering.values)


def _whole(rendering: Rendering) -> bool:
    return list(rendering.spans) == [(0, len(rendering.text))]


def special_tokens(tokenizer: Any) -> dict[str, int]:  # Any: a transformers tokenizer
    """The tokens that are no text, those without a role of their own too, and their ids."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def token_bytes(tokenizer: Any, *, vocab_size: int) -> np.ndarray:  # Any: a transformers tokenizer
    """[vocab_size] how many bytes of text each token stands for; special ones for none."""
    sizes = np.zeros(vocab_size, dtype=np.int64)
    special = {*tokenizer.all_special_ids, *special_tokens(tokenizer).values()}
    byte_level = "ByteLevel" in type(tokenizer.backend_tokenizer.decoder).__name__ or "ByteLevel" in str(
        tokenizer.backend_tokenizer.decoder
    )
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size and index not in special:
            sizes[index] = _size(token, byte_level=byte_level)
    return sizes


def is_byte(token: str) -> bool:
    """Whether a token is one byte, of a tokenizer that has no token for its character."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _size(token: str, *, byte_level: bool) -> int:
    if byte_level:  # a character stands for a byte
        return len(token)
    if is_byte(token):
        return 1
    return len(token.replace("\u2581", " ").encode())
