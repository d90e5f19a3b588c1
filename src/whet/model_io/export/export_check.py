"""Check exports: load them with the library they are for, and compare with the original model."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any  # everywhere below: models and tokenizers of libraries without types

import numpy as np
import torch

from whet.adapters.nf4 import NF4Linear
from whet.model_io.export.export_model import LoadedModel
from whet.model_io.export.logit_difference import TOLERANCES, compare_logits
from whet.models.language_model import LanguageModel

_NO_DIRECTORY = "its base is an adapter or a checkpoint, which {} cannot load: merge it first with whet merge"


@dataclass(frozen=True)
class Check:
    """The result of one comparison, with an explanation. `passed` is None if it could not be run."""

    passed: bool | None
    text: str
    is_required: bool = True  # whether a comparison that could not be run counts as failed

    @property
    def failed(self) -> bool:
        """Whether the comparison failed, or is required and could not be run."""
        return self.passed is False or (self.passed is None and self.is_required)

    def __str__(self) -> str:
        return f"{ {True: 'checked', False: 'CHECK FAILED', None: 'not checked'}[self.passed] }: {self.text}"


def check_export(
    loaded: LoadedModel,
    path: Path,
    layout: str,
    *,
    dtype: torch.dtype,
    kind: str = "",
    tolerance: float | None = None,
) -> list[Check]:
    """Load an export and compare its logits with those of the original model.

    `kind` is the type of a GGUF export. `tolerance` is the largest allowed logit difference, which depends on
    the stored dtype by default.
    """
    gguf_dtypes = {"f16": torch.float16, "bf16": torch.bfloat16}
    stored_dtype = {"hf": dtype, "gguf": gguf_dtypes.get(kind, torch.float32)}.get(layout, torch.float32)
    tolerance = TOLERANCES[stored_dtype] if tolerance is None else tolerance
    try:
        if layout == "gguf":
            from whet.model_io.export.gguf_check import check_gguf

            return list(check_gguf(loaded, path, kind=kind, tolerance=tolerance))
        if layout == "gguf-adapter":
            from whet.model_io.export.gguf_check import check_gguf_adapter

            return list(check_gguf_adapter(loaded, path, tolerance=tolerance))
        return [{"hf": _check_hf, "peft": _check_peft, "mlx": _check_mlx}[layout](loaded, path, tolerance)]
    except Exception as error:  # any failure of the other library means that the export is unusable
        return [Check(False, f"it cannot be loaded: {type(error).__name__}: {error}")]


def _compare(loaded: LoadedModel, logits: torch.Tensor, tolerance: float, reader: str) -> Check:
    difference = compare_logits(loaded.logits, logits)
    return Check(difference.largest <= tolerance, f"{reader}: {difference} (tolerance {tolerance:g})")


def _transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()


def _check_hf(loaded: LoadedModel, path: Path, tolerance: float) -> Check:
    with torch.no_grad():
        logits = _transformers_model(path)(loaded.tokens).logits
    return _compare(loaded, logits, tolerance, "transformers")


def _check_peft(loaded: LoadedModel, path: Path, tolerance: float) -> Check:
    if find_spec("peft") is None:
        return Check(None, "peft is not installed")
    from peft import PeftModel

    if loaded.base_directory is None:
        return Check(None, _NO_DIRECTORY.format("PEFT"))
    base = _transformers_model(loaded.base_directory)
    is_quantized = _copy_dequantized_weights(loaded.model, base)
    with torch.no_grad():
        model = PeftModel.from_pretrained(base, path)
        logits = model.eval()(input_ids=loaded.tokens).logits
    reader = f"PEFT{' on the dequantized base' if is_quantized else ''}"
    return _compare(loaded, logits, tolerance, reader)


@torch.no_grad()
def _copy_dequantized_weights(model: LanguageModel, base: Any) -> bool:
    """Copy the dequantized 4-bit weights of a model into PEFT's base. Return whether there are any."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, NF4Linear)}
    for name, layer in layers.items():
        module = name.removesuffix(".base")
        target = base.get_submodule(model.hf_name(module)).weight
        target.copy_(model.to_hf_layout(f"{module}.weight", layer.weight))
    return bool(layers)


def _check_mlx(loaded: LoadedModel, path: Path, tolerance: float) -> Check:
    if find_spec("mlx_lm") is None:
        return Check(None, "mlx_lm is not installed")
    import mlx.core as mx
    import mlx_lm

    if loaded.base_directory is None:
        return Check(None, _NO_DIRECTORY.format("mlx-lm"))
    model, _ = mlx_lm.load(str(loaded.base_directory), adapter_path=str(path))
    logits = model(mx.array(loaded.tokens.tolist())).astype(mx.float32)
    return _compare(loaded, torch.from_numpy(np.array(logits)), tolerance, "mlx-lm")
