"""Check exports: load them with the library they are for, and compare with the original model."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any  # everywhere below: models and tokenizers of libraries without types

import numpy as np
import torch

from whet.adapters.nf4 import NF4Linear
from whet.model_io.export.export_model import LoadedModel
from whet.model_io.export.logit_difference import SAMPLE, TOLERANCES, compare_logits
from whet.model_io.load import load
from whet.models.language_model import LanguageModel

# Error bound of each GGUF type, relative to the largest magnitude of a block of 32: half a step for q8_0, a
# full step for q4_0, which has no code +8, and for both the rounding of the scale to 11 bits.
_RELATIVE_ERRORS = {
    "F32": 0.0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q8_0": 0.5 / 127 + 2**-11,
    "Q4_0": 1 / 8 + 2**-11,
}
_ABSOLUTE_ERROR = 1e-6  # fp16 scales of blocks with tiny values lose more bits
_NEW_TOKENS = 16
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
            return list(_check_gguf(loaded, path, kind=kind, tolerance=tolerance))
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


def _check_gguf(loaded: LoadedModel, path: Path, *, kind: str, tolerance: float) -> Iterator[Check]:
    yield _check_gguf_tensors(loaded.model, path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".check-") as directory:
        from whet.model_io.gguf.reader import convert_gguf

        convert_gguf(path, Path(directory) / "model")
        reloaded, tokenizer = load(Path(directory) / "model", dtype=torch.float32, device="cpu")
        with torch.no_grad():
            difference = compare_logits(loaded.logits, reloaded(loaded.tokens))
        if kind.startswith("q"):  # the loss of quantization is reported, and the user judges it
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
        yield _check_llama_cpp(path, reloaded, tokenizer)


def _check_gguf_tensors(model: LanguageModel, path: Path) -> Check:
    """Compare every tensor, read by the gguf package, with the model's, within the error of its type."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

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
        ours = expected[name]()
        error = np.abs(dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape) - ours)
        width = 32 if ours.size % 32 == 0 else 1
        largest = np.abs(ours).reshape(-1, width).max(1)
        relative = _RELATIVE_ERRORS[tensor.tensor_type.name]
        bound = largest * relative * 1.01 + (_ABSOLUTE_ERROR if tensor.data.ndim > 1 else 0)
        if not (error.reshape(-1, width).max(1) <= bound).all():
            return Check(
                False,
                f"gguf: {name} is off by {error.max():.3g}, more than the quantization step of its type",
            )
    return Check(True, f"gguf: {len(stored)} tensors, each within the quantization step of its type")


def _check_llama_cpp(path: Path, model: LanguageModel, tokenizer: Any) -> Check:
    """Compare the greedy tokens of llama.cpp and of whet for the same file."""
    if find_spec("llama_cpp") is None:
        return Check(None, "llama.cpp: llama-cpp-python is not installed", is_required=False)
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=512, verbose=False)
    prompt = tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    llama_prompt = llama.tokenize(b"The capital of France is", add_bos=False, special=True)
    if llama_prompt != prompt:
        return Check(False, f"llama.cpp: the prompt has the tokens {llama_prompt}, but {prompt} in whet")
    theirs = [token for token, _ in zip(llama.generate(prompt, temp=0.0), range(_NEW_TOKENS), strict=False)]
    ours = _greedy_tokens(model, prompt)
    return Check(theirs == ours, f"llama.cpp: greedy tokens {theirs}, whet: {ours}")


@torch.no_grad()
def _greedy_tokens(model: LanguageModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(_NEW_TOKENS):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]
