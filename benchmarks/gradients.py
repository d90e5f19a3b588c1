"""How exact gradients in 16 and 8 bits are: whet, compiled and not, and transformers, against the same in float32.

    python -m benchmarks.gradients      writes benchmarks/results/gradients-DEVICE.json

One model (12 layers of the 135M shape on a GPU, 4 small ones on a CPU, against float64), one batch of random tokens.
The error is the distance of all gradients together, over their length.
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
WORDS = 256
OURS = {  # name: dtype of the weights, precision of the run, compiled
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
    model = new_decoder(preset_spec(name, layers=layers, vocab_size=WORDS), seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # or the norms' weights would all be one
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(0, WORDS, (rows, length + 1), generator=generator)
    exact_loss, exact = ours(model, tokens, device, torch.float64 if small else torch.float32, "fp32", False)
    found = {}

    def report(name, loss, gradients):
        found[name] = {
            "gradients": distance(gradients, exact),
            "worst_matrix": max(distance({key: gradients[key]}, {key: exact[key]}) for key in exact),
            "loss": loss - exact_loss,
        }
        print(name, json.dumps(found[name]), flush=True)

    for name, kind in OURS.items():
        report(name, *ours(model, tokens, device, *kind, fp8="fp8" in name))
    report("transformers, bf16 by autocast", *theirs(model, tokens, device))
    result = {"machine": describe_machine(), "against": "float64" if small else "float32", "errors": found}
    (RESULTS / f"gradients-{device.type}.json").write_text(json.dumps(result, indent=1) + "\n")


def distance(found, exact):
    apart = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return (apart / sum(float(value.square().sum()) for value in exact.values())) ** 0.5


def ours(model, tokens, device, dtype, precision, compiled, *, fp8=False):
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


def theirs(model, tokens, device):
    with tempfile.TemporaryDirectory() as folder:
        whet.save(model, None, folder)
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    tokens = tokens.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = other(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return float(loss.detach()), {
        name.removeprefix("model."): p.grad.double().cpu() for name, p in other.named_parameters()
    }


if __name__ == "__main__":
    main()
