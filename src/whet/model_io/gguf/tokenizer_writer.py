"""A Hugging Face tokenizer as the metadata of a GGUF file: the inverse of tokenizer_reader."""

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any  # everywhere below: a transformers tokenizer, or the JSON that describes one

from tokenizers import Tokenizer, models

from whet.errors import ModelError
from whet.model_io.gguf.tokenizer_reader import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    build_tokenizer,
    splits,
)

log = logging.getLogger("whet")

_PREFIX = "tokenizer.ggml."
# Text that shows where two tokenizers differ: spaces, lines, digits, accents, emoji, bytes, contractions.
_HARD = (
    "",
    " ",
    "   three before, two after  ",
    "\n\n\ttabs and\r\nlines\n \n",
    "naïve café — “quotes” … 中文, 日本語, עברית, हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \u200b\ufeff",
    "e\u0301 and \u00e9",
    "def f(x):\n    return x**2  # 3.14159 1234567",
    "don't I'LL we've 'tis",
    "\x00\x01\x7f",
    "a" * 100 + "!" * 20,
)


def tokenizer_metadata(
    tokenizer: Any, *, vocab_size: int, end_tokens: Collection[int] = ()
) -> dict[str, object]:
    """What a GGUF file says about the tokenizer; rebuilt from it, it must give the same ids.

    `vocab_size` is the number of rows of the embedding: rows without a token get an unused one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError("GGUF holds byte-pair tokenizers; this one has no tokenizer.json")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    if described["model"]["type"] != "BPE":
        raise ModelError(
            f"GGUF files are written with byte-pair tokenizers; this one is {described['model']['type']}"
        )
    tokens, types = _tokens(described, vocab_size)
    common: dict[str, object] = {
        "tokens": tokens,
        "token_type": types,
        **_special_ids(tokenizer, end_tokens),
        **_frame(tokenizer),
    }
    if _mentions(described["pre_tokenizer"], "ByteLevel"):
        candidates = [_byte_level(described) | common]
    else:
        candidates = [
            _sentencepiece(described, tokens) | common | {"add_space_prefix": prefix}
            for prefix in (True, False)
        ]
    reasons = []
    for candidate in candidates:
        metadata = {f"{_PREFIX}{key}": value for key, value in candidate.items()}
        template = tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        if template:
            metadata["tokenizer.chat_template"] = template
        reason = _difference(tokenizer, described, metadata, vocab_size)
        if reason is None:
            return metadata
        reasons.append(reason)
    raise ModelError(
        f"the tokenizer does something that GGUF cannot hold: {reasons[0]}",
        hint="export a Hugging Face directory (--to hf) and use llama.cpp's own converter",
    )


def _tokens(described: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens, by id."""
    model = described["model"]
    found = {index: (text, NORMAL) for text, index in model["vocab"].items()}
    if model.get("byte_fallback"):
        for byte in range(256):
            if (index := model["vocab"].get(f"<0x{byte:02X}>")) is not None:
                found[index] = (found[index][0], BYTE)
    byte_level = _mentions(described["pre_tokenizer"], "ByteLevel")
    for token in described["added_tokens"]:
        text = token["content"]
        if token["special"]:
            unknown = not byte_level and text == model.get("unk_token")
            found[token["id"]] = (text, UNKNOWN if unknown else CONTROL)
        else:
            found[token["id"]] = (text if byte_level else text.replace(" ", SPACE), USER_DEFINED)
    if (last := max(found)) >= vocab_size:
        raise ModelError(f"the tokenizer has a token {last}, and the model {vocab_size} rows for tokens")
    entries = [found.get(index, (f"[UNUSED{index}]", UNUSED)) for index in range(vocab_size)]
    return [text for text, _ in entries], [kind for _, kind in entries]


def _special_ids(tokenizer: Any, end_tokens: Collection[int]) -> dict[str, object]:
    roles = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    others = sorted(set(end_tokens) - {roles["eos"]})
    # the ends of a turn and of a message, where they are not the end of a document
    places = ["eot", "eom"] if roles["eos"] is not None else ["eos", "eot", "eom"]
    roles |= dict(zip(places, others, strict=False))
    if dropped := others[len(places) :]:
        log.warning("GGUF has no place for more ends of an answer: %s", ", ".join(map(str, dropped)))
    return {f"{role}_token_id": index for role, index in roles.items() if index is not None}


def _frame(tokenizer: Any) -> dict[str, object]:
    """Whether texts begin and end with a token of their own."""
    framed, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return {
        "add_bos_token": framed != bare and framed[0] == tokenizer.bos_token_id,
        "add_eos_token": framed != bare and framed[-1] == tokenizer.eos_token_id,
    }


def _byte_level(described: Mapping[str, Any]) -> dict[str, object]:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    return {"model": "gpt2", "pre": _split_name(described, any_split=not merges), "merges": merges}


def _split_name(described: Mapping[str, Any], *, any_split: bool) -> str:
    """The name under which GGUF files know this way of splitting text."""
    ours = _splitting(described)
    for name, split in splits().items():
        twin = Tokenizer(models.BPE(ignore_merges=split.whole_words_first))
        twin.pre_tokenizer = split.pre_tokenizer
        if split.normalizer is not None:
            twin.normalizer = split.normalizer
        if name != "default" and _splitting(json.loads(twin.to_str())) == ours:
            return name
    if any_split and described["normalizer"] is None:
        return "gpt-2"  # nothing is ever merged, so it does not matter where words end
    raise ModelError(
        "GGUF has no name for the way in which this tokenizer splits text",
        hint=f"known here: {', '.join(splits())}",
    )


def _splitting(described: Mapping[str, Any]) -> object:
    parts = (
        described["normalizer"],
        described["pre_tokenizer"],
        bool(described["model"].get("ignore_merges")),
    )
    return json.loads(
        json.dumps(parts), object_hook=lambda found: {k: found[k] for k in found if k != "trim_offsets"}
    )


def _sentencepiece(described: Mapping[str, Any], tokens: list[str]) -> dict[str, object]:
    """Scores that put the pieces in the order in which the merges make them."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(described["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    worst = len(described["model"]["merges"])
    scores = [-float(ranks.get(text, worst + index)) for index, text in enumerate(tokens)]
    return {"model": "llama", "scores": scores}


def _mentions(part: object, kind: str) -> bool:
    return f'"type": "{kind}"' in json.dumps(part)


def _difference(
    tokenizer: Any, described: Mapping[str, Any], metadata: Mapping[str, object], vocab_size: int
) -> str | None:
    """Where the tokenizer rebuilt from the metadata is not the same, or None."""
    rebuilt = build_tokenizer(metadata, where="the new file", vocab_size=vocab_size, max_length=1).tokenizer
    again = json.loads(rebuilt.to_str())["model"]["merges"]
    if {tuple(merge) for merge in again} != {
        tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in described["model"]["merges"]
    }:
        return "its merges do not follow from scores"
    specials = [token["content"] for token in described["added_tokens"]][:64]
    for text in (*_HARD, "x".join(specials), " ".join(specials) + " end"):
        ours, theirs = tokenizer(text)["input_ids"], rebuilt.encode(text).ids
        if ours != theirs:
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
            shown = [ids[place : place + 6] for ids in (ours, theirs)]
            return f"{text[:40]!r} has the ids {shown[0]} and would have {shown[1]}"
    return None
