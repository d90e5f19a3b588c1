"""A finished run or a model, written for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whet.adapters.adapter import adapted
from whet.errors import ConfigError, ModelError, RunError
from whet.model_io.export.logit_difference import TOLERANCES, LogitDifference, merge_measured, sample_tokens
from whet.model_io.formats.adapter_files import save_adapter
from whet.model_io.hub import resolve
from whet.model_io.load import load
from whet.model_io.resolve import at_home, base_of, config_of_checkpoint, usable_directory
from whet.model_io.safetensors import TensorFiles
from whet.model_io.save import save_model
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import end_tokens
from whet.run_directory import FINAL

GGUF_TYPES = {torch.float32: "f16", torch.float16: "f16", torch.bfloat16: "bf16"}  # by the base's dtype


@dataclass(frozen=True)
class Loaded:
    """A model in float32, whatever its files hold, with all that an export asks about."""

    model: LanguageModel
    tokenizer: Any  # Any: a transformers tokenizer or None
    dtype: torch.dtype  # of the base's files
    name: str
    tokens: torch.Tensor  # [1, T], the sample text
    logits: torch.Tensor  # [1, T, V], of those, before anything is done to the model

    @property
    def has_adapter(self) -> bool:
        """Whether there is an adapter on the model."""
        return any(True for _ in adapted(self.model))

    @property
    def base(self) -> str:
        """What an adapter is folded into, in words."""
        held = [dict(layer.base.named_parameters()) for _, layer in adapted(self.model)]
        quantised = any(all("weight" not in name for name in parameters) for parameters in held)
        return f"{'the dequantised ' if quantised else ''}{base_of(usable_directory(self.name))}"

    @property
    def base_directory(self) -> Path | None:
        """The files of an adapter's base; None where that is an adapter or a checkpoint itself."""
        inner = base_of(usable_directory(self.name))
        if inner is None:
            return self.model.source
        target = usable_directory(inner)
        if base_of(target) is not None or config_of_checkpoint(target) is not None:
            return None
        return resolve(str(target))


def load_exact(name: str | Path) -> Loaded:
    """Open a model, run or adapter for writing it elsewhere."""
    model, tokenizer = load(name, dtype=torch.float32, device="cpu")
    dtypes = [torch.float32]  # of a checkpoint of a model from scratch
    if model.source is not None:
        files = TensorFiles(model.source)
        dtypes = [found.dtype for found in map(files.described, files) if found.dtype in TOLERANCES]
        if not dtypes:
            raise ModelError(f"{model.source} holds no weights in float32, float16 or bfloat16")
    tokens = sample_tokens(model, tokenizer)
    with torch.no_grad():
        logits = model(tokens)
    return Loaded(model, tokenizer, max(set(dtypes), key=dtypes.count), str(name), tokens, logits)


def fold(loaded: Loaded, dtype: torch.dtype, *, tolerance: float | None = None) -> LogitDifference:
    """Fold the adapter into the base, rounded to `dtype`; refuse where that changes the logits too much."""
    difference = merge_measured(loaded.model, loaded.tokens, dtype=dtype)
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    if not difference.largest <= allowed:
        raise RunError(
            f"merged in {dtype_name(dtype)}, {loaded.name} is no longer what it was: {difference}; "
            f"{allowed:g} is allowed",
            hint="merge in a wider dtype (--dtype float32), or allow more (--tolerance)",
        )
    return difference


def write_export(
    loaded: Loaded, path: str | Path, layout: str, *, dtype: torch.dtype, kind: str, tolerance: float | None
) -> LogitDifference | None:
    """Write the model in a layout: `hf` in the dtype, `gguf` as the kind; returns what folding changed."""
    if layout in ("peft", "mlx"):
        _write_adapter(loaded, path, layout)
        return None
    folded = dtype if layout == "hf" else torch.float32
    difference = fold(loaded, folded, tolerance=tolerance) if loaded.has_adapter else None
    if layout == "hf":
        write_hf(loaded, path, dtype)
    else:
        from whet.model_io.gguf.writer import write_gguf

        write_gguf(path, loaded.model, loaded.tokenizer, kind=kind, end_tokens=end_tokens(loaded.model))
    return difference


def write_hf(loaded: Loaded, directory: str | Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face model directory; the model itself is rounded to the dtype."""
    save_model(loaded.model.to(dtype), loaded.tokenizer, directory)


def _write_adapter(loaded: Loaded, directory: str | Path, layout: str) -> None:
    if not loaded.has_adapter:
        raise ModelError(
            f"{loaded.name} has no adapter, and the {layout} layout holds nothing else",
            hint="it is a whole model: --to hf, which mlx-lm reads too",
        )
    save_adapter(loaded.model, directory, layout=layout, tokenizer=loaded.tokenizer)


def default_path(name: str, layout: str, kind: str) -> Path:
    """Where an export goes when nobody says: into the run."""
    run = at_home(name)
    if not (run / FINAL).is_dir():
        raise ConfigError(f"{name} is not a run, so there is no place for an export", hint="name it: --out")
    place = run / "export"
    return place / f"{run.resolve().name}-{kind}.gguf" if layout == "gguf" else place / layout


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as people write it."""
    return str(dtype).removeprefix("torch.")
