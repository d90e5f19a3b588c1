"""Compare the peak memory that `whet plan` predicts with the measured one.

    python -m benchmarks.plan_memory [--device cuda] [--compile] [--cases small-full,...]

Each case trains for two steps. On a CPU the peak is the process's resident memory above its value before the model was
built, with a malloc that returns freed memory; on a GPU it is torch's allocated memory. The predictions were not fitted
to these cases. The cases are added to benchmarks/results/plan-memory-DEVICE.json.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe_machine
from whet.adapters.attach import make_trainable
from whet.adapters.nf4 import bitsandbytes_functional
from whet.adapters.qlora import quantize_base
from whet.config.load_config import validate_config
from whet.config.run_config import RunConfig
from whet.data.batches import Batch, make_batch
from whet.data.tokens.examples import Example
from whet.hardware import choose_precision
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.objectives.sft import SFT
from whet.planning.plan import Memory, plan_run
from whet.training.compile import compile_blocks
from whet.training.trainer import Trainer

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """The shape of a model, the training method, and the documents of a micro-batch."""

    shape: dict[str, Any]
    method: str
    documents: int
    length: int
    micro_batches: int = 1
    data: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


_WIDE = {"d_model": 640, "layers": 2, "heads": 10, "kv_heads": 5, "width": 1792, "vocab_size": 8192}
_DEEP = {"d_model": 256, "layers": 8, "heads": 4, "width": 704, "vocab_size": 4096}
_WORDS = {"d_model": 256, "layers": 2, "heads": 4, "width": 704, "vocab_size": 32768}
_RECOMPUTED = {"grad_checkpoint": True}
CASES: dict[str, Case] = {
    "wide-full": Case(_WIDE, "full", documents=2, length=256),
    "wide-lora": Case(_WIDE, "lora", documents=4, length=256),
    "wide-sgd": Case(_WIDE, "full", documents=1, length=256, optim={"name": "sgd"}),
    "deep-full": Case(_DEEP, "full", documents=2, length=256),
    "deep-full-checkpoint": Case(_DEEP, "full", documents=4, length=256, run=_RECOMPUTED),
    "deep-lora": Case(_DEEP, "lora", documents=2, length=384),
    "deep-lora-checkpoint": Case(_DEEP, "lora", documents=4, length=512, run=_RECOMPUTED),
    "words-full": Case(_WORDS, "full", documents=2, length=256),
    "words-lora": Case(_WORDS, "lora", documents=3, length=256),
    "accumulated": Case(_WIDE, "full", documents=2, length=128, micro_batches=2),
    "padded-full": Case(_DEEP, "full", documents=4, length=256, data={"pack": False}),
    "wide-lion": Case(_WIDE, "full", documents=1, length=256, optim={"name": "lion"}),
    "wide-adafactor": Case(_WIDE, "full", documents=1, length=256, optim={"name": "adafactor"}),
    "wide-muon": Case(_WIDE, "full", documents=1, length=256, optim={"name": "muon"}),
    "experts-full": Case({**_WIDE, "width": 512, "experts": 8}, "full", documents=2, length=256),
    "experts-checkpoint": Case(
        {**_DEEP, "width": 512, "experts": 4}, "full", documents=4, length=256, run=_RECOMPUTED
    ),
    "latent-full": Case({**_DEEP, "attention": "latent"}, "full", documents=4, length=256),
    "window-lora": Case(
        {**_DEEP, "attention": "window", "window": 64}, "lora", documents=8, length=256, run=_RECOMPUTED
    ),
    "wide-qlora": Case(_WIDE, "qlora", documents=4, length=256),
}
QUICK = (
    "wide-full",
    "wide-lora",
    "wide-sgd",
    "deep-full",
    "deep-full-checkpoint",
    "deep-lora",
    "words-full",
    "words-lora",
)
GPU_DOCUMENTS = 8  # factor for the documents on a GPU
RESULTS = Path(__file__).parent / "results"
# glibc retains freed memory; with these thresholds it returns it, so that resident memory is the memory in use
PLAIN_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def config_of(case: Case, *, device: str, compiled: bool = False) -> RunConfig:
    """Return the config of a case. Adapters need a pretrained model, so a placeholder name stands for its shape."""
    tokens = case.documents * case.length
    return validate_config(
        {
            "model": "the shape of the case",
            "method": {"kind": case.method, "rank": 16},
            "data": {"train": "none", "max_length": case.length + 1, **case.data},
            "optim": case.optim,
            "run": {
                "steps": 2,
                "batch_tokens": tokens * case.micro_batches,
                "micro_batch_tokens": tokens,
                "device": device,
                "precision": "fp32" if device == "cpu" else "auto",  # the same on every CPU
                "compile": compiled,
                **case.run,
            },
        }
    )


def measure(case: Case, *, device: torch.device, compiled: bool = False) -> float:
    """Return the peak MiB of two steps above the memory in use before the model was built."""
    config = config_of(case, device=device.type, compiled=compiled)
    precision = choose_precision(config.run.precision, device)
    before = _memory_in_use(device)
    _reset_peak(device)
    model = new_decoder(preset_spec("nano", **case.shape), seed=0)
    if case.method == "qlora":
        quantize_base(model, device=device, dtype=precision.frozen)
    model.to(device, precision.trained if case.method == "full" else precision.frozen)
    make_trainable(model, config.method, dtype=precision.trained)
    model.grad_checkpoint = config.run.grad_checkpoint
    if compiled:
        compile_blocks(model, _batch(case), precision)
    first = _batch(replace(case, documents=1, length=16))  # creates the state of the optimizer
    trainer = Trainer(model, SFT(), iter(()), config, precision=precision)
    trainer.step([first])
    _reset_peak(device)
    trainer.step([_batch(case)] * case.micro_batches)
    return (_peak_memory(device) - before) / MIB


def predict(case: Case, *, device: str, compiled: bool = False) -> Memory:
    """Return the memory that `whet plan` predicts for the same run."""
    config = config_of(case, device=device, compiled=compiled)
    return plan_run(config, spec=preset_spec("nano", **case.shape), suggest=False).memory


def _batch(case: Case) -> Batch:
    rng = np.random.default_rng(0)
    examples = [
        Example(
            rng.integers(0, case.shape["vocab_size"], case.length + 1),
            np.ones(case.length + 1, bool),
            f"{row}",
        )
        for row in range(case.documents)
    ]
    return make_batch([examples] if case.data.get("pack", True) else [[example] for example in examples])


def _warm_up(device: torch.device) -> None:
    """Train one small step, because a plan does not include the buffers that libraries allocate in the first one."""
    bitsandbytes_functional()
    shape = {"d_model": 64, "layers": 2, "heads": 2, "width": 64, "vocab_size": 256}
    measure(Case(shape, "lora", documents=2, length=32, run=_RECOMPUTED), device=device)


def _memory_in_use(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else _status("VmRSS")


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; ru_maxrss is inherited from the parent


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def compare(name: str, *, device: str, compiled: bool = False) -> dict[str, Any]:  # Any: JSON values
    """Return the measured and the predicted memory of one case."""
    case = CASES[name]
    if device == "cuda":
        case = replace(case, documents=case.documents * GPU_DOCUMENTS)
    started = time.perf_counter()
    measured = measure(case, device=torch.device(device), compiled=compiled)
    trained = time.perf_counter()
    memory = predict(case, device=device, compiled=compiled)
    return {
        "measured_mib": round(measured, 1),
        "predicted_mib": round(memory.peak / MIB, 1),
        "ratio": round(memory.peak / MIB / measured, 3),
        "peak_at": memory.at,
        "parts_mib": {part: round(size / MIB, 1) for part, size in memory.components().items() if size},
        "seconds": round(trained - started, 1),
        "plan_seconds": round(time.perf_counter() - trained, 1),
    }


def main() -> None:
    """Compare all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--cases", help="comma-separated names; default: all, or with --compile the quick ones"
    )
    parser.add_argument(
        "--rows", action="store_true", help="print one JSON object per case, and write no file"
    )
    options = parser.parse_args()
    if options.device == "cpu" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.plan_memory", *sys.argv[1:]],
            os.environ | PLAIN_MALLOC,
        )
    _warm_up(torch.device(options.device))
    results = {}
    names = options.cases.split(",") if options.cases else QUICK if options.compile else CASES
    for name in names:
        row = results[name] = compare(name, device=options.device, compiled=options.compile)
        torch._dynamo.reset()
        if options.rows:
            print(json.dumps({"case": name, **row}), flush=True)
        else:
            print(
                f"{name:<22} measured {row['measured_mib']:8.1f} MiB, predicted {row['predicted_mib']:8.1f}"
                f"  x {row['ratio']:.3f}  (peak in the {row['peak_at']}; {row['seconds']} + {row['plan_seconds']} s)",
                flush=True,
            )
    if options.rows:
        return
    path = RESULTS / f"plan-memory-{options.device}{'-compile' * options.compile}.json"
    earlier = json.loads(path.read_text())["cases"] if path.is_file() else {}
    results = {name: {**earlier, **results}[name] for name in CASES if name in {**earlier, **results}}
    worst = max(abs(row["ratio"] - 1) for row in results.values())
    result = {"machine": describe_machine(), "worst": round(worst, 3), "cases": results}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{len(results)} cases, at most {100 * worst:.1f}% off; {path.name}")


if __name__ == "__main__":
    main()
