"""Built-in tokenizers: bytes, characters, and byte-level BPE trained on a corpus."""

from collections.abc import Iterable, Iterator
from typing import Any

from whet.errors import ConfigError, DataError

END = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
_KINDS = "bytes; chars; bpe:N for a byte-level BPE with N tokens"


def is_builtin_tokenizer(spec: str) -> bool:
    """Whether a tokenizer spec names a built-in tokenizer, not the tokenizer of a model."""
    return spec in ("bytes", "chars") or spec.startswith("bpe:")


def make_tokenizer(spec: str, texts: Iterable[str]) -> Any:  # Any: a transformers tokenizer
    """Return the tokenizer of a spec: `bytes`, `chars` or `bpe:N`. The last two are built from the texts.

    Raises:
        ConfigError: The spec names no built-in tokenizer, or N is too small.
        DataError: There is no text to build the tokenizer from.
    """
    match spec.split(":"):
        case ["bytes"]:
            return byte_tokenizer()
        case ["chars"]:
            return char_tokenizer(texts)
        case ["bpe", size] if size.isdecimal():
            return train_bpe(texts, vocab_size=int(size))
    raise ConfigError(f"{spec!r} is not a built-in tokenizer", hint=f"known: {_KINDS}")


def byte_tokenizer() -> Any:  # Any: a transformers tokenizer
    """Return a tokenizer with 256 tokens, whose ids are the byte values, and no special tokens."""
    from tokenizers import models, pre_tokenizers

    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = _byte_level_tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _to_transformers(tokenizer)


def char_tokenizer(texts: Iterable[str]) -> Any:  # Any: a transformers tokenizer
    """Return a tokenizer with one token per character of the texts, by code point, and an unknown token."""
    from tokenizers import Tokenizer, decoders, models

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise DataError("a character tokenizer needs text to collect characters from, but there is none")
    tokens = [END, UNKNOWN, *sorted(characters)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, UNKNOWN])
    return _to_transformers(tokenizer, eos_token=END, unk_token=UNKNOWN)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Any:  # Any: a transformers tokenizer
    """Train a byte-level BPE tokenizer, which can encode every text without loss."""
    from tokenizers import models, pre_tokenizers, trainers

    smallest = 256 + 1
    if vocab_size < smallest:
        raise ConfigError(
            f"a byte-level BPE cannot have only {vocab_size} tokens",
            hint=f"the bytes and the end-of-text token alone need {smallest}",
        )
    tokenizer = _byte_level_tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_require_text(texts), trainer)
    return _to_transformers(tokenizer, eos_token=END)


def _require_text(texts: Iterable[str]) -> Iterator[str]:
    has_text = False
    for text in texts:
        has_text = has_text or bool(text)
        yield text
    if not has_text:
        raise DataError("a tokenizer needs text to be trained on, but there is none")


def _byte_level_tokenizer(model: Any) -> Any:  # Any: tokenizers ships no types
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _to_transformers(tokenizer: Any, **special: str) -> Any:  # Any: tokenizers and transformers ship no types
    from transformers import PreTrainedTokenizerFast

    # no clean-up, so decoding returns exactly the encoded text
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def _byte_alphabet() -> list[str]:
    """Return the printable character that represents each byte in byte-level tokenizers, in byte order.

    In GPT-2's convention, printable bytes represent themselves, and the others use code points from 256.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]
