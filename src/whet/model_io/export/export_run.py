"""Export a run, an adapter, a model or a classifier, for `whet.export` and `whet export`."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from whet.errors import ConfigError
from whet.model_io.base_models import base_model_of, local_model_directory
from whet.model_io.export.export_check import Check, check_export
from whet.model_io.export.export_classifier import check_classifier, load_classifier_exact, write_classifier
from whet.model_io.export.export_model import (
    GGUF_TYPES,
    default_path,
    dtype_name,
    load_for_export,
    write_export,
)
from whet.model_io.formats.classifier_head import is_classifier

Layout = Literal["hf", "peft", "mlx", "gguf", "gguf-adapter"]
_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
# arguments that apply to one format: their option on the command line, the format, and a hint
_IN_PYTHON = "in Python it is called {}"
_LAYOUT_OPTIONS = {
    "gguf_type": ("--type", "gguf", _IN_PYTHON),
    "imatrix": ("--imatrix", "gguf", _IN_PYTHON),
    "dtype": ("--dtype", "hf", _IN_PYTHON),
    "quantize": ("--quantize", "hf", "GGUF files are quantized by --type; an adapter cannot be quantized"),
}


@dataclass(frozen=True)
class ExportResult:
    """A written export: its path, messages for the user, and a function that checks it."""

    path: Path
    remarks: list[str]  # printed before the path
    advice: list[str]  # printed after the path
    check: Callable[[], list[Check]]  # loads the result with its library and compares


def export_run(
    run: str | Path,
    to: Layout,
    output: str | Path | None = None,
    *,
    gguf_type: str | None = None,
    imatrix: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    tolerance: float | None = None,
) -> ExportResult:
    """Write a run, an adapter directory or a model in the format of another program. See `whet.export`."""
    check_layout(to, gguf_type=gguf_type, imatrix=imatrix, dtype=dtype)
    torch_dtype = None if dtype is None else as_dtype(dtype)
    if is_classifier(local_model_directory(run)):
        return _export_classifier(run, to, output, dtype=torch_dtype or torch.float32)
    loaded = load_for_export(run)
    kind = gguf_type or GGUF_TYPES[loaded.dtype]
    path = Path(output) if output else default_path(str(run), to, kind)
    export_dtype, base = torch_dtype or loaded.dtype, loaded.base
    settings: dict[str, Any] = {
        "dtype": export_dtype,
        "kind": kind,
        "tolerance": tolerance,
    }  # Any: keyword arguments
    difference = write_export(loaded, path, to, imatrix=imatrix, **settings)
    merge_dtype = dtype_name(export_dtype if to == "hf" else torch.float32)
    remarks = [] if difference is None else [f"merged into {base} in {merge_dtype}: {difference}"]
    return ExportResult(
        path, remarks, _base_advice(run, to), lambda: check_export(loaded, path, to, **settings)
    )


def check_layout(to: str, **options: object) -> None:
    """Raise ConfigError for an unknown format, or for an option that belongs to another one."""
    if to not in get_args(Layout):
        raise ConfigError(f"unknown format {to!r}", hint=f"use one of {', '.join(get_args(Layout))}")
    for name, value in options.items():
        flag, layout, hint = _LAYOUT_OPTIONS[name]
        if value is not None and to != layout:
            raise ConfigError(
                f"{flag} only applies to --to {layout}, not to --to {to}",
                hint=hint.format(name),
            )


def _export_classifier(
    run: str | Path, to: Layout, output: str | Path | None, *, dtype: torch.dtype
) -> ExportResult:
    loaded = load_classifier_exact(run)
    path = Path(output) if output else default_path(str(run), to, "")
    write_classifier(loaded, path, to, dtype=dtype)
    return ExportResult(
        path, [], _base_advice(run, to), lambda: [check_classifier(loaded, path, to, dtype=dtype)]
    )


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype that weights can be written in, by name."""
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in _DTYPES:
        raise ConfigError(f"weights cannot be written in {name}", hint=f"use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _base_advice(run: str | Path, to: Layout) -> list[str]:
    """Return advice if the base of an adapter is a GGUF file, which PEFT and mlx-lm cannot load."""
    base = base_model_of(local_model_directory(run))
    reader = {"peft": "PEFT", "mlx": "mlx-lm"}.get(to)
    if reader is None or base is None or not Path(base).is_file():
        return []
    return [
        f"{reader} needs the base model as a directory: whet export {shlex.quote(base)} --to hf --out DIR"
    ]
