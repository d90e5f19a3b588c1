"""Measure the error of 16-bit and 8-bit gradients of whet (eager and compiled) and transformers against float32.

    python -m benchmarks.gradients      writes benchmarks/results/gradients-DEVICE.json

One model (12 layers of the 135M shape on a GPU; 4 small layers on a CPU, against float64), one batch of random tokens.
The error is the relative L2 distance over all gradients.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import whet
from benchmarks.machine import describe_machine
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.hardware import choose_device, choose_precision
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.objectives.sft import SFT
from whet.recipes.model_setup import use_fp8
from whet.training.compile import compile_blocks
from whet.training.loss import autocast_context

RESULTS = Path(__file__).parent / "results"
VOCAB_SIZE = 256
WHET_CASES = {  # name: dtype of the weights, precision of the run, compiled
    "whet, bf16": (torch.float32, "bf16", False),
    "whet, bf16, compiled": (torch.float32, "bf16", True),
    "whet, bf16-pure": (torch.bfloat16, "bf16-pure", False),
    "whet, bf16-pure, compiled": (torch.bfloat16, "bf16-pure", True),
    "whet, bf16, products in fp8, compiled": (torch.float32, "bf16", True),
}


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    device = choose_device()
    small = device.type == "cpu"
    name, layers, length, rows = ("nano", 4, 64, 4) if small else ("llama-135m", 12, 512, 32)
    model = new_decoder(preset_spec(name, layers=layers, vocab_size=VOCAB_SIZE), seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # otherwise the weights of all norms would be 1
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(0, VOCAB_SIZE, (rows, length + 1), generator=generator)
    exact_loss, exact = whet_gradients(
        model, tokens, device, torch.float64 if small else torch.float32, "fp32", False
    )
    errors = {}

    def report(name, loss, gradients):
        errors[name] = {
            "gradients": distance(gradients, exact),
            "worst_matrix": max(distance({key: gradients[key]}, {key: exact[key]}) for key in exact),
            "loss": loss - exact_loss,
        }
        print(name, json.dumps(errors[name]), flush=True)

    for name, kind in WHET_CASES.items():
        report(name, *whet_gradients(model, tokens, device, *kind, fp8="fp8" in name))
    report("transformers, bf16 by autocast", *transformers_gradients(model, tokens, device))
    result = {"machine": describe_machine(), "against": "float64" if small else "float32", "errors": errors}
    (RESULTS / f"gradients-{device.type}.json").write_text(json.dumps(result, indent=1) + "\n")


def distance(gradients, exact):
    squares = sum(float((gradients[name] - exact[name]).square().sum()) for name in exact)
    return (squares / sum(float(value.square().sum()) for value in exact.values())) ** 0.5


def whet_gradients(model, tokens, device, dtype, precision, compiled, *, fp8=False):
    model = copy.deepcopy(model).to(device, dtype).requires_grad_(True).train()
    if fp8:
        use_fp8(model, "full")
    precision = choose_precision(precision, device)
    batch = make_batch([[Example(row.tolist(), [True] * len(row), "random")] for row in tokens])
    if compiled:
        print(compile_blocks(model, batch, precision))
    with autocast_context(precision, device):
        total = SFT().loss(model, batch.to(device)).sums["loss"]
    loss = total / (tokens.numel() - len(tokens))
    loss.backward()
    return float(loss.detach()), {name: p.grad.double().cpu() for name, p in model.named_parameters()}


def transformers_gradients(model, tokens, device):
    with tempfile.TemporaryDirectory() as directory:
        whet.save(model, None, directory)
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).train()
    tokens = tokens.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = reference(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return float(loss.detach()), {
        name.removeprefix("model."): p.grad.double().cpu() for name, p in reference.named_parameters()
    }


if __name__ == "__main__":
    main()
