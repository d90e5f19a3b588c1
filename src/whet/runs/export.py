"""Export a run, an adapter or a model, quantized or not, with a model card."""

from pathlib import Path

import torch

from whet.evaluation.quantized_export import QuantizationOptions, export_quantized
from whet.model_io.export.export_run import ExportResult, Layout, check_layout, export_run
from whet.runs.model_card import write_export_card


def export(
    run: str | Path,
    to: Layout,
    output: str | Path | None,
    options: QuantizationOptions,
    *,
    gguf_type: str | None = None,
    imatrix: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    tolerance: float | None = None,
    check: bool = False,
) -> ExportResult:
    """Export a run, an adapter or a model. See `whet.export` for the arguments."""
    if options.is_set:
        options.check()
        check_layout(to, quantize=options.quantize, gguf_type=gguf_type, imatrix=imatrix)
        exported = export_quantized(run, output, options, dtype=dtype, tolerance=tolerance, check=check)
    else:
        exported = export_run(
            run, to, output, gguf_type=gguf_type, imatrix=imatrix, dtype=dtype, tolerance=tolerance
        )
    if exported.path.is_dir():
        write_export_card(run, exported.path)
    return exported
