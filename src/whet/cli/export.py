"""whet export: write a run in the format of another library."""

from enum import Enum

import typer

from whet.cli.merge import DTYPE, TOLERANCE, Dtype


class ExportFormat(Enum):
    """The values of --to."""

    hf = "hf"
    peft = "peft"
    mlx = "mlx"
    gguf = "gguf"


class GgufType(Enum):
    """The values of --type: the dtype of the matrices in a GGUF file."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


TO = typer.Option(..., "--to", help="hf: a model directory; peft, mlx: an adapter; gguf: one file.")
TYPE = typer.Option(
    None, "--type", help="Dtype of the matrices in a GGUF file; default: f16, or bf16 for a bf16 model."
)


def command(
    run: str = typer.Argument(help="A run, an adapter directory, or a model."),
    to: ExportFormat = TO,
    out: str | None = typer.Option(None, help="Output path; default: RUN/export/..."),
    check: bool = typer.Option(
        False, "--check", help="Load the result with its library and compare the outputs."
    ),
    gguf_type: GgufType | None = TYPE,
    dtype: Dtype | None = DTYPE,
    tolerance: float | None = TOLERANCE,
) -> None:
    """Export to transformers, PEFT, mlx-lm or llama.cpp."""
    from whet.cli.console import set_up_logging
    from whet.model_io.export.export_run import export_run
    from whet.runs.model_card import write_export_card

    set_up_logging()
    exported = export_run(
        run,
        to.value,
        out,
        gguf_type=gguf_type and gguf_type.value,
        dtype=dtype and dtype.value,
        tolerance=tolerance,
    )
    if exported.path.is_dir():
        write_export_card(run, exported.path)
    print(*exported.remarks, exported.path, *exported.advice, sep="\n")
    if check:
        results = exported.check()
        print(*results, sep="\n")
        if any(result.failed for result in results):
            raise typer.Exit(4)
