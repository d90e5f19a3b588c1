"""Export models and upload them from Python."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from whet.data.sources.source import SourceSpec
    from whet.model_io.export.export_run import Layout
    from whet.model_io.export.quantize_model import Quantization, Scales
    from whet.runs.push import Push

log = logging.getLogger("whet")


def export(
    run: str | Path,
    to: "Layout" = "hf",
    output: str | Path | None = None,
    *,
    check: bool = False,
    gguf_type: str | None = None,
    imatrix: str | Path | None = None,
    dtype: "str | torch.dtype | None" = None,
    tolerance: float | None = None,
    quantize: "Quantization | None" = None,
    scales: "Scales | None" = None,
    data: "SourceSpec | Path | None" = None,
    generate: bool = False,
    max_kl: float | None = None,
    max_perplexity_increase: float | None = None,
) -> Path:
    """Export a run, an adapter directory or a model for use in another library.

    Existing files are never overwritten.

    Args:
        run: The run directory, adapter directory, or name or directory of a model.
        to: The format: "hf" (a model directory, adapters merged), "peft" or "mlx" (an adapter directory),
            "gguf" (a single file), or "gguf-adapter" (a single file with the adapter).
        output: The path to write. By default a run is exported to its `export/` directory.
        check: Load the result with the target library and compare it with the model.
        gguf_type: The storage type of matrices in a GGUF file: f32, f16, bf16, q8_0, q6_k, q5_k_m, q5_1,
            q5_0, q4_k_m, q4_1 or q4_0.
        imatrix: An importance matrix of llama.cpp, which guides the rounding to q6_k, q5_k_m or q4_k_m.
        dtype: With "hf", the dtype to convert the weights to. By default that of the base model.
        tolerance: Raise an error if merging the adapter changes a logit by more than this.
        quantize: With "hf", quantize the linear layers to "fp8", "int8", "int4" or "nf4". `check` then also
            measures KL divergence and perplexity, before the export appears under its name. The arguments
            below need `quantize`, and those after `scales` imply `check`.
        scales: With "fp8", one scale per "channel" (default) or per "tensor".
        data: The records to measure on. By default the validation data of the run, or a bundled text.
        generate: Also measure the exact match of generated responses.
        max_kl: Raise an error, and write nothing, above this mean KL divergence per token.
        max_perplexity_increase: Raise an error, and write nothing, above this relative increase.

    Returns:
        The path of the exported file or directory.

    Raises:
        CheckError: A measurement exceeds its bound.
        WhetError: The run cannot be exported in this format, or `check` found a difference.
    """
    from whet.errors import RunError
    from whet.evaluation.quantized_export import QuantizationOptions
    from whet.runs.export import export as export_with_card

    options = QuantizationOptions(
        quantize,
        scales=scales,
        data=str(data) if isinstance(data, Path) else data,
        generate=generate,
        max_kl=max_kl,
        max_perplexity_increase=max_perplexity_increase,
    )
    exported = export_with_card(
        run,
        to,
        output,
        options,
        gguf_type=gguf_type,
        imatrix=imatrix,
        dtype=dtype,
        tolerance=tolerance,
        check=check,
    )
    for line in (*exported.remarks, *exported.advice):
        log.info("%s", line)
    for result in exported.check() if check or options.measures else []:
        if result.failed:
            raise RunError(f"{exported.path}: {result}")
        log.info("%s", result)
    return exported.path


def push(
    run: str | Path,
    repository: str,
    *,
    what: str | Path = "final",
    private: bool = False,
    dry_run: bool = False,
    base_model: str | None = None,
) -> "Push":
    """Upload the final model of a run, or one of its exports, to the Hugging Face hub in one commit.

    Only the files of a model are uploaded: never checkpoints, data, links or paths of this machine.

    Args:
        run: A run, or a directory or GGUF file with a model.
        repository: The repository on the hub, "owner/name". It is created if it does not exist.
        what: "final", or the path of an export, absolute or in the run directory ("export/hf").
        private: Create a private repository, and refuse to upload to an existing public one.
        dry_run: Upload nothing, and do not use the network.
        base_model: For an adapter of a local base model: the base model's repository on the hub.

    Returns:
        The files with their sizes, and the address of the commit (None with `dry_run`).

    Raises:
        WhetError: The folder contains something that is not part of a model, or the upload failed.
    """
    from whet.runs.push import plan_push
    from whet.runs.push import push as upload

    plan = plan_push(run, repository, what=what, base_model=base_model)
    return plan if dry_run else upload(plan, private=private)
