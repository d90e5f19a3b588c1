"""whet export: a run, for other programs."""

from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

from whet.cli.merge import DTYPE, TOLERANCE, Dtype

if TYPE_CHECKING:
    from whet.model_io.export.export_check import Check


class ExportFormat(Enum):
    """The programs that can be written for."""

    hf = "hf"
    peft = "peft"
    mlx = "mlx"
    gguf = "gguf"


class GgufType(Enum):
    """How a GGUF file holds its matrices."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


TO = typer.Option(..., "--to", help="hf: a model directory; peft, mlx: an adapter; gguf: one file.")
TYPE = typer.Option(None, "--type", help="How a GGUF file holds its matrices; f16, or bf16 of a bf16 model.")


def command(
    run: str = typer.Argument(help="A run, an adapter directory, or a model."),
    to: ExportFormat = TO,
    out: str | None = typer.Option(None, help="What to write; RUN/export/... when not given."),
    check: bool = typer.Option(False, "--check", help="Open the result with its library and compare."),
    gguf_type: GgufType | None = TYPE,
    dtype: Dtype | None = DTYPE,
    tolerance: float | None = TOLERANCE,
) -> None:
    """Write RUN for transformers, PEFT, mlx-lm or llama.cpp."""
    from pathlib import Path

    import torch

    from whet.cli.console import set_up_logging
    from whet.errors import ConfigError
    from whet.model_io.export import export_model
    from whet.model_io.export.export_check import check_export
    from whet.model_io.formats.classifier_head import is_classifier
    from whet.model_io.resolve import usable_directory

    set_up_logging()
    if gguf_type is not None and to is not ExportFormat.gguf:
        raise ConfigError(f"--type is for --to gguf; --to {to.value} has none")
    if dtype is not None and to is not ExportFormat.hf:
        raise ConfigError(f"--dtype is for --to hf; --to {to.value} has none")
    if is_classifier(usable_directory(run)):
        _export_classifier(run, to.value, out, check=check, dtype=dtype)
        return
    loaded = export_model.load_exact(run)
    kind = gguf_type.value if gguf_type else export_model.GGUF_TYPES[loaded.dtype]
    path = Path(out) if out else export_model.default_path(run, to.value, kind)
    chosen = loaded.dtype if dtype is None else getattr(torch, dtype.value)
    onto = loaded.base
    settings: dict[str, Any] = {  # Any: keyword arguments
        "dtype": chosen,
        "kind": kind,
        "tolerance": tolerance,
    }
    if (difference := export_model.write_export(loaded, path, to.value, **settings)) is not None:
        folded = chosen if to is ExportFormat.hf else torch.float32
        print(f"merged onto {onto} in {export_model.dtype_name(folded)}: {difference}")
    print(path)
    _say_what_base_is_needed(run, to)
    if check:
        _report(check_export(loaded, path, to.value, **settings))


def _export_classifier(run: str, to: str, out: str | None, *, check: bool, dtype: Dtype | None) -> None:
    from pathlib import Path

    import torch

    from whet.model_io.export.export_classifier import (
        check_classifier,
        load_classifier_exact,
        write_classifier,
    )
    from whet.model_io.export.export_model import default_path

    loaded = load_classifier_exact(run)
    path = Path(out) if out else default_path(run, to, "")
    chosen = torch.float32 if dtype is None else getattr(torch, dtype.value)
    write_classifier(loaded, path, to, dtype=chosen)
    print(path)
    _say_what_base_is_needed(run, ExportFormat(to))
    if check:
        _report([check_classifier(loaded, path, to, dtype=chosen)])


def _say_what_base_is_needed(run: str, to: ExportFormat) -> None:
    """An adapter is opened on its base, and only whet does that from a GGUF file."""
    import shlex
    from pathlib import Path

    from whet.model_io.resolve import base_of, usable_directory

    base = base_of(usable_directory(run))
    reader = {ExportFormat.peft: "PEFT", ExportFormat.mlx: "mlx-lm"}.get(to)
    if reader is not None and base is not None and Path(base).is_file():
        print(f"{reader} needs the base as a directory: whet export {shlex.quote(base)} --to hf --out DIR")


def _report(checks: "list[Check]") -> None:
    words = {True: "checked", False: "CHECK FAILED", None: "not checked"}
    for found in checks:
        print(f"{words[found.passed]}: {found.text}")
    if any(found.passed is False or (found.passed is None and found.needed) for found in checks):
        raise typer.Exit(4)
