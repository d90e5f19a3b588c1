"""Export a model with quantized weights, and measure the loss before the export appears under its name."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whet.config.load_config import load_config
from whet.config.run_config import RunConfig
from whet.data.run_data import Needs, RunData
from whet.data.sources.source import Source, SourceSpec, open_source
from whet.errors import CheckError, ConfigError, DataError, ModelError, WhetError
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.evaluation.quantization_loss import (
    EvaluationData,
    QuantizationLoss,
    first_batches,
    measure_quantization,
    quantized_activations,
    sample_data,
)
from whet.hardware import choose_device
from whet.model_io.base_models import expand_user, local_model_directory
from whet.model_io.config_json import QUANTIZATION, read_config
from whet.model_io.export.export_check import Check
from whet.model_io.export.export_model import (
    LoadedModel,
    default_path,
    dtype_name,
    load_for_export,
    merge_adapter,
)
from whet.model_io.export.export_run import ExportResult, as_dtype
from whet.model_io.export.quantize_model import QuantizedModel, check_quantization, quantize_model
from whet.model_io.export.quantized_check import check_quantized, require_reader
from whet.model_io.formats.classifier_head import is_classifier
from whet.model_io.load import load_model
from whet.models.language_model import LanguageModel
from whet.run_directory import CONFIG_FILE

_MAX_LENGTH = 2048  # tokens of an example of --data, as in whet eval


@dataclass(frozen=True)
class QuantizationOptions:
    """How to quantize an export, and what to measure before it appears under its name."""

    quantize: str | None = None  # fp8, int8, int4 or nf4
    scales: str | None = None  # with fp8, one per channel or per tensor
    data: SourceSpec | None = None  # to measure on; default: the run's validation data, or the bundled text
    generate: bool = False  # also measure exact match
    max_kl: float | None = None
    max_perplexity_increase: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether any option is set."""
        return self != QuantizationOptions()

    @property
    def measures(self) -> bool:
        """Whether an option is set that needs measurements."""
        return replace(self, quantize=None, scales=None).is_set

    def check(self) -> None:
        """Raise ConfigError for values that are invalid or contradict each other."""
        if self.quantize is None:
            name = next(
                name for name, default in vars(QuantizationOptions()).items() if vars(self)[name] != default
            )
            raise ConfigError(
                f"--{name.replace('_', '-')} needs --quantize",
                hint=f"in Python they are called {name} and quantize",
            )
        check_quantization(self.quantize, self.scales)
        for name in ("max_kl", "max_perplexity_increase"):
            if (bound := getattr(self, name)) is not None and not bound >= 0:
                raise ConfigError(f"{name} must be at least 0, not {bound}")


def export_quantized(
    run: str | Path,
    output: str | Path | None,
    options: QuantizationOptions,
    *,
    dtype: str | torch.dtype | None = None,
    tolerance: float | None = None,
    check: bool = False,
) -> ExportResult:
    """Write a run, an adapter or a model as a Hugging Face directory with quantized weights.

    Args:
        run: The run directory, adapter directory, or name or directory of a model.
        output: The directory to write. By default `export/hf-QUANTIZATION` in the run.
        options: How to quantize, and what to measure.
        dtype: The dtype of the other weights and of the scales. By default that of the base model.
        tolerance: Raise an error if merging the adapter changes a logit by more than this.
        check: Measure the loss of quantization, and load the result with transformers.

    Returns:
        The path, with the results of the check.

    Raises:
        CheckError: A bound is broken, or transformers reads other weights. Nothing is written.
        WhetError: The model cannot be exported in this form.
    """
    kind = str(options.quantize)
    measures = check or options.measures
    if measures:
        require_reader(kind)
    if is_classifier(local_model_directory(run)):
        raise ModelError(f"{run} is a classifier, which cannot be quantized", hint="leave out --quantize")
    loaded = load_for_export(run)
    _check_not_quantized(loaded)
    path = Path(output) if output else default_path(str(run), f"hf-{kind}", "")
    export_dtype = loaded.dtype if dtype is None else as_dtype(dtype)
    data = _evaluation_data(run, loaded, options) if measures else None
    remarks = []
    if loaded.has_adapter:
        base, name = loaded.base, dtype_name(export_dtype)
        difference = merge_adapter(loaded, export_dtype, tolerance=tolerance)
        remarks.append(f"merged into {base} in {name}: {difference}")
    model = quantize_model(loaded, kind, dtype=export_dtype, scales=options.scales)
    results: list[Check] = []

    def verify(directory: Path) -> None:
        if data is not None:
            table, result = _check_export(model, directory, options, data)
            remarks.append(table)
            results.append(result)

    model.write(path, verify=verify)
    return ExportResult(path, remarks, [], lambda: results)


