"""Measure what each GGUF type costs: the file's size, and the logits of llama.cpp against whet in float32.

    python -m benchmarks.gguf                 writes benchmarks/results/gguf.json
    python -m benchmarks.gguf --types q8_0    measures these types only, and keeps the other results

SmolLM2-135M-Instruct, on windows of Python's language reference. llama.cpp opens each file and computes the logits. The
importance matrix is measured on other pages of the same reference.
"""

import argparse
import importlib.metadata
import json
import struct
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

import whet
from benchmarks.machine import describe_machine
from whet.model_io.gguf.llama_cpp_process import run_llama_cpp
from whet.model_io.gguf.quantize import K_QUANTS
from whet.model_io.gguf.tensor_names import build_skeleton, tensor_slots
from whet.model_io.gguf.writer import GGUF_KINDS, describe_language_model, write_gguf

RESULTS = Path(__file__).parent / "results"
MODEL, WINDOW, WINDOWS = "smollm2-135m-instruct", 128, 8
TYPES = [*GGUF_KINDS, *(f"{kind}+imatrix" for kind in K_QUANTS)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=TYPES, choices=TYPES)
    options = parser.parse_args()
    model, tokenizer = whet.load(MODEL, dtype=torch.float32, device="cpu")
    tokens = tokenizer("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    stride = len(tokens) // (2 * WINDOWS)
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - stride, stride)]
    windows, calibration = windows[0::2], windows[1::2]
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([window]))[0] for window in windows]).log_softmax(-1)
    rows = {"whet, float32": {"perplexity": perplexity(expected, windows)}}
    with tempfile.TemporaryDirectory() as directory:
        imatrix = Path(directory) / "imatrix.dat"
        write_imatrix(imatrix, model, calibration)
        for kind in options.types:
            path = Path(directory) / "model.gguf"
            gguf_type, _, with_imatrix = kind.partition("+")
            write_gguf(path, model, tokenizer, kind=gguf_type, imatrix=imatrix if with_imatrix else None)
            logits = np.concatenate(run_llama_cpp(path, token_lists=windows).logits)
            rows[kind] = {"megabytes": path.stat().st_size / 1e6, **measure(expected, logits, windows)}
            print(kind, rows[kind], flush=True)
            path.unlink()
            write_results(rows, windows, calibration)


def write_results(rows, windows, calibration):
    path = RESULTS / "gguf.json"
    before = json.loads(path.read_text())["types"] if path.is_file() else {}
    merged = before | rows
    versions = {name: importlib.metadata.version(name) for name in ("gguf", "llama_cpp_python")}
    result = {
        "machine": describe_machine() | versions,
        "model": MODEL,
        "tokens": len(windows) * WINDOW,
        "calibration_tokens": len(calibration) * WINDOW,
        "types": {kind: merged[kind] for kind in ["whet, float32", *TYPES] if kind in merged},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def measure(expected, logits, windows):
    """Compare log-probabilities [tokens, vocabulary] with logits of the same shape."""
    actual = torch.from_numpy(logits).log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    return {
        "perplexity": perplexity(actual, windows),
        "mean_kl": divergence.mean().item(),
        "same_most_likely_token": (expected.argmax(-1) == actual.argmax(-1)).float().mean().item(),
        "opened_by_llama_cpp": True,  # otherwise there would be no logits
    }


def perplexity(log_probabilities, windows):
    blocks = log_probabilities.view(len(windows), WINDOW, -1)
    targets = torch.tensor(windows)[:, 1:, None]
    return (-blocks[:, :-1].gather(-1, targets).mean()).exp().item()


@torch.no_grad()
def write_imatrix(path, model, windows):
    """Write the mean squared inputs of each linear layer in llama.cpp's binary format."""
    described = describe_language_model(model)
    slots = tensor_slots(build_skeleton(described.spec), described.architecture)
    names = {slot.parameter: name for name, slot in slots.items()}
    sums = {}

    def add(name):
        def hook(_, inputs):
            squares = inputs[0].flatten(0, -2).double().square().sum(0)
            sums[name] = sums.get(name, 0) + squares

        return hook

    layers = {
        name: module
        for name, module in model.named_modules()
        if f"{name}.weight" in names and "_proj" in name
    }
    hooks = [module.register_forward_pre_hook(add(f"{name}.weight")) for name, module in layers.items()]
    for window in windows:
        model(torch.tensor([window]))
    for hook in hooks:
        hook.remove()
    count = len(windows) * WINDOW
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(sums)))
        for parameter, total in sums.items():
            name = names[parameter].encode()
            file.write(struct.pack("<i", len(name)) + name + struct.pack("<ii", count, len(total)))
            file.write(total.float().numpy().tobytes())


if __name__ == "__main__":
    main()
