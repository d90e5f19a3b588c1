"""Tokenize texts in batches, on the threads of the Rust tokenizer."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from whet.data.sources.source import Record
from whet.data.tokens.examples import Example
from whet.data.tokens.loss_mask import Supervise, token_weights, tokens_inside
from whet.data.tokens.rendering import RenderedPrompt, Rendering
from whet.error_boundary import hide_rust_panics, invalid_input_errors
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.data.tokens.long_texts import Tokens

MAX_WINDOW_CHARS = 2**20  # longer texts are tokenized in windows of this size
_IGNORED = -100  # the label of a token that is not supervised, as in PyTorch's cross-entropy


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, the expected answer, and their record, for evaluation by generation."""

    tokens: list[int]
    text: str  # the question as plain text
    answer: str
    origin: str
    group: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON values


@dataclass(frozen=True)
class PretokenizedRendering(Rendering):
    """The token ids of a record, with its loss mask, in place of a text."""

    ids: tuple[int, ...] = ()
    supervised: tuple[bool, ...] = ()

    def to_example(self) -> Example | DataError:
        """Return the ids as an example. No special token is added."""
        mask = np.array(self.supervised, dtype=bool)
        if not mask[1:].any():
            return DataError(
                f"{self.origin}: no token of this example is supervised",
                hint="it needs labels other than -100",
            )
        return Example(np.array(self.ids, dtype=np.uint32), mask, self.origin, self.values)


def render_tokens(record: Record, *, supervise: Supervise) -> PretokenizedRendering:
    """Return the ids of a `tokens` record; its labels are the loss mask, unless everything is supervised."""
    ids, labels = record.fields["input_ids"], record.fields["labels"]
    supervised = tuple(supervise == "all" or label != _IGNORED for label in labels)
    return PretokenizedRendering("", (), True, False, record.origin, ids=tuple(ids), supervised=supervised)