def _check_not_quantized(loaded: LoadedModel) -> None:
    """Raise ModelError for a model whose weights are already quantized, and not changed by an adapter."""
    if loaded.has_adapter or loaded.model.source is None:
        return
    if read_config(loaded.model.source).get(QUANTIZATION):
        raise ModelError(
            f"{loaded.name} is already quantized, and quantizing it again would add up both errors",
            hint="quantize the original model, or leave out --quantize to export the dequantized weights",
        )


def _evaluation_data(run: str | Path, loaded: LoadedModel, options: QuantizationOptions) -> EvaluationData:
    if loaded.tokenizer is None:
        raise DataError(
            f"{run} has no tokenizer, so it cannot read evaluation data", hint="leave out --check"
        )
    model, tokenizer = loaded.model, loaded.tokenizer
    if options.data is not None:
        source = open_source(options.data, split="test")
        return _read(model, tokenizer, source, str(options.data), max_length=_MAX_LENGTH)
    directory = expand_user(run)
    config = load_config(directory / CONFIG_FILE) if (directory / CONFIG_FILE).is_file() else None
    if config is None or not config.has_validation:
        if options.generate:
            raise ConfigError("exact match needs records with answers", hint="choose them with --data FILE")
        return sample_data(model, tokenizer)
    try:
        return _validation_data(config, run, model, tokenizer)
    except WhetError as error:  # records without a next-token loss, or passed from Python
        raise DataError(
            f"the validation data of {run} cannot be used to measure the loss of quantization: "
            f"{error.message}",
            hint="choose other records with --data FILE",
        ) from error


def _validation_data(
    config: RunConfig, run: str | Path, model: LanguageModel, tokenizer: Any
) -> EvaluationData:  # Any: a transformers tokenizer
    sources = RunData(config, Needs()).sources
    if "valid" not in sources:
        raise DataError("it belongs to the parts of a mix")
    return _read(
        model,
        tokenizer,
        sources["valid"],
        f"the validation data of {run}",
        max_length=config.data.max_length,
        supervise=config.data.supervise,
        too_long=config.data.too_long,
    )


def _read(
    model: LanguageModel, tokenizer: Any, source: Source, label: str, *, max_length: int, **settings: Any
) -> EvaluationData:  # Any: a transformers tokenizer, and keyword arguments of ModelEvaluation
    evaluation = ModelEvaluation(
        model, tokenizer, source, max_length=min(max_length, model.max_positions), **settings
    )
    batches = first_batches(evaluation.batches)
    part = "" if len(batches) == len(evaluation.batches) else "the start of "
    return EvaluationData(f"{part}{label}", batches, evaluation.questions)


def measure_export(
    model: QuantizedModel, directory: Path, data: EvaluationData, *, generate: bool = False
) -> tuple[QuantizationLoss, LanguageModel]:
    """Load a written export, and return its loss against the float model, and the loaded model."""
    device = choose_device("auto")
    reloaded = load_model(directory, dtype=torch.float32, device=device)
    rounds_activations = model.kind == "fp8"
    weights = model.weights.quantized
    with quantized_activations(reloaded, weights) if rounds_activations else nullcontext():
        loss = measure_quantization(
            model.loaded.model.to(device),
            reloaded,
            data,
            tokenizer=model.loaded.tokenizer,
            generate=generate,
        )
    return loss, reloaded


def _check_export(
    model: QuantizedModel, directory: Path, options: QuantizationOptions, data: EvaluationData
) -> tuple[str, Check]:
    """Measure an export under its temporary name. Return a table and the comparison with transformers."""
    loaded = model.loaded
    loss, reloaded = measure_export(model, directory, data, generate=options.generate)
    table = _table(model, loss, weight_bytes(directory))
    if broken := loss.broken_bounds(options.max_kl, options.max_perplexity_increase):
        raise CheckError(
            f"{loaded.name}: {'; '.join(broken)}. Nothing was written.\n{table}",
            hint="choose a quantization with more bits, or raise the bound",
        )
    result = check_quantized(
        directory, reloaded, loaded.tokens, dtype=model.dtype, has_experts=model.weights.has_experts
    )
    if result.failed:
        raise CheckError(f"{loaded.name}: {result}. Nothing was written.\n{table}")
    return table, result


def weight_bytes(directory: Path) -> int:
    """Return the size of the weights of a model directory."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _table(model: QuantizedModel, loss: QuantizationLoss, quantized_bytes: int) -> str:
    """Return the measurements as a text table with one row per model."""
    rows = [
        ["weights", "size", "perplexity", "KL divergence"],
        [dtype_name(model.dtype), _megabytes(model.float_bytes), f"{loss.float_perplexity:.4g}", "0"],
        [model.description, _megabytes(quantized_bytes), f"{loss.perplexity:.4g}", f"{loss.kl:.4g}"],
    ]
    if loss.exact_match is not None:
        matches = ["exact match", f"{loss.float_exact_match:.1%}", f"{loss.exact_match:.1%}"]
        rows = [[*row, match] for row, match in zip(rows, matches, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([f"on {loss.label} ({loss.tokens:,} tokens):", *lines])


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
