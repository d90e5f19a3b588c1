"""Load a quantized export with transformers, and compare its logits with those that whet reads from it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any  # models of transformers, which ships no types

import torch

from whet.errors import ConfigError
from whet.model_io.export.export_check import Check
from whet.model_io.export.logit_difference import TOLERANCES, compare_logits
from whet.models.language_model import LanguageModel

_EXTRAS = {
    "compressed_tensors": '"whet[compressed]"',
    "bitsandbytes": '"whet[bitsandbytes]"',
    "accelerate": "accelerate",
}


def require_reader(kind: str) -> None:
    """Raise ConfigError if a library that transformers needs for a kind of quantization is missing."""
    for module in ("bitsandbytes", "accelerate") if kind == "nf4" else ("compressed_tensors",):
        if find_spec(module) is None:
            raise ConfigError(
                f"--check loads {kind} weights with transformers, which needs {module.replace('_', '-')}",
                hint=f"pip install {_EXTRAS[module]}",
            )


@torch.no_grad()
def check_quantized(
    directory: Path, reloaded: LanguageModel, tokens: torch.Tensor, *, dtype: torch.dtype, has_experts: bool
) -> Check:
    """Compare the logits of transformers and of whet for the same files, without quantized activations."""
    try:
        logits = load_dequantized(directory)(tokens.cpu()).logits
    except Exception as error:  # any failure of the other library means that the export is unusable
        return Check(False, f"transformers cannot load it: {type(error).__name__}: {error}")
    # transformers dequantizes experts in the stored dtype, and all other layers in float32
    tolerance = TOLERANCES[dtype if has_experts else torch.float32]
    difference = compare_logits(logits, reloaded(tokens.to(reloaded.device)).cpu())
    return Check(difference.largest <= tolerance, f"transformers: {difference} (tolerance {tolerance:g})")


def load_dequantized(directory: Path) -> Any:
    """Load a quantized directory with transformers, such that it computes in float32 on any CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):  # of compressed-tensors
            module.quantization_enabled = False  # leave the activations as they are
        if hasattr(module, "quant_state"):  # of bitsandbytes, which computes in bfloat16 on some CPUs
            module.compute_dtype, module.compute_type_is_set = torch.float32, True
            module.support_avx512bf16_for_cpu = False
    for parameter in model.parameters():
        # of models in NF4, transformers leaves other weights in the dtype of the file
        if parameter.dtype in TOLERANCES:
            parameter.data = parameter.data.float()
    return model
