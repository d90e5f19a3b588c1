"""NF4 weights in the layout that transformers saves for bitsandbytes, with double quantization."""

import json
from collections.abc import Mapping, Sequence
from typing import Any  # the values of a config.json and of a quantization state

import torch

from whet.adapters.nf4 import BLOCK, SCALES_BLOCK, code_table, dequantize_nf4, quantize_nf4
from whet.errors import ModelError

METHOD = "bitsandbytes"
STATE = "weight.quant_state.bitsandbytes__nf4"
PARTS = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    STATE,
)


def nf4_config(ignore: Sequence[str], *, dtype: torch.dtype) -> dict[str, Any]:
    """Return the quantization_config of a model whose linear layers are all in NF4 except `ignore`."""
    return {
        "quant_method": METHOD,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": _name(dtype),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(ignore),
        "llm_int8_threshold": 6.0,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }


def check_nf4_config(config: Mapping[str, Any]) -> None:
    """Raise ModelError if whet cannot dequantize the weights of this quantization_config."""
    kind = config.get("bnb_4bit_quant_type") if config.get("load_in_4bit") else "int8"
    if kind != "nf4" or not config.get("bnb_4bit_use_double_quant"):
        raise ModelError(
            f"{kind} weights of bitsandbytes are not supported, only nf4 with bnb_4bit_use_double_quant"
        )


def quantize_nf4_weight(weight: torch.Tensor, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight [out, in], by the end of their names."""
    packed, cpu = quantize_nf4(weight), torch.device("cpu")
    rest = packed["rest"].view(torch.float32)
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": _name(dtype),
        "shape": list(weight.shape),
        "nested_blocksize": SCALES_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": rest[-1].item(),
    }
    tensors = (
        packed["codes"][:, None],
        packed["scales"],
        code_table("values", cpu),
        rest[:-1],
        code_table("scales", cpu),
        torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    )
    return dict(zip(PARTS, tensors, strict=True))


def read_state(stored: torch.Tensor) -> dict[str, Any]:
    """Return the quantization state of a weight: its shape, dtype and block sizes."""
    state: dict[str, Any] = json.loads(bytes(stored.tolist()))
    blocks = state["blocksize"], state["nested_blocksize"]
    if blocks != (BLOCK, SCALES_BLOCK):
        raise ModelError(f"blocks of {blocks[0]} weights and {blocks[1]} scales are not supported")
    return state


def dequantize_nf4_weight(stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight [out, in] in float32 from its stored tensors."""
    state = read_state(stored[STATE])
    offset = torch.tensor([state["nested_offset"]])
    packed = {
        "codes": stored["weight"].flatten(),
        "scales": stored["weight.absmax"],
        "rest": torch.cat([stored["weight.nested_absmax"].float(), offset]).view(torch.int32),
    }
    rows, columns = state["shape"]
    return dequantize_nf4(packed, (rows, columns), torch.float32)


def state_dtype(state: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the weight before quantization."""
    dtype = getattr(torch, str(state["dtype"]), None)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ModelError(f"weights quantized from {state['dtype']} are not supported")
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
