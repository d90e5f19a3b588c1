"""Run llama.cpp on a GGUF file in a process of its own, because it aborts on a file that it cannot use."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.errors import ConfigError, ModelError

_MODULE = "whet.model_io.gguf.llama_cpp_process"


@dataclass(frozen=True)
class LlamaCppOutput:
    """What llama.cpp computed for a file."""

    tokens: list[list[int]]  # of each text, without BOS
    logits: list[NDArray[np.float32]]  # [T, vocabulary] for each list of tokens
    completions: list[list[int]]  # greedy tokens after each prompt
    chat_template: str | None


def has_llama_cpp() -> bool:
    """Return whether llama-cpp-python is installed."""
    return find_spec("llama_cpp") is not None


def require_llama_cpp(purpose: str) -> None:
    """Raise ConfigError if llama-cpp-python is not installed."""
    if not has_llama_cpp():
        raise ConfigError(
            f"{purpose} needs llama.cpp, but llama-cpp-python is not installed",
            hint="pip install 'whet[llama-cpp]'",
        )


def run_llama_cpp(
    path: str | Path,
    *,
    texts: Sequence[str] = (),
    token_lists: Sequence[Sequence[int]] = (),
    prompts: Sequence[Sequence[int]] = (),
    new_tokens: int = 0,
    adapter: str | Path | None = None,
) -> LlamaCppOutput:
    """Load a file with llama.cpp, and compute with it.

    Args:
        path: The GGUF file.
        texts: Texts to tokenize. Special tokens in them are recognized, and no BOS token is added.
        token_lists: Tokens to compute logits for, with float32 keys and values.
        prompts: Tokens to continue greedily.
        new_tokens: The number of tokens to add to each prompt.
        adapter: A GGUF adapter to apply.

    Raises:
        ModelError: If llama.cpp cannot load the file.
    """
    require_llama_cpp("opening a GGUF file with llama.cpp")
    with tempfile.TemporaryDirectory(prefix="whet-llama-cpp-") as directory:
        request: dict[str, Any] = {  # Any: JSON values
            "model": str(path),
            "adapter": None if adapter is None else str(adapter),
            "texts": list(texts),
            "token_lists": [list(map(int, tokens)) for tokens in token_lists],
            "prompts": [list(map(int, tokens)) for tokens in prompts],
            "new_tokens": new_tokens,
            "output": directory,
        }
        run_module(_MODULE, request, f"llama.cpp cannot use {path}")
        answer = json.loads((Path(directory) / "answer.json").read_text())
        with np.load(Path(directory) / "logits.npz") as arrays:
            logits = [arrays[f"logits{index}"] for index in range(len(request["token_lists"]))]
    return LlamaCppOutput(answer["tokens"], logits, answer["completions"], answer["chat_template"])


def run_module(module: str, request: dict[str, Any], problem: str) -> None:  # Any: JSON values
    """Run a module in another process with a JSON request, and raise ModelError if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        check=False,
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "ASSERT" in line]
        reason = (telling or lines or [f"exit code {result.returncode}"])[0 if telling else -1]
        raise ModelError(f"{problem}: {reason.strip()[:300]}")


def _answer(request: dict[str, Any]) -> None:  # Any: JSON values
    import llama_cpp

    lists, prompts, new_tokens = request["token_lists"], request["prompts"], request["new_tokens"]
    lengths = [*(len(tokens) for tokens in lists), *(len(tokens) + new_tokens for tokens in prompts)]
    size = max(lengths, default=0) + 8
    float32 = llama_cpp.GGML_TYPE_F32
    threads = max((os.cpu_count() or 1) // 2, 1)  # they wait for each other in a loop, so cores must be free
    model = llama_cpp.Llama(
        request["model"],
        lora_path=request["adapter"],
        n_ctx=size,
        n_batch=size,
        n_ubatch=size,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=bool(lists),
        flash_attn=False,
        type_k=float32,
        type_v=float32,
        swa_full=True,
        verbose=True,  # the reason of a failure is on stderr
    )
    arrays, completions = {}, []
    for index, tokens in enumerate(lists):
        model.reset()
        model.eval(tokens)
        arrays[f"logits{index}"] = np.array(model.scores[: len(tokens)], np.float32)
    for prompt in prompts:
        model.reset()
        generated = model.generate(prompt, temp=0.0)
        completions.append([token for token, _ in zip(generated, range(new_tokens), strict=False)])
    answer = {
        "tokens": [model.tokenize(text.encode(), add_bos=False, special=True) for text in request["texts"]],
        "completions": completions,
        "chat_template": model.metadata.get("tokenizer.chat_template"),
    }
    np.savez(Path(request["output"]) / "logits.npz", **arrays)  # type: ignore[arg-type]  # numpy's stubs
    (Path(request["output"]) / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    _answer(json.load(sys.stdin))
