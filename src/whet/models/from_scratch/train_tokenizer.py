"""Tokenizers that whet makes itself: bytes, characters, and byte-level BPE trained on a corpus."""

from collections.abc import Iterable, Iterator
from typing import Any

from whet.errors import ConfigError, DataError

END = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
_KINDS = "bytes; chars; bpe:N for a byte-level BPE of N tokens"


def is_homemade(spec: str) -> bool:
    """Whether a tokenizer's name means one that is made here, and not a model's."""
    return spec in ("bytes", "chars") or spec.startswith("bpe:")


def make_tokenizer(spec: str, texts: Iterable[str]) -> Any:  # Any: a transformers tokenizer
    """The tokenizer that `bytes`, `chars` or `bpe:N` names; the last two learn from the texts."""
    match spec.split(":"):
        case ["bytes"]:
            return byte_tokenizer()
        case ["chars"]:
            return char_tokenizer(texts)
        case ["bpe", size] if size.isdecimal():
            return train_bpe(texts, vocab_size=int(size))
    raise ConfigError(f"{spec!r} names no kind of tokenizer", hint=f"known: {_KINDS}")


def byte_tokenizer() -> Any:  # Any: a transformers tokenizer
    """256 tokens, each the byte of its number; no special ones."""
    from tokenizers import models, pre_tokenizers

    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrapped(tokenizer)


def char_tokenizer(texts: Iterable[str]) -> Any:  # Any: a transformers tokenizer
    """One token for each character of the texts, in the order of code points, and one for all others."""
    from tokenizers import Tokenizer, decoders, models

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise DataError("a character tokenizer needs text to find its characters in")
    tokens = [END, UNKNOWN, *sorted(characters)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, UNKNOWN])
    return _wrapped(tokenizer, eos_token=END, unk_token=UNKNOWN)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Any:  # Any: a transformers tokenizer
    """Byte-level BPE: every text can be encoded, and decodes to itself."""
    from tokenizers import models, pre_tokenizers, trainers

    smallest = 256 + 1
    if vocab_size < smallest:
        raise ConfigError(
            f"a byte-level BPE of {vocab_size} tokens cannot be made",
            hint=f"the bytes and the end of a text alone take {smallest}",
        )
    tokenizer = _byte_level(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_not_empty(texts), trainer)
    return _wrapped(tokenizer, eos_token=END)


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    found = False
    for text in texts:
        found = found or bool(text)
        yield text
    if not found:
        raise DataError("a tokenizer needs text to be trained on, and there is none")


def _byte_level(model: Any) -> Any:  # Any: tokenizers ships no types
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrapped(tokenizer: Any, **special: str) -> Any:  # Any: tokenizers and transformers ship no types
    from transformers import PreTrainedTokenizerFast

    # decoding gives back exactly what was encoded
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in the order of the bytes.

    GPT-2's convention: printable bytes stand for themselves, the others follow from code point 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    shown = {byte: chr(byte) for byte in printable}
    shown |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]
