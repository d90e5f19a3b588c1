"""Exports opened again with the library they are for, and compared with the model they were made from."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any  # everywhere below: models and tokenizers of libraries without types

import numpy as np
import torch

from whet.adapters.nf4 import NF4Linear
from whet.model_io.export.export_model import Loaded
from whet.model_io.export.logit_difference import SAMPLE, TOLERANCES, compare_logits
from whet.model_io.load import load
from whet.models.language_model import LanguageModel

# Error of each GGUF type, relative to the largest number of a block of 32: half a step for q8_0, a whole one
# for q4_0, which has no +8, and for both the rounding of the scale to 11 bits.
_STEPS = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.5 / 127 + 2**-11, "Q4_0": 1 / 8 + 2**-11}
_SMALLEST = 1e-6  # of a block's largest number: fp16 scales of tiny blocks lose more bits
_NEW_TOKENS = 16
_NO_DIRECTORY = "its base is an adapter or a checkpoint, which {} cannot open: whet merge it first"


@dataclass(frozen=True)
class Check:
    """One comparison: passed, failed, or (None) not possible here, and the reason in words."""

    passed: bool | None
    text: str
    needed: bool = True  # the export counts as checked only with it

    @property
    def failed(self) -> bool:
        """Whether the export cannot be trusted."""
        return self.passed is False or (self.passed is None and self.needed)

    def __str__(self) -> str:
        return f"{ {True: 'checked', False: 'CHECK FAILED', None: 'not checked'}[self.passed] }: {self.text}"


def check_export(
    loaded: Loaded,
    path: Path,
    layout: str,
    *,
    dtype: torch.dtype,
    kind: str = "",
    tolerance: float | None = None,
) -> list[Check]:
    """Open what was written and compare it with what the model computed before it was written."""
    narrow = {"f16": torch.float16, "bf16": torch.bfloat16}
    stored = {"hf": dtype, "gguf": narrow.get(kind, torch.float32)}.get(layout, torch.float32)
    allowed = TOLERANCES[stored] if tolerance is None else tolerance
    try:
        if layout == "gguf":
            return list(_check_gguf(loaded, path, kind=kind, allowed=allowed))
        return [{"hf": _check_hf, "peft": _check_peft, "mlx": _check_mlx}[layout](loaded, path, allowed)]
    except Exception as error:  # whatever another library makes of it: that is the answer
        return [Check(False, f"it cannot be opened: {type(error).__name__}: {error}")]


def _against(loaded: Loaded, logits: torch.Tensor, allowed: float, reader: str) -> Check:
    difference = compare_logits(loaded.logits, logits)
    return Check(difference.largest <= allowed, f"{reader}: {difference} ({allowed:g} is allowed)")


def _transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()


def _check_hf(loaded: Loaded, path: Path, allowed: float) -> Check:
    with torch.no_grad():
        logits = _transformers_model(path)(loaded.tokens).logits
    return _against(loaded, logits, allowed, "transformers")


def _check_peft(loaded: Loaded, path: Path, allowed: float) -> Check:
    if find_spec("peft") is None:
        return Check(None, "peft is not installed")
    from peft import PeftModel

    if loaded.base_directory is None:
        return Check(None, _NO_DIRECTORY.format("PEFT"))
    base = _transformers_model(loaded.base_directory)
    quantised = _put_what_was_seen(loaded.model, base)
    with torch.no_grad():
        model = PeftModel.from_pretrained(base, path)
        logits = model.eval()(input_ids=loaded.tokens).logits
    return _against(loaded, logits, allowed, f"PEFT{' on the dequantised base' if quantised else ''}")


@torch.no_grad()
def _put_what_was_seen(model: LanguageModel, base: Any) -> bool:
    """Give PEFT's base the 4-bit weights that an adapter was trained on; whether there are any."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, NF4Linear)}
    for name, layer in layers.items():
        ours = name.removesuffix(".base")
        theirs = base.get_submodule(model.hf_name(ours)).weight
        theirs.copy_(model.as_stored(f"{ours}.weight", layer.weight))
    return bool(layers)


