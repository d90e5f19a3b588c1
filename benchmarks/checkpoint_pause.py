"""Measure how long saving a checkpoint pauses training: synchronously, and asynchronously from a copy.

The model has random weights and the shape of SmolLM2-135M; full training in float32 with AdamW (two moments).

    python -m benchmarks.checkpoint_pause [DIRECTORY]

writes benchmarks/results/checkpoint-pause.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from whet.config.optim import Optim
from whet.config.run import Checkpoint
from whet.models import families
from whet.models.decoder import Decoder
from whet.runs.provenance import versions
from whet.training.checkpoint import checkpoint_contents, checkpoint_path
from whet.training.checkpoint_writer import CheckpointWriter
from whet.training.optim.optimizers import create_optimizer

RESULT = Path(__file__).parent / "results" / "checkpoint-pause.json"
SAVES = 7
TOKENS = 64  # per step, so that a step is short
SHAPE: dict[str, Any] = {  # Any: JSON values
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def training_state() -> tuple[Decoder, torch.optim.Optimizer]:
    """Return the model and its optimizer after one step."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(families.FAMILIES["llama"].from_config(SHAPE), source_config=SHAPE)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
        parameter.grad = torch.randn_like(parameter)
    optimizer = create_optimizer(Optim(name="adamw"), model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def forward_and_backward(model: Decoder) -> None:
    """Compute the gradients of one step."""
    tokens = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS))
    model.hidden(tokens).square().mean().backward()


def measure(saver: CheckpointWriter, model: Decoder, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the pause of each save in milliseconds: in `save`, and before the following update."""
    pauses = []
    for step in range(1, SAVES + 2):
        started = time.perf_counter()
        saver.save(step, checkpoint_contents(model, optimizer, step, {}), best_steps=())
        pause = time.perf_counter() - started
        forward_and_backward(model)
        started = time.perf_counter()
        saver.wait_for_copy()
        pauses.append(1000 * (pause + time.perf_counter() - started))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        saver.wait()  # a real run has many steps between two saves
        assert saver.failure is None, saver.failure
    return pauses


def copy_times(saver: CheckpointWriter, model: Decoder, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the pause of each save in milliseconds if the update follows at once, without overlap."""
    times = []
    for step in range(1, SAVES + 2):
        started = time.perf_counter()
        saver.save(step, checkpoint_contents(model, optimizer, step, {}), best_steps=())
        saver.wait_for_copy()
        times.append(1000 * (time.perf_counter() - started))
        saver.wait()
    return times


def cpu_name() -> str:
    """Return the model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", help="directory for the checkpoints")
    directory = Path(tempfile.mkdtemp(dir=parser.parse_args().directory))
    model, optimizer = training_state()
    try:
        waiting = measure(
            CheckpointWriter(directory / "sync", Checkpoint(**{"async": False})), model, optimizer
        )
        saver = CheckpointWriter(directory / "async", Checkpoint())
        overlapped = measure(saver, model, optimizer)
        copies = copy_times(saver, model, optimizer)
        files = checkpoint_path(directory / "async", SAVES + 1).iterdir()
        size = sum(path.stat().st_size for path in files)
    finally:
        shutil.rmtree(directory)
    sync_ms, pause_ms = statistics.median(waiting[1:]), statistics.median(overlapped[1:])
    result = {
        "what": "time for which a save keeps the training loop; medians, the first save apart",
        "step_tokens": TOKENS,
        "parameters": sum(p.numel() for p in model.parameters()),
        "checkpoint_bytes": size,
        "saves": SAVES,
        "sync_ms": round(sync_ms, 1),
        "overlapped_ms": round(pause_ms, 1),
        "overlapped_share": round(pause_ms / sync_ms, 4),
        "copy_ms": round(statistics.median(copies[1:]), 1),
        "all_sync_ms": [round(value, 1) for value in waiting],
        "all_overlapped_ms": [round(value, 1) for value in overlapped],
        "all_copy_ms": [round(value, 1) for value in copies],
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "hardware": {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "versions": versions(),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"sync {sync_ms:.0f} ms, overlapped {pause_ms:.0f} ms ({pause_ms / sync_ms:.1%}); {RESULT}")


if __name__ == "__main__":
    main()
