"""Compare training curves on real text: transformers, whet, whet compiled, whet with FP8 matmuls.

One model (a llama shape, random weights), the same batches in the same order, AdamW, 200 steps on the documentation
that comes with Python. If whet is correct, its curve equals that of transformers up to rounding.

    python -m benchmarks.curves [--small]      writes benchmarks/results/curves.json (and curves.png with matplotlib)

`--small` uses a small model and fewer steps, for a CPU.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import whet
from benchmarks.machine import describe_machine
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.data.synthetic.generators import generate
from whet.data.tokens.examples import Example
from whet.hardware import choose_device, choose_precision
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.objectives.sft import SFT
from whet.recipes.model_setup import use_fp8
from whet.training.compile import compile_blocks
from whet.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
LR, WARMUP, SEED, BETAS = 6e-4, 20, 0, (0.9, 0.95)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "curves.json")
    options = parser.parse_args()
    device = choose_device()
    shape = {"layers": 2, "d_model": 128, "heads": 4, "width": 384} if options.small else {"layers": 12}
    length, rows, steps = (64, 8, 30) if options.small else (512, 32, 200)
    name = "nano" if options.small else "llama-135m"
    spec = preset_spec(name, **shape, vocab_size=256)
    examples = windows(length)
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        whet.save(new_decoder(spec, seed=SEED), None, directory)
        kinds = ["transformers", "whet"] + ["whet-compiled"] * (device.type == "cuda") + ["whet-fp8"]
        for kind in kinds:
            stream = BatchStream(examples, StepSettings(rows, None, rows * length, pack=False), seed=SEED)
            curve = train_transformers if kind == "transformers" else train_whet
            curves[kind] = curve(directory, stream, steps, device, kind)
            print(kind, f"{curves[kind][0]:.4f} -> {sum(curves[kind][-10:]) / 10:.4f}", flush=True)
            result = {"machine": describe_machine(), "tokens_a_step": rows * length, "steps": steps}
            result |= {"apart": differences(curves), "curves": curves}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(differences(curves), indent=1))
    plot(curves, options.out.with_suffix(".png"))


def differences(curves):
    """Return the differences between each curve and that of transformers."""
    base = curves["transformers"]
    return {
        kind: {
            "largest": max(abs(a - b) for a, b in zip(base, curve, strict=True)),
            "last_20_mean": (sum(curve[-20:]) - sum(base[-20:])) / 20,
        }
        for kind, curve in curves.items()
    }


def windows(length):
    """Return Python's documentation as examples of `length` bytes."""
    text = "\n".join(record["text"] for record in generate("synth:python-topics")).encode()
    starts = range(0, len(text) - length - 1, length)
    return [Example(list(text[s : s + length + 1]), [True] * (length + 1), "topics") for s in starts]


def learning_rate(step):
    return LR * min(1.0, step / WARMUP)


def train_whet(directory, stream, steps, device, kind):
    precision = choose_precision("bf16" if device.type == "cuda" else "fp32", device)
    model, _ = whet.load(directory, dtype=precision.trained, device=device)
    model.requires_grad_(True)
    if kind == "whet-fp8":
        use_fp8(model, "full")
    if device.type == "cuda" and kind != "whet":
        compile_blocks(model, stream.peek()[0], precision)
    config = validate_config(
        {
            "model": "random",
            "method": {"kind": "full"},
            "data": {"train": "none"},
            "optim": {
                "lr": LR,
                "weight_decay": 0.1,
                "betas": BETAS,
                "clip": 1.0,
                "schedule": "constant",
                "warmup": WARMUP,
            },
            "run": {"name": "curve", "steps": steps, "batch_size": 1, "device": str(device)},
        }
    )
    trainer = Trainer(model, SFT(), stream, config, precision=precision)
    return [row["loss"] for row in trainer.fit().history if "loss" in row]


def train_transformers(directory, stream, steps, device, _):
    """Train with a plain loop: bf16 autocast on a GPU; as in whet, no weight decay of embeddings and norms."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).train()
    embeddings = {id(p) for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    decays = {id(p): p.dim() > 1 and id(p) not in embeddings for p in model.parameters()}
    matrices = [p for p in model.parameters() if decays[id(p)]]
    undecayed = [p for p in model.parameters() if not decays[id(p)]]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    losses = []
    for step in range(1, steps + 1):
        (batch,) = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch.tokens.to(device)).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.to(device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def plot(curves, path):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=kind, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
