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
    gguf_adapter = "gguf-adapter"


class GgufType(Enum):
    """The values of --type: the dtype of the matrices in a GGUF file."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q6_k = "q6_k"
    q5_k_m = "q5_k_m"
    q5_1 = "q5_1"
    q5_0 = "q5_0"
    q4_k_m = "q4_k_m"
    q4_1 = "q4_1"
    q4_0 = "q4_0"


class Quantization(Enum):
    """The values of --quantize."""

    fp8 = "fp8"
    int8 = "int8"
    int4 = "int4"
    nf4 = "nf4"


class Scales(Enum):
    """The values of --scales."""

    channel = "channel"
    tensor = "tensor"


TO = typer.Option(
    ...,
    "--to",
    help="hf: a model directory; peft, mlx, gguf-adapter: an adapter; gguf: one file with the full model.",
)
TYPE = typer.Option(
    None, "--type", help="Dtype of the matrices in a GGUF file; default: f16, or bf16 for a bf16 model."
)
IMATRIX = typer.Option(
    None, "--imatrix", help="Importance matrix of llama.cpp, for --type q4_k_m, q5_k_m and q6_k."
)

QUANTIZE = typer.Option(
    None,
    "--quantize",
    "--quantise",
    help="With --to hf, quantize the linear layers, for transformers and vLLM.",
)
SCALES = typer.Option(None, help="Scales of fp8 weights; default: channel.")
DATA = typer.Option(
    None, help="With --quantize, records to check on; default: the run's validation data, or a bundled text."
)
GENERATE = typer.Option(False, "--generate", help="With --quantize, also check exact match.")
MAX_KL = typer.Option(None, help="With --quantize, refuse to export above this mean KL divergence per token.")
MAX_PERPLEXITY = typer.Option(
    None, help="With --quantize, refuse to export above this relative increase, e.g. 0.02."
)


def command(
    run: str = typer.Argument(help="A run, an adapter directory, or a model."),
    to: ExportFormat = TO,
    out: str | None = typer.Option(None, help="Output path; default: RUN/export/..."),
    check: bool = typer.Option(
        False, "--check", help="Load the result with its library and compare the outputs."
    ),
    gguf_type: GgufType | None = TYPE,
    imatrix: str | None = IMATRIX,
    dtype: Dtype | None = DTYPE,
    tolerance: float | None = TOLERANCE,
    quantize: Quantization | None = QUANTIZE,
    scales: Scales | None = SCALES,
    data: str | None = DATA,
    generate: bool = GENERATE,
    max_kl: float | None = MAX_KL,
    max_perplexity_increase: float | None = MAX_PERPLEXITY,
) -> None:
    """Export to transformers, vLLM, PEFT, MLX or llama.cpp."""
    from whet.cli.console import set_up_logging
    from whet.evaluation.quantized_export import QuantizationOptions
    from whet.runs.export import export

    set_up_logging()
    options = QuantizationOptions(
        quantize and quantize.value,
        scales=scales and scales.value,
        data=data,
        generate=generate,
        max_kl=max_kl,
        max_perplexity_increase=max_perplexity_increase,
    )
    exported = export(
        run,
        to.value,
        out,
        options,
        gguf_type=gguf_type and gguf_type.value,
        imatrix=imatrix,
        dtype=dtype and dtype.value,
        tolerance=tolerance,
        check=check,
    )
    print(*exported.remarks, exported.path, *exported.advice, sep="\n")
    if check or options.measures:
        results = exported.check()
        print(*results, sep="\n")
        if any(result.failed for result in results):
            raise typer.Exit(4)
