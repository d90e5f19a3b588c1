"""Load the tokenizer of a model, or make one for a model trained from scratch."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whet.config.preset import Preset
from whet.error_boundary import panics_hidden, wrong_input
from whet.model_io.file_checks import check_links
from whet.model_io.hub import resolve
from whet.model_io.resolve import at_home, base_of, below_checkpoint, usable_directory
from whet.model_io.safetensors import (
    TOKENIZER_FILES,
)
from whet.run_directory import TOKENIZER, run_of

log = logging.getLogger("whet")
_TOKENIZER_HINT = "tokenizer.json, tokenizer_config.json or config.json is damaged: copy them again"


def new_tokenizer(preset: Preset, texts: Iterable[str], *, kept_in: Path | None = None) -> Any:
    """The tokenizer of a preset: made from the texts, or one that exists.

    One that was made for this run before is read from `kept_in`: a resumed run has its own ids.
    Any: a transformers tokenizer.
    """
    from whet.models.from_scratch.train_tokenizer import is_homemade, make_tokenizer

    if kept_in is not None and kept_in.is_dir():
        return load_tokenizer(kept_in)
    if not is_homemade(preset.tokenizer):
        return load_tokenizer(preset.tokenizer)
    tokenizer = make_tokenizer(preset.tokenizer, texts)
    log.info("tokenizer: %s, %d tokens", preset.tokenizer, len(tokenizer))
    return tokenizer


def tokenizer_of(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer or None
    """The tokenizer that `load` would give, without the weights; None where there is none."""
    if (below := below_checkpoint(name_or_path)) is not None:
        in_run = run_of(at_home(name_or_path)) / TOKENIZER
        return load_tokenizer(in_run) if isinstance(below, Preset) else tokenizer_of(below)
    target = usable_directory(name_or_path)
    if (base := base_of(target)) is not None and not has_tokenizer(Path(target)):
        return tokenizer_of(base)
    directory = target if isinstance(target, Path) else resolve(target)
    if not has_tokenizer(directory):
        directory = resolve(str(directory))  # a GGUF file, say
    return load_tokenizer(directory) if has_tokenizer(directory) else None


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds tokenizer files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer
    """The tokenizer of a model or adapter directory, by transformers, never with remote code."""
    from transformers import AutoTokenizer

    path = Path(name_or_path)
    directory = path if has_tokenizer(path) else resolve(str(name_or_path))
    check_links(directory)
    with panics_hidden(), wrong_input(f"the tokenizer in {directory} cannot be read", hint=_TOKENIZER_HINT):
        found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        found("a")  # some settings are first looked at here
    for way in ("is_local", "local_files_only"):  # how it was read says nothing of what it is
        found.init_kwargs.pop(way, None)
    return found