def _check_mlx(loaded: Loaded, path: Path, allowed: float) -> Check:
    if find_spec("mlx_lm") is None:
        return Check(None, "mlx_lm is not installed")
    import mlx.core as mx
    import mlx_lm

    if loaded.base_directory is None:
        return Check(None, _NO_DIRECTORY.format("mlx-lm"))
    model, _ = mlx_lm.load(str(loaded.base_directory), adapter_path=str(path))
    logits = model(mx.array(loaded.tokens.tolist())).astype(mx.float32)
    return _against(loaded, torch.from_numpy(np.array(logits)), allowed, "mlx-lm")


def _check_gguf(loaded: Loaded, path: Path, *, kind: str, allowed: float) -> Iterator[Check]:
    yield _check_gguf_tensors(loaded.model, path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".check-") as room:
        from whet.model_io.gguf.reader import convert_gguf

        convert_gguf(path, Path(room) / "model")
        again, tokenizer = load(Path(room) / "model", dtype=torch.float32, device="cpu")
        with torch.no_grad():
            difference = compare_logits(loaded.logits, again(loaded.tokens))
        if kind.startswith("q"):  # what a quantisation costs is for people to judge
            yield Check(True, f"read back by whet: {difference}")
        else:
            passed = difference.largest <= allowed
            yield Check(passed, f"read back by whet: {difference} ({allowed:g} is allowed)")
        same = tokenizer(SAMPLE)["input_ids"] == loaded.tokenizer(SAMPLE)["input_ids"]
        template = tokenizer.chat_template == loaded.tokenizer.chat_template
        yield Check(
            same and template,
            f"tokens {'equal' if same else 'differ'}, chat template {'equal' if template else 'differs'}",
        )
        yield _check_llama_cpp(path, again, tokenizer)


def _check_gguf_tensors(model: LanguageModel, path: Path) -> Check:
    """Every tensor as the gguf package reads it, against the model's own, within the step of its type."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    from whet.model_io.gguf.writer import llama_values

    expected, found = llama_values(model), {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    if expected.keys() != found.keys():
        odd = sorted(expected.keys() ^ found.keys())
        return Check(False, f"gguf: {len(odd)} tensors are not on both sides: {', '.join(odd[:4])}")
    for name, tensor in found.items():
        ours = expected[name]()
        error = np.abs(dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape) - ours)
        width = 32 if ours.size % 32 == 0 else 1
        largest = np.abs(ours).reshape(-1, width).max(1)
        bound = largest * _STEPS[tensor.tensor_type.name] * 1.01 + (_SMALLEST if tensor.data.ndim > 1 else 0)
        if not (error.reshape(-1, width).max(1) <= bound).all():
            return Check(False, f"gguf: {name} is off by {error.max():.3g}, more than a step of its type")
    return Check(True, f"gguf: {len(found)} tensors, each within a step of its type")


def _check_llama_cpp(path: Path, model: LanguageModel, tokenizer: Any) -> Check:
    """Greedy tokens of llama.cpp and of whet, from the same file."""
    if find_spec("llama_cpp") is None:
        return Check(None, "llama.cpp: llama-cpp-python is not installed", needed=False)
    from llama_cpp import Llama

    theirs = Llama(str(path), n_ctx=512, verbose=False)
    prompt = tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    asked = theirs.tokenize(b"The capital of France is", add_bos=False, special=True)
    if asked != prompt:
        return Check(False, f"llama.cpp: the prompt has the tokens {asked}, and {prompt} here")
    written = [token for token, _ in zip(theirs.generate(prompt, temp=0.0), range(_NEW_TOKENS), strict=False)]
    ours = _greedy(model, prompt)
    return Check(written == ours, f"llama.cpp: greedy tokens {written}, and {ours} here")


@torch.no_grad()
def _greedy(model: LanguageModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(_NEW_TOKENS):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]
