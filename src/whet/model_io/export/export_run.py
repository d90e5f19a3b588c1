"""Export a run, an adapter or a model, classifiers included: the work of `whet.export` and `whet export`."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from whet.errors import ConfigError
from whet.model_io.export.export_check import Check, check_export
from whet.model_io.export.export_classifier import check_classifier, load_classifier_exact, write_classifier
from whet.model_io.export.export_model import (
    GGUF_TYPES,
    default_path,
    dtype_name,
    load_exact,
    write_export,
)
from whet.model_io.formats.classifier_head import is_classifier
from whet.model_io.resolve import base_of, usable_directory

Layout = Literal["hf", "peft", "mlx", "gguf"]
_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Export:
    """What was written: its path, remarks for the user, and how to check it."""

    path: Path
    remarks: list[str]  # before the path is shown
    advice: list[str]  # after it
    check: Callable[[], list[Check]]  # opens the result with its library and compares


def export_run(
    run: str | Path,
    to: Layout,
    output: str | Path | None = None,
    *,
    gguf_type: str | None = None,
    dtype: str | torch.dtype | None = None,
    tolerance: float | None = None,
) -> Export:
    """Write a run, an adapter directory or a model for another program; see `whet.export`."""
    if to not in get_args(Layout):
        raise ConfigError(f"unknown format {to!r}", hint=f"known: {', '.join(get_args(Layout))}")
    if gguf_type is not None and to != "gguf":
        raise ConfigError(f"--type is for --to gguf; --to {to} has none", hint="from Python: gguf_type")
    if dtype is not None and to != "hf":
        raise ConfigError(f"--dtype is for --to hf; --to {to} has none", hint="from Python: dtype")
    rounded = None if dtype is None else _as_dtype(dtype)
    if is_classifier(usable_directory(run)):
        return _export_classifier(run, to, output, dtype=rounded or torch.float32)
    loaded = load_exact(run)
    kind = gguf_type or GGUF_TYPES[loaded.dtype]
    path = Path(output) if output else default_path(str(run), to, kind)
    chosen, onto = rounded or loaded.dtype, loaded.base
    settings: dict[str, Any] = {
        "dtype": chosen,
        "kind": kind,
        "tolerance": tolerance,
    }  # Any: keyword arguments
    difference = write_export(loaded, path, to, **settings)
    folded = dtype_name(chosen if to == "hf" else torch.float32)
    remarks = [] if difference is None else [f"merged onto {onto} in {folded}: {difference}"]
    return Export(path, remarks, _needed_base(run, to), lambda: check_export(loaded, path, to, **settings))


def _export_classifier(
    run: str | Path, to: Layout, output: str | Path | None, *, dtype: torch.dtype
) -> Export:
    loaded = load_classifier_exact(run)
    path = Path(output) if output else default_path(str(run), to, "")
    write_classifier(loaded, path, to, dtype=dtype)
    return Export(path, [], _needed_base(run, to), lambda: [check_classifier(loaded, path, to, dtype=dtype)])


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in _DTYPES:
        raise ConfigError(f"weights cannot be written in {name}", hint=f"known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _needed_base(run: str | Path, to: Layout) -> list[str]:
    """An adapter is opened on its base, and only whet does that from a GGUF file."""
    base = base_of(usable_directory(run))
    reader = {"peft": "PEFT", "mlx": "mlx-lm"}.get(to)
    if reader is None or base is None or not Path(base).is_file():
        return []
    return [f"{reader} needs the base as a directory: whet export {shlex.quote(base)} --to hf --out DIR"]
