"""Measure the rounding error of small adapter updates in 16 bits: whet and PEFT against float32.

    python -m benchmarks.rounding      writes benchmarks/results/rounding-DEVICE.json

SmolLM2-135M, LoRA of rank 8 on all linear layers, the same initial A, the same chats in the same order, AdamW with a
constant learning rate. PEFT adds the update to an output that is already rounded, which loses updates smaller than its
precision; whet adds both, or parts of them, before rounding. Adapters are always in float32.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import whet
from benchmarks.machine import describe_machine
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.data.sources.source import open_source
from whet.data.tokens.prepare_dataset import encode_records
from whet.hardware import choose_device, choose_precision
from whet.objectives.sft import SFT
from whet.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
MODEL, RANK, ALPHA, LR, ROWS, SEED = "smollm2-135m-instruct", 8, 16.0, 2e-4, 4, 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    device = choose_device()
    _, tokenizer = whet.load(MODEL, device="cpu")
    examples = encode_records(open_source("synth:house:200"), tokenizer)
    curves = {}
    for precision in ("fp32", "bf16"):
        for who, curve in (("whet", train_whet), ("peft", train_peft)):
            stream = BatchStream(examples, StepSettings(ROWS, None, None, pack=False), seed=SEED)
            curves[f"{who}, {precision}"] = curve(stream, options.steps, precision, device)
            print(
                f"{who}, {precision}", [round(loss, 4) for loss in curves[f"{who}, {precision}"]], flush=True
            )
    base = curves["whet, fp32"]
    differences = {
        name: sum(abs(a - b) for a, b in zip(base, curve, strict=True)) / len(base)
        for name, curve in curves.items()
    }
    settings = {"lr": LR, "rank": RANK, "alpha": ALPHA, "chats_a_step": ROWS}
    result = {
        "machine": describe_machine(),
        **settings,
        "mean_distance_from_float32": differences,
        "losses": curves,
    }
    (RESULTS / f"rounding-{device.type}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(differences, indent=1))


def train_whet(stream, steps, name, device):
    precision = choose_precision(name, device)
    model, _ = whet.load(MODEL, dtype=precision.frozen, device="cpu")
    torch.manual_seed(SEED)  # on the CPU, because a GPU has other random numbers
    model = whet.attach_lora(model, rank=RANK, alpha=ALPHA).to(device)
    config = validate_config(
        {
            "model": MODEL,
            "data": {"train": "none"},
            "optim": {"lr": LR, "weight_decay": 0.0, "clip": None, "schedule": "constant", "warmup": 0},
            "run": {"name": "rounding", "steps": steps, "batch_size": ROWS, "device": str(device)},
        }
    )
    trainer = Trainer(model, SFT(), stream, config, precision=precision)
    return [row["loss"] for row in trainer.fit().history if "loss" in row]


def train_peft(stream, steps, name, device):
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    base, _ = whet.load(MODEL, dtype=torch.float32, device="cpu")
    torch.manual_seed(SEED)
    whet.attach_lora(base, rank=RANK, alpha=ALPHA)
    initial_a = {key: p.detach() for key, p in base.named_parameters() if key.endswith("lora_A")}
    model = AutoModelForCausalLM.from_pretrained(base.source, dtype=dtype).to(device)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = get_peft_model(model, settings)
    parameters = dict(model.named_parameters())
    for key, value in initial_a.items():
        parameters[f"base_model.model.model.{key}.default.weight"].data.copy_(value)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        total = 0.0
        batches = next(stream)
        units = sum(batch.supervised for batch in batches)
        for batch in batches:
            with torch.autocast(device.type, dtype=dtype, enabled=name == "bf16"):
                logits = model(batch.tokens.to(device)).logits
            supervised = batch.supervised_positions.to(device)
            targets = batch.targets.to(device).flatten()[supervised]
            loss = F.cross_entropy(logits.flatten(0, 1)[supervised].float(), targets, reduction="sum") / units
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


if __name__ == "__main__":
    main()
