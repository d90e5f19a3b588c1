"""Load the tokenizer of a model, or create one for a model trained from scratch."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.error_boundary import hide_rust_panics, invalid_input_errors
from whet.model_io.base_models import (
    base_model_of,
    config_of_checkpoint,
    expand_user,
    local_model_directory,
    starting_model,
)
from whet.model_io.file_checks import check_links
from whet.model_io.resolve_model import resolve_model
from whet.model_io.safetensors import (
    TOKENIZER_FILES,
)
from whet.run_directory import TOKENIZER_DIRECTORY, run_directory_of

log = logging.getLogger("whet")
_TOKENIZER_HINT = "tokenizer.json, tokenizer_config.json or config.json is corrupt: copy the files again"


def new_tokenizer(preset: Preset, texts: Iterable[str], *, stored_in: Path | None = None) -> Any:
    """Return the tokenizer of a preset: an existing one, or a new one trained on the texts.

    If the directory `stored_in` exists, the tokenizer is read from it, so a resumed run uses the same ids.
    Any: a transformers tokenizer.
    """
    from whet.models.from_scratch.train_tokenizer import is_builtin_tokenizer, make_tokenizer

    if stored_in is not None and stored_in.is_dir():
        return load_tokenizer(stored_in)
    if not is_builtin_tokenizer(preset.tokenizer):
        return load_tokenizer(preset.tokenizer)
    tokenizer = make_tokenizer(preset.tokenizer, texts)
    log.info("tokenizer: %s, %d tokens", preset.tokenizer, len(tokenizer))
    return tokenizer


def load_model_tokenizer(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer or None
    """Return the tokenizer that `load` returns, without loading weights, or None if there is none."""
    config = config_of_checkpoint(name_or_path)
    tokenizer = _load_stored_tokenizer(name_or_path, config)
    if tokenizer is None or config is None:
        return tokenizer
    for section in [part.data for part in config.parts().values()] or [config.data]:
        if section.template is not None:
            from whet.data.templates.builtin import load_template

            tokenizer.chat_template = load_template(section.template)  # as in the run's final model
    return tokenizer


def _load_stored_tokenizer(
    name_or_path: str | Path, config: RunConfig | None
) -> Any:  # Any: as in `load_model_tokenizer`
    """Return the tokenizer from its files; `config` is that of the run if this is a checkpoint."""
    if config is not None and config.method.continues:
        return load_model_tokenizer(str(config.language_model))  # the one that the adapter was trained with
    if (start := starting_model(name_or_path)) is not None:
        run_tokenizer = run_directory_of(expand_user(name_or_path)) / TOKENIZER_DIRECTORY
        return load_tokenizer(run_tokenizer) if isinstance(start, Preset) else load_model_tokenizer(start)
    target = local_model_directory(name_or_path)
    if (base := base_model_of(target)) is not None and not has_tokenizer(Path(target)):
        return load_model_tokenizer(base)
    directory = target if isinstance(target, Path) else resolve_model(target)
    if not has_tokenizer(directory):
        directory = resolve_model(str(directory))  # for example, if it is a GGUF file
    return load_tokenizer(directory) if has_tokenizer(directory) else None


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory contains tokenizer files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer
    """Load the tokenizer of a model or adapter directory with transformers, never with remote code."""
    from transformers import AutoTokenizer

    path = Path(name_or_path)
    directory = path if has_tokenizer(path) else resolve_model(str(name_or_path))
    check_links(directory)
    with (
        hide_rust_panics(),
        invalid_input_errors(f"the tokenizer in {directory} cannot be read", hint=_TOKENIZER_HINT),
    ):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        tokenizer("a")  # some settings are only validated on first use
    for key in ("is_local", "local_files_only"):  # how it was loaded is not a property of the tokenizer
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer
