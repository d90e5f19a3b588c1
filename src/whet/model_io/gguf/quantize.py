"""Quantize a GGUF file to k-quants with llama.cpp's own quantizer, in a process of its own."""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import LlamaFileType

from whet.model_io.gguf.imatrix import check_imatrix, read_imatrix
from whet.model_io.gguf.llama_cpp_process import require_llama_cpp, run_module

K_QUANTS = {
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
    "q5_k_m": LlamaFileType.MOSTLY_Q5_K_M,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}
_MODULE = "whet.model_io.gguf.quantize"


def check_quantizer(kind: str, imatrix: str | Path | None, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise an error before anything is written, if llama.cpp is missing or the imatrix does not fit."""
    require_llama_cpp(f"the GGUF type {kind}")
    if imatrix is not None:
        check_imatrix(read_imatrix(imatrix), shapes, imatrix)


def quantize_file(source: Path, target: Path, kind: str, *, imatrix: str | Path | None = None) -> None:
    """Quantize a float GGUF file. llama.cpp chooses the type of each tensor.

    Args:
        source: A GGUF file with float weights.
        target: The file to write.
        kind: One of `K_QUANTS`.
        imatrix: An importance matrix of llama.cpp's imatrix tool.
    """
    request = {
        "source": str(source),
        "target": str(target),
        "file_type": int(K_QUANTS[kind]),
        "imatrix": None if imatrix is None else str(imatrix),
    }
    run_module(_MODULE, request, f"llama.cpp cannot quantize to {kind}")


def _quantize(request: dict[str, Any]) -> None:  # Any: JSON values
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = request["file_type"]
    if request["imatrix"] is not None:
        importance = {
            name: np.ascontiguousarray(values) for name, values in read_imatrix(request["imatrix"]).items()
        }
        entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()  # the last one is empty
        for entry, (name, values) in zip(entries, importance.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    code = llama_cpp.llama_model_quantize(
        request["source"].encode(), request["target"].encode(), ctypes.byref(params)
    )
    if code:
        sys.exit(1)


if __name__ == "__main__":
    _quantize(json.load(sys.stdin))
