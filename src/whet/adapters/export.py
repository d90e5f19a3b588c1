"""A finished run or a model, written for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.adapters.load import load
from whet.adapters.lora import adapted
from whet.adapters.merging import TOLERANCES, LogitDifference, merge_measured, sample_tokens
from whet.errors import ModelError, RunError
from whet.models.language_model import LanguageModel
from whet.models.load import save_model
from whet.models.weights import TensorFiles

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Loaded:
    """A model in float32, whatever its files hold, with all that an export asks about."""

    model: LanguageModel
    tokenizer: Any  # Any: a transformers tokenizer or None
    dtype: torch.dtype  # of the base's files
    name: str

    @property
    def has_adapter(self) -> bool:
        """Whether there is an adapter on the model."""
        return any(True for _ in adapted(self.model))

    @property
    def base(self) -> str:
        """What an adapter is folded into, in words."""
        quantised = any(not isinstance(layer.base, nn.Linear) for _, layer in adapted(self.model))
        return f"{'the dequantised ' if quantised else ''}{self.model.name}"


def load_exact(name: str | Path) -> Loaded:
    """Open a model, run or adapter for writing it elsewhere."""
    model, tokenizer = load(name, dtype=torch.float32, device="cpu")
    assert model.source is not None
    files = TensorFiles(model.source)
    dtypes = [found.dtype for found in map(files.described, files) if found.dtype in TOLERANCES]
    if not dtypes:
        raise ModelError(f"{model.source} holds no weights of a known dtype: {', '.join(DTYPES)}")
    return Loaded(model, tokenizer, max(set(dtypes), key=dtypes.count), str(name))


def fold(loaded: Loaded, dtype: torch.dtype, *, tolerance: float | None = None) -> LogitDifference:
    """Fold the adapter into the base, rounded to `dtype`; refuse where that changes the logits too much."""
    difference = merge_measured(loaded.model, sample_tokens(loaded.model, loaded.tokenizer), dtype=dtype)
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    if not difference.largest <= allowed:
        raise RunError(
            f"merged in {dtype_name(dtype)}, {loaded.name} is no longer what it was: {difference}; "
            f"{allowed:g} is allowed",
            hint="merge in a wider dtype (--dtype float32), or allow more (--tolerance)",
        )
    return difference


def write_hf(loaded: Loaded, directory: str | Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face model directory; the model itself is rounded to the dtype."""
    save_model(loaded.model.to(dtype), loaded.tokenizer, directory)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as people write it."""
    return str(dtype).removeprefix("torch.")
