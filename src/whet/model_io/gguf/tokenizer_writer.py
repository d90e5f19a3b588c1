"""Convert a Hugging Face tokenizer to the metadata of a GGUF file, the inverse of tokenizer_reader."""

import base64
import json
import logging
import re
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
    is_phi3_name,
    splits,
)

log = logging.getLogger("whet")

_PREFIX = "tokenizer.ggml."
_APPROXIMATE = ("tekken", "gpt-4o")  # llama.cpp has other patterns for these
# Texts on which tokenizers often differ: spaces, lines, digits, accents, emoji, bytes, contractions.
_DIFFICULT_TEXTS = (
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
    tokenizer: Any, *, vocab_size: int, end_tokens: Collection[int] = (), name: str = ""
) -> dict[str, object]:
    """Return the GGUF metadata of a tokenizer, and check that a tokenizer rebuilt from it gives the same ids.

    `vocab_size` is the number of rows of the embedding. Rows without a token get an unused token. `name` is
    that of the model, which llama.cpp's tokenization depends on.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError("GGUF requires a BPE or Unigram tokenizer, but this one has no tokenizer.json")
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    if tokenizer_json["model"]["type"] not in ("BPE", "Unigram"):
        raise ModelError(
            f"GGUF requires a BPE or Unigram tokenizer, but this one is {tokenizer_json['model']['type']}"
        )
    tokens, types = _tokens_and_types(tokenizer_json, vocab_size)
    common: dict[str, object] = {
        "tokens": tokens,
        "token_type": types,
        **_special_ids(tokenizer, end_tokens),
        **_bos_and_eos_flags(tokenizer),
    }
    if tokenizer_json["model"]["type"] == "Unigram":
        unigram = _unigram(tokenizer_json, len(tokens)) | common
        candidates = [
            unigram | {"add_space_prefix": prefix, "remove_extra_whitespaces": merges}
            for prefix, merges in ((True, True), (True, False), (False, False))
        ]
    elif _has_type(tokenizer_json["pre_tokenizer"], "ByteLevel"):
        candidates = [_byte_level(tokenizer_json) | common]
    else:
        candidates = [
            _sentencepiece(tokenizer_json, tokens) | common | {"add_space_prefix": prefix}
            for prefix in (True, False)
        ]
    reasons = []
    for candidate in candidates:
        metadata = {f"{_PREFIX}{key}": value for key, value in candidate.items()}
        metadata["general.name"] = _model_name(name, tokenizer_json)
        template = tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        if template:
            metadata["tokenizer.chat_template"] = template
        reason = _difference(tokenizer, tokenizer_json, metadata, vocab_size)
        if reason is None:
            return metadata
        reasons.append(reason)
    raise ModelError(
        f"GGUF cannot represent this tokenizer: {reasons[0]}",
        hint="export a Hugging Face directory (--to hf) and use llama.cpp's converter",
    )


def _tokens_and_types(tokenizer_json: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and the types of all tokens, by id."""
    model = tokenizer_json["model"]
    is_unigram = model["type"] == "Unigram"
    texts = {text: index for index, (text, _) in enumerate(model["vocab"])} if is_unigram else model["vocab"]
    by_id = {index: (text, NORMAL) for text, index in texts.items()}
    if is_unigram and model["unk_id"] is not None:
        by_id[model["unk_id"]] = (by_id[model["unk_id"]][0], UNKNOWN)
    elif model.get("byte_fallback"):
        for byte in range(256):
            if (index := model["vocab"].get(f"<0x{byte:02X}>")) is not None:
                by_id[index] = (by_id[index][0], BYTE)
    byte_level = _has_type(tokenizer_json["pre_tokenizer"], "ByteLevel")
    for token in tokenizer_json["added_tokens"]:
        text = token["content"]
        if token["special"]:
            unknown = model.get("unk_id") == token["id"] if is_unigram else text == model.get("unk_token")
            is_unknown = not byte_level and unknown
            by_id[token["id"]] = (text, UNKNOWN if is_unknown else CONTROL)
        else:
            by_id[token["id"]] = (text if byte_level else text.replace(" ", SPACE), USER_DEFINED)
    if (last := max(by_id)) >= vocab_size:
        raise ModelError(f"the tokenizer has a token {last}, but the embedding has only {vocab_size} rows")
    if (with_null := next((index for index, (text, _) in by_id.items() if "\0" in text), None)) is not None:
        raise ModelError(f"token {with_null} contains a null character, which llama.cpp cannot read")
    entries = [by_id.get(index, (f"[UNUSED{index}]", UNUSED)) for index in range(vocab_size)]
    return [text for text, _ in entries], [kind for _, kind in entries]


def _special_ids(tokenizer: Any, end_tokens: Collection[int]) -> dict[str, object]:
    roles = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    extra_ends = sorted(set(end_tokens) - {roles["eos"]})
    # the ends of a turn and of a message, if they differ from the end of a document
    end_roles = ["eot", "eom"] if roles["eos"] is not None else ["eos", "eot", "eom"]
    roles |= dict(zip(end_roles, extra_ends, strict=False))
    if dropped := extra_ends[len(end_roles) :]:
        log.warning(
            "GGUF cannot store these additional end tokens, which will not stop generation: %s",
            ", ".join(map(str, dropped)),
        )
    return {f"{role}_token_id": index for role, index in roles.items() if index is not None}


