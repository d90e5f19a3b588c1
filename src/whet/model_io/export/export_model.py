"""Write a finished run or a model in the formats of other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import named_adapters
from whet.errors import ConfigError, ModelError, RunError
from whet.model_io.base_models import base_model_of, config_of_checkpoint, expand_user, local_model_directory
from whet.model_io.config_json import read_config
from whet.model_io.export.logit_difference import TOLERANCES, LogitDifference, merge_measured, sample_tokens
from whet.model_io.formats.adapter_files import save_adapter
from whet.model_io.load import load
from whet.model_io.resolve_model import resolve_model
from whet.model_io.safetensors import open_tensor_files
from whet.model_io.save import save_model
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import config_eos_ids
from whet.run_directory import FINAL_DIRECTORY

GGUF_TYPES = {torch.float32: "f16", torch.float16: "f16", torch.bfloat16: "bf16"}  # by the base's dtype


@dataclass(frozen=True)
class LoadedModel:
    """A model loaded in float32 for export, with the dtype of its files and its logits on a sample."""

    model: LanguageModel
    tokenizer: Any  # Any: a transformers tokenizer or None
    dtype: torch.dtype  # of the base's files
    name: str
    tokens: torch.Tensor  # [1, T], the sample text
    logits: torch.Tensor  # [1, T, V], for these tokens, before the model is changed

    @property
    def has_adapter(self) -> bool:
        """Whether the model has an adapter."""
        return any(True for _ in named_adapters(self.model))

    @property
    def base(self) -> str:
        """A description of the base model that the adapter is merged into."""
        bases = [dict(layer.base.named_parameters()) for _, layer in named_adapters(self.model)]
        is_quantized = any(all("weight" not in name for name in parameters) for parameters in bases)
        return (
            f"{'the dequantized ' if is_quantized else ''}{base_model_of(local_model_directory(self.name))}"
        )

    @property
    def base_directory(self) -> Path | None:
        """The directory of the adapter's base, or None if the base is itself an adapter or a checkpoint."""
        base = base_model_of(local_model_directory(self.name))
        if base is None:
            return self.model.source
        target = local_model_directory(base)
        if base_model_of(target) is not None or config_of_checkpoint(target) is not None:
            return None
        return resolve_model(str(target))


def load_for_export(name: str | Path) -> LoadedModel:
    """Load a model, run or adapter in float32 for export."""
    model, tokenizer = load(name, dtype=torch.float32, device="cpu")
    dtypes = [torch.float32]  # for a checkpoint of a model trained from scratch
    if model.source is not None:
        files = open_tensor_files(model.source, read_config(model.source))
        dtypes = [tensor.dtype for tensor in map(files.meta_tensor, files) if tensor.dtype in TOLERANCES]
        if not dtypes:
            raise ModelError(f"{model.source} contains no weights in float32, float16 or bfloat16")
    tokens = sample_tokens(model, tokenizer)
    with torch.no_grad():
        logits = model(tokens)
    return LoadedModel(model, tokenizer, max(set(dtypes), key=dtypes.count), str(name), tokens, logits)


def merge_adapter(
    loaded: LoadedModel, dtype: torch.dtype, *, tolerance: float | None = None
) -> LogitDifference:
    """Merge the adapter into the base, rounded to `dtype`, and return how much the logits changed.

    Raises:
        RunError: If a logit changes by more than the tolerance, which depends on the dtype by default.
    """
    difference = merge_measured(loaded.model, loaded.tokens, dtype=dtype)
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    if not difference.largest <= tolerance:
        raise RunError(
            f"merging {loaded.name} in {dtype_name(dtype)} changes its outputs too much: {difference} "
            f"(tolerance {tolerance:g})",
            hint="merge in a wider dtype (--dtype float32), or raise the tolerance (--tolerance)",
        )
    return difference


def write_export(
    loaded: LoadedModel,
    path: str | Path,
    layout: str,
    *,
    dtype: torch.dtype,
    kind: str,
    tolerance: float | None,
    imatrix: str | Path | None = None,
) -> LogitDifference | None:
    """Write the model in a layout, and return how much merging changed the logits, if it was merged.

    `dtype` applies to `hf`; `kind` is the tensor type of `gguf`, and `imatrix` guides its rounding.
    """
    if layout == "gguf-adapter":
        from whet.model_io.gguf.adapter_writer import write_gguf_adapter

        write_gguf_adapter(path, loaded.model)
        return None
    if layout in ("peft", "mlx"):
        _write_adapter(loaded, path, layout)
        return None
    merge_dtype = dtype if layout == "hf" else torch.float32
    difference = merge_adapter(loaded, merge_dtype, tolerance=tolerance) if loaded.has_adapter else None
    if layout == "hf":
        write_hf(loaded, path, dtype)
    else:
        from whet.model_io.gguf.writer import write_gguf

        write_gguf(
            path,
            loaded.model,
            loaded.tokenizer,
            kind=kind,
            end_tokens=config_eos_ids(loaded.model),
            imatrix=imatrix,
        )
    return difference


def write_hf(loaded: LoadedModel, directory: str | Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face model directory. The loaded model itself is cast to the dtype."""
    save_model(loaded.model.to(dtype), loaded.tokenizer, directory)


def _write_adapter(loaded: LoadedModel, directory: str | Path, layout: str) -> None:
    if not loaded.has_adapter:
        raise ModelError(
            f"{loaded.name} has no adapter, but the {layout} layout is for adapters only",
            hint="export the full model with --to hf, which mlx-lm reads too",
        )
    save_adapter(loaded.model, directory, layout=layout, tokenizer=loaded.tokenizer)


def default_path(name: str, layout: str, kind: str) -> Path:
    """Return the default path of an export, inside the run directory."""
    run = expand_user(name)
    if not (run / FINAL_DIRECTORY).is_dir():
        raise ConfigError(
            f"{name} is not a run, so there is no default path for the export", hint="set one with --out"
        )
    directory = run / "export"
    suffixes = {"gguf": kind, "gguf-adapter": "adapter"}
    return directory / (f"{run.resolve().name}-{suffixes[layout]}.gguf" if layout in suffixes else layout)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")
