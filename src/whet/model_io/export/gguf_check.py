"""Check GGUF exports with the gguf package, with whet's own reader, and with llama.cpp where installed."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from whet.model_io.export.export_check import Check
from whet.model_io.export.export_model import LoadedModel
from whet.model_io.export.logit_difference import SAMPLE, compare_logits
from whet.model_io.gguf.llama_cpp_process import LlamaCppOutput, has_llama_cpp, run_llama_cpp
from whet.model_io.load import load
from whet.models.language_model import LanguageModel

# Error bound of each type, relative to the largest magnitude of a block. It is half a step for q8_0 and types
# with a minimum, and a full step for q5_0 and q4_0, which lack the largest code of one sign. Scales are fp16,
# rounded to 11 bits. K-quants also round the scales of 16 or 32 values, to 8 or 6 bits.
_RELATIVE_ERRORS = {
    "F32": 0.0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q8_0": 0.5 / 127 + 2**-11,
    "Q5_1": 1 / 31 + 3 * 2**-11,
    "Q5_0": 1 / 16 + 2**-11,
    "Q4_1": 1 / 15 + 3 * 2**-11,
    "Q4_0": 1 / 8 + 2**-11,
    "Q6_K": 1 / 16,
    "Q5_K": 1 / 8,
    "Q4_K": 1 / 4,
}
_ABSOLUTE_ERROR = 1e-6  # fp16 scales of blocks with tiny values lose more bits
# llama.cpp looks GELU up in a table of half-precision values
_LLAMA_CPP_TOLERANCE = 0.02
# of the mean KL divergence in nats: with quantized weights, llama.cpp also rounds activations to 8 bits
_MAX_DIVERGENCE = 0.1


def check_gguf(loaded: LoadedModel, path: Path, *, kind: str, tolerance: float) -> Iterator[Check]:
    """Compare the tensors, the logits, the tokens and the chat template of a file with the model's."""
    is_quantized = kind.startswith("q")
    yield _check_tensors(loaded.model, path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".check-") as directory:
        from whet.model_io.gguf.reader import convert_gguf

        convert_gguf(path, Path(directory) / "model")
        reloaded, tokenizer = load(Path(directory) / "model", dtype=torch.float32, device="cpu")
        with torch.no_grad():
            logits = reloaded(loaded.tokens)
        difference = compare_logits(loaded.logits, logits)
        if is_quantized:  # the loss of quantization is reported, and the user judges it
            yield Check(True, f"read back by whet: {difference}")
        else:
            passed = difference.largest <= tolerance
            yield Check(passed, f"read back by whet: {difference} (tolerance {tolerance:g})")
        same_tokens = tokenizer(SAMPLE)["input_ids"] == loaded.tokenizer(SAMPLE)["input_ids"]
        same_template = tokenizer.chat_template == loaded.tokenizer.chat_template
        yield Check(
            same_tokens and same_template,
            f"tokens {'equal' if same_tokens else 'differ'}, "
            f"chat template {'equal' if same_template else 'differs'}",
        )
    if not has_llama_cpp():
        yield _without_llama_cpp()
        return
    output = run_llama_cpp(path, texts=[SAMPLE], token_lists=[loaded.tokens[0].tolist()])
    yield _check_llama_cpp_text(output, tokenizer)
    yield _check_llama_cpp_logits(output, logits, None if is_quantized else tolerance)


def check_gguf_adapter(loaded: LoadedModel, path: Path, *, tolerance: float) -> Iterator[Check]:
    """Compare the logits of llama.cpp, with the adapter on the base in float32, with the model's."""
    if not has_llama_cpp():
        yield Check(None, "llama.cpp: llama-cpp-python is not installed")
        return
    from whet.model_io.gguf.adapter_writer import base_parameters
    from whet.model_io.gguf.writer import write_gguf

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".check-") as directory:
        base = Path(directory) / "base.gguf"
        parameters = base_parameters(loaded.model)
        write_gguf(base, loaded.model, loaded.tokenizer, kind="f32", parameters=parameters)
        output = run_llama_cpp(base, token_lists=[loaded.tokens[0].tolist()], adapter=path)
    yield _check_llama_cpp_logits(output, loaded.logits, tolerance)


def _check_tensors(model: LanguageModel, path: Path) -> Check:
    """Compare every tensor, read by the gguf package, with the model's, within the error of its type."""
    from whet.model_io.gguf.writer import gguf_values

    expected, stored = gguf_values(model), {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    if expected.keys() != stored.keys():
        unpaired = sorted(expected.keys() ^ stored.keys())
        return Check(
            False,
            f"gguf: {len(unpaired)} tensors are only in the model or only in the file: "
            f"{', '.join(unpaired[:4])}",
        )
    for name, tensor in stored.items():
        ours, kind = expected[name](), tensor.tensor_type.name
        error = np.abs(dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape) - ours)
        block = 256 if kind.endswith("_K") else 32
        width = block if ours.size % block == 0 else 1
        largest = np.abs(ours).reshape(-1, width).max(1)
        bound = largest * _RELATIVE_ERRORS[kind] * 1.01 + (_ABSOLUTE_ERROR if tensor.data.ndim > 1 else 0)
        if not (error.reshape(-1, width).max(1) <= bound).all():
            return Check(
                False,
                f"gguf: {name} is off by {error.max():.3g}, more than the quantization step of its type",
            )
    return Check(True, f"gguf: {len(stored)} tensors, each within the quantization step of its type")


def _without_llama_cpp() -> Check:
    return Check(None, "llama.cpp: llama-cpp-python is not installed", is_required=False)


def _check_llama_cpp_text(output: LlamaCppOutput, tokenizer: Any) -> Check:  # Any: a transformers tokenizer
    same_tokens = output.tokens == [tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]]
    same_template = (output.chat_template or None) == (tokenizer.chat_template or None)
    return Check(
        same_tokens and same_template,
        f"llama.cpp: tokens {'equal' if same_tokens else 'differ'}, "
        f"chat template {'equal' if same_template else 'differs'}",
    )


def _check_llama_cpp_logits(output: LlamaCppOutput, expected: torch.Tensor, tolerance: float | None) -> Check:
    """Compare logits: by their largest difference, or by their divergence if the tolerance is None."""
    logits = torch.from_numpy(output.logits[0])[None]
    difference = compare_logits(expected, logits)
    if tolerance is not None:
        tolerance = max(tolerance, _LLAMA_CPP_TOLERANCE)
        passed = difference.largest <= tolerance
        return Check(passed, f"llama.cpp: {difference} (tolerance {tolerance:g})")
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True
    )
    mean = divergence.sum(-1).mean().item()
    return Check(
        mean <= _MAX_DIVERGENCE,
        f"llama.cpp: mean KL divergence {mean:.2g} from the same weights in whet (limit {_MAX_DIVERGENCE:g})",
    )