class Encoder:
    """Convert renderings to token ids and loss masks.

    All ids of training data are created by this class, so that BOS is never doubled and the mask is exact.
    """

    def __init__(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(
                "this tokenizer has no fast version, which is needed for the character offsets of tokens"
            )
        backend.no_truncation()  # tokenizer.json may enable both, but whet truncates and pads by itself
        backend.no_padding()
        self._backend = _without_trimmed_offsets(backend)
        self._eos: int | None = tokenizer.eos_token_id
        self._special_counts = _count_special_tokens(tokenizer)

    def encode(self, renderings: Sequence[Rendering]) -> list[Example | DataError]:
        """Return each text as an example, or the error that makes it unusable."""
        return self.to_examples(renderings, self.tokenize_batch(renderings))

    def to_examples(
        self, renderings: Sequence[Rendering], encodings: Sequence[Any]
    ) -> list[Example | DataError]:
        """Return the examples for the encodings that `tokenize_batch` returned."""
        return [
            rendering.to_example()
            if isinstance(rendering, PretokenizedRendering)
            else encoding
            if isinstance(encoding, DataError)
            else self._to_example(rendering, encoding)
            for rendering, encoding in zip(renderings, encodings, strict=True)
        ]

    def encode_one(self, rendering: Rendering) -> Example:
        """Return one text as an example with at least one supervised token."""
        [example] = self.encode([rendering])
        if isinstance(example, DataError):
            raise example
        return example

    def encode_question(self, prompt: RenderedPrompt) -> Question:
        """Return a prompt as ids, ready for generation."""
        [encoding] = self.tokenize_batch([prompt.prompt])
        if isinstance(encoding, DataError):
            raise encoding
        tokens, _, _ = self._ids_and_mask(prompt.prompt, encoding)
        return Question(tokens.tolist(), prompt.question, prompt.answer, prompt.prompt.origin, prompt.group)

    def tokenize_batch(self, renderings: Sequence[Rendering]) -> list[Any]:
        """Tokenize texts. Return an encoding or an error for each, and None for records that are tokenized.

        Most of the work is done here, without holding the GIL. Any: tokenizers' Encoding, or a DataError.
        """
        encodings: list[Any] = [None] * len(renderings)
        for is_plain in (False, True):
            indices = [
                index
                for index, rendering in enumerate(renderings)
                if rendering.is_plain is is_plain and not isinstance(rendering, PretokenizedRendering)
            ]
            batch = [renderings[index] for index in indices]
            for index, encoding in zip(indices, self._encode_batch(batch, special=is_plain), strict=True):
                encodings[index] = encoding
        return encodings

    def _encode_long(self, rendering: Rendering, *, special: bool) -> "Tokens | DataError":
        from whet.data.tokens.long_texts import encode_long

        def encode(text: str) -> Any:  # Any: tokenizers' Encoding
            return self._backend.encode(text, add_special_tokens=special)

        around = self._special_counts if special else (0, 0)
        try:
            with _tokenizing(f"{rendering.origin}: "):
                return encode_long(rendering.text, encode, around=around, origin=rendering.origin)
        except DataError as error:
            return error

    def _encode_batch(self, renderings: Sequence[Rendering], *, special: bool) -> list[Any]:
        # Any: tokenizers' Encoding
        if len(renderings) == 1 and len(renderings[0].text) > MAX_WINDOW_CHARS:
            return [self._encode_long(renderings[0], special=special)]
        if any(len(rendering.text) > MAX_WINDOW_CHARS for rendering in renderings):
            return [encoding for r in renderings for encoding in self._encode_batch([r], special=special)]
        fully_supervised = all(_is_fully_supervised(rendering) for rendering in renderings)
        # the fast version computes no offsets
        encode = self._backend.encode_batch_fast if fully_supervised else self._backend.encode_batch
        origin = renderings[0].origin if len(renderings) == 1 else ""
        try:
            with _tokenizing(origin and f"{origin}: "):
                encodings: list[Any] = encode([r.text for r in renderings], add_special_tokens=special)
        except DataError as error:  # for example a lone surrogate, or a regex that backtracks too much
            if len(renderings) == 1:
                return [error]
            return [encoding for r in renderings for encoding in self._encode_batch([r], special=special)]
        return encodings

    def _to_example(self, rendering: Rendering, encoding: Any) -> Example | DataError:
        # Any: tokenizers' Encoding
        if rendering.is_classification:
            return _classification_example(rendering, encoding.ids)
        tokens, mask, weights = self._ids_and_mask(rendering, encoding)
        if not mask[1:].any():
            return DataError(
                f"{rendering.origin}: no token of this example is supervised",
                hint="it needs an assistant message without weight: 0, a completion or text",
            )
        return Example(tokens, mask, rendering.origin, rendering.values, weights=weights)

    def _ids_and_mask(
        self, rendering: Rendering, encoding: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return ids, loss mask and, if the rendering has any, loss weights. Any: tokenizers' Encoding.

        A token is supervised if any of its characters is in a supervised span.
        """
        ids = encoding.ids
        front, back = self._special_counts if rendering.is_plain else (0, 0)
        size = _size_without_eos(ids, back, self._eos)  # whet adds the EOS itself
        back -= len(ids) - size
        eos = self._eos if rendering.is_plain and rendering.add_eos else None
        tokens = np.empty(size + 1, dtype=np.uint32)
        tokens[:size] = ids if size == len(ids) else ids[:size]
        mask = np.zeros(size + 1, dtype=bool)
        weights = None
        if _is_fully_supervised(rendering):
            mask[front : size - back] = True
        elif rendering.weights:
            weights = np.zeros(size + 1, dtype=np.float32)
            weights[:size] = token_weights(encoding.offsets[:size], rendering.spans, rendering.weights)
            mask = weights > 0
        else:
            mask[:size] = tokens_inside(encoding.offsets[:size], rendering.spans)
        has_eos = size > 0 and ids[size - 1] == eos and mask[size - 1]  # part of the text, and supervised
        if eos is not None and not has_eos:
            tokens[size], mask[size] = eos, True
            size += 1
        if rendering.weights and (weights is None or rendering.is_plain):  # plain text has one weight
            weights = mask * np.float32(rendering.weights[0])
        return tokens[:size], mask[:size], None if weights is None else weights[:size]


def encode_prompt_ids(tokenizer: Any, text: str) -> list[int]:  # Any: a transformers tokenizer
    """Return the ids of a text to be continued: with the tokenizer's BOS, without its EOS."""
    ids = tokenize(tokenizer, text, add_special_tokens=True)
    _, back = _count_special_tokens(tokenizer)
    return ids[: _size_without_eos(ids, back, tokenizer.eos_token_id)]


def tokenize(
    tokenizer: Any, text: str, *, add_special_tokens: bool
) -> list[int]:  # Any: a transformers tokenizer
    """Return the ids of a text, with or without the special tokens that the tokenizer adds."""
    with _tokenizing():
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


@contextlib.contextmanager
def _tokenizing(prefix: str = "") -> Iterator[None]:
    """Convert failures of the tokenizers library to errors. Its Rust code panics when a regex gives up."""
    hint = "change the text; if the tokenizer files are damaged, download the model again"
    with (
        hide_rust_panics(),
        invalid_input_errors(f"{prefix}the tokenizer cannot read this text", kind=DataError, hint=hint),
    ):
        yield


def _count_special_tokens(tokenizer: Any) -> tuple[int, int]:  # Any: a transformers tokenizer
    """Return how many special tokens a tokenizer adds before and after a text."""
    with _tokenizing():
        mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    if not mask:  # the tokenizer removed the whole text
        return 0, 0
    text_positions = [position for position, is_special in enumerate(mask) if not is_special] or [0]
    return text_positions[0], len(mask) - 1 - text_positions[-1]


def _size_without_eos(ids: Sequence[int], back: int, eos: int | None) -> int:
    """Return the number of ids without the EOS that the tokenizer added, if it did."""
    return len(ids) - back if back and list(ids[-back:]) == [eos] * back else len(ids)


def _without_trimmed_offsets(backend: Tokenizer) -> Tokenizer:
    """Return the same tokenizer with offsets that include the white space of a token."""
    post_processor = backend.post_processor
    if post_processor is None or b'"trim_offsets":true' not in post_processor.__getstate__():
        return backend
    settings = json.loads(backend.to_str())
    processor = settings["post_processor"]
    for part in processor.get("processors", [processor]):
        if "trim_offsets" in part:
            part["trim_offsets"] = False
    return Tokenizer.from_str(json.dumps(settings))


def _classification_example(rendering: Rendering, ids: Sequence[int]) -> Example | DataError:
    """Return all tokens of a text and one more.

    The last token of an example is only a target, which the model never reads.
    """
    if not len(ids):
        return DataError(f"{rendering.origin}: the text has no tokens, so it cannot be classified")
    tokens = np.append(np.asarray(ids, dtype=np.uint32), np.uint32(ids[-1]))
    return Example(tokens, np.ones(len(tokens), dtype=bool), rendering.origin, rendering.values)


def _is_fully_supervised(rendering: Rendering) -> bool:
    return list(rendering.spans) == [(0, len(rendering.text))]


def special_tokens(tokenizer: Any) -> dict[str, int]:  # Any: a transformers tokenizer
    """Return all special tokens and their ids, including those without a named role."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def token_bytes(tokenizer: Any, *, vocab_size: int) -> np.ndarray:  # Any: a transformers tokenizer
    """Return the bytes of text per token, [vocab_size]; special tokens have 0."""
    sizes = np.zeros(vocab_size, dtype=np.int64)
    special = {*tokenizer.all_special_ids, *special_tokens(tokenizer).values()}
    byte_level = "ByteLevel" in type(tokenizer.backend_tokenizer.decoder).__name__ or "ByteLevel" in str(
        tokenizer.backend_tokenizer.decoder
    )
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size and index not in special:
            sizes[index] = _byte_count(token, byte_level=byte_level)
    return sizes


def is_byte_token(token: str) -> bool:
    """Return whether a token is a byte fallback token such as `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_count(token: str, *, byte_level: bool) -> int:
    if byte_level:  # one character per byte
        return len(token)
    if is_byte_token(token):
        return 1
    return len(token.replace("\u2581", " ").encode())