def _bos_and_eos_flags(tokenizer: Any) -> dict[str, object]:
    """Return whether the tokenizer adds a BOS and an EOS token to a text."""
    with_special, without = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    return {
        "add_bos_token": with_special != without and with_special[0] == tokenizer.bos_token_id,
        "add_eos_token": with_special != without and with_special[-1] == tokenizer.eos_token_id,
    }


def _byte_level(tokenizer_json: Mapping[str, Any]) -> dict[str, object]:
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer_json["model"]["merges"]
    ]
    return {"model": "gpt2", "pre": _split_name(tokenizer_json, any_split=not merges), "merges": merges}


def _split_name(tokenizer_json: Mapping[str, Any], *, any_split: bool) -> str:
    """Return the name of this pre-tokenizer in GGUF files."""
    target = _split_settings(tokenizer_json)
    for name, split in splits().items():
        candidate = Tokenizer(models.BPE(ignore_merges=split.ignore_merges))
        candidate.pre_tokenizer = split.pre_tokenizer
        if split.normalizer is not None:
            candidate.normalizer = split.normalizer
        if name != "default" and _split_settings(json.loads(candidate.to_str())) == target:
            if name in _APPROXIMATE:
                log.warning(
                    "llama.cpp splits some words with non-ASCII letters, and some emoji, differently from a "
                    "%s tokenizer",
                    name,
                )
            return name
    if any_split and tokenizer_json["normalizer"] is None:
        return "gpt-2"  # without merges, it does not matter where words end
    raise ModelError(
        "GGUF has no name for the pre-tokenizer of this tokenizer",
        hint=f"supported: {', '.join(splits())}",
    )


def _split_settings(tokenizer_json: Mapping[str, Any]) -> object:
    parts = (
        tokenizer_json["normalizer"],
        tokenizer_json["pre_tokenizer"],
        bool(tokenizer_json["model"].get("ignore_merges")),
    )
    return json.loads(json.dumps(parts), object_hook=_canonical_step)


def _canonical_step(step: dict[str, Any]) -> dict[str, Any]:
    """Return a step of a tokenizer.json in which equivalent settings are equal."""
    if step.get("type") == "Split" and step.get("behavior") == "Removed" and step.get("invert"):
        # keeping only the matches is the same as splitting at them, because these patterns match everything
        step = step | {"behavior": "Isolated", "invert": False}
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _sentencepiece(tokenizer_json: Mapping[str, Any], tokens: list[str]) -> dict[str, object]:
    """Return scores that rank the pieces in the order of the merges that create them."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(tokenizer_json["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    worst = len(tokenizer_json["model"]["merges"])
    scores = [-float(ranks.get(text, worst + index)) for index, text in enumerate(tokens)]
    return {"model": "llama", "scores": scores}


def _unigram(tokenizer_json: Mapping[str, Any], rows: int) -> dict[str, object]:
    model = tokenizer_json["model"]
    if model.get("byte_fallback"):
        raise ModelError(
            "GGUF cannot represent this tokenizer: llama.cpp's Unigram has no tokens for single bytes",
            hint="export a Hugging Face directory instead (--to hf)",
        )
    scores = [float(score) for _, score in model["vocab"]]
    fields: dict[str, object] = {"model": "t5", "scores": scores + [0.0] * (rows - len(scores))}
    normalizer = tokenizer_json["normalizer"] or {}
    for step in [normalizer, *normalizer.get("normalizers", [])]:
        if step.get("type") == "Precompiled":
            fields["precompiled_charsmap"] = base64.b64decode(step["precompiled_charsmap"])
    return fields


def _model_name(name: str, tokenizer_json: Mapping[str, Any]) -> str:
    """Return a name of the model with which llama.cpp handles the spaces after its special tokens.

    It removes them if the name contains phi-3, and then also requires some tokens of that model.
    """
    removes_spaces = any(token["rstrip"] for token in tokenizer_json["added_tokens"])
    if removes_spaces:
        return name if is_phi3_name(name) else f"{name} (Phi-3)"
    return re.sub("phi-?3", "phi_3", name, flags=re.IGNORECASE)


def _has_type(part: object, kind: str) -> bool:
    return f'"type": "{kind}"' in json.dumps(part)


def _difference(
    tokenizer: Any, tokenizer_json: Mapping[str, Any], metadata: Mapping[str, object], vocab_size: int
) -> str | None:
    """Return how the tokenizer rebuilt from the metadata differs from the original, or None."""
    rebuilt = build_tokenizer(metadata, source="the new file", vocab_size=vocab_size, max_length=1).tokenizer
    if tokenizer_json["model"]["type"] == "BPE":
        rebuilt_merges = json.loads(rebuilt.to_str())["model"]["merges"]
        if {tuple(merge) for merge in rebuilt_merges} != {
            tuple(merge.split(" ") if isinstance(merge, str) else merge)
            for merge in tokenizer_json["model"]["merges"]
        }:
            return "its merges cannot be expressed as scores"
    specials = [token["content"] for token in tokenizer_json["added_tokens"]][:64]
    for text in (*_DIFFICULT_TEXTS, "x".join(specials), " ".join(specials) + " end"):
        ours, theirs = tokenizer(text)["input_ids"], rebuilt.encode(text).ids
        if ours != theirs:
            start = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
            excerpts = [ids[start : start + 6] for ids in (ours, theirs)]
            return f"{text[:40]!r} has the ids {excerpts[0]}, but would get {excerpts[1]}"
    return None
