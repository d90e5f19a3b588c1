"""Peak memory of a DPO step and of an SFT step on the same tokens: 8 x 512 of them, a model of SmolLM2-135M's shape.

    python -m benchmarks.dpo_memory [--device cuda] [--methods lora,full] [--cases sft,dpo-precomputed,dpo-online]

Each case runs in a process of its own: two steps with AdamW in float32, one micro-batch each. On a CPU the peak is that of
the process's resident memory, on a GPU that of torch's allocations. `above` is what a step needs beyond the loaded model.
It adds its cases to benchmarks/results/dpo-memory-DEVICE.json.
"""

import argparse
import copy
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from benchmarks.machine import describe_machine
from whet.adapters.attach import attach_lora
from whet.config.load_config import validate_config
from whet.data.batches import Batch, make_batch
from whet.data.tokens.examples import Example
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.objectives.objective import Objective
from whet.objectives.preference import Preference
from whet.objectives.sft import SFT
from whet.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
METHODS, CASES = ("lora", "full"), ("sft", "dpo-precomputed", "dpo-online")
ROWS, LENGTH, ANSWER, VOCABULARY = 8, 512, 256, 49152
MIB = 2**20


def the_batch() -> Batch:
    """Eight sequences, the second half of each supervised; for DPO they are four pairs, with reference numbers."""
    rng = random.Random(0)
    marks = [False] * (LENGTH + 1 - ANSWER) + [True] * ANSWER
    rows = [
        [Example([rng.randrange(VOCABULARY) for _ in marks], marks, f"row {row}", values=(-2800.0,))]
        for row in range(ROWS)
    ]
    packed = make_batch([[example for row in rows for example in row]])
    assert packed.real_tokens == ROWS * LENGTH
    return packed


def measure(method: str, case: str, device: torch.device) -> dict[str, float]:
    """The peak of two steps, and what was taken before them."""
    model = new_decoder(preset_spec("llama-135m"), seed=0).to(device)
    model.requires_grad_(method == "full")
    reference = None
    if method == "lora":
        attach_lora(model, rank=8, alpha=16)
        reference = "adapters-off" if case == "dpo-online" else None
    elif case == "dpo-online":
        reference = copy.deepcopy(model).requires_grad_(False)
    objective: Objective = SFT() if case == "sft" else Preference("dpo", beta=0.1, reference=reference)
    config = validate_config(
        {
            "model": "llama-135m",
            "data": {"train": "none"},
            "run": {"steps": 2, "batch_size": ROWS, "precision": "fp32"},
        }
    )
    batch = the_batch() if case != "sft" else replace(the_batch(), values=None)

    def batches() -> Iterator[list[Batch]]:
        while True:
            yield [batch]

    trainer = Trainer(model, objective, batches(), config)
    loaded = taken(device)
    started = time.perf_counter()
    for _ in range(2):
        trainer.step(next(trainer.stream))
    return {
        "loaded_mib": loaded / MIB,
        "peak_mib": peak(device) / MIB,
        "above_mib": (peak(device) - loaded) / MIB,
        "seconds": time.perf_counter() - started,
    }


def taken(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def peak(device: torch.device) -> int:
    """Bytes in use at most, so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure each case in its own process, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "CASE"), help="measure here, print JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one, torch.device(given.device))))
        return
    path = ROOT / "benchmarks" / "results" / f"dpo-memory-{given.device}.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    found = result.get("cases", {})
    for method in given.methods.split(","):
        for case in given.cases.split(","):
            command = [sys.executable, "-m", "benchmarks.dpo_memory", "--device", given.device, "--one"]
            done = subprocess.run(
                [*command, method, case], cwd=ROOT, capture_output=True, text=True, check=True
            )
            found[f"{method} {case}"] = json.loads(done.stdout.splitlines()[-1])
            print(method, case, found[f"{method} {case}"], flush=True)
    ratios = {
        name: {
            what: round(numbers[what] / found[f"{name.split()[0]} sft"][what], 3)
            for what in ("peak_mib", "above_mib")
        }
        for name, numbers in found.items()
        if f"{name.split()[0]} sft" in found and not name.endswith(" sft")
    }
    setting = f"{ROWS} x {LENGTH} tokens, one micro-batch, float32, AdamW, the shape of SmolLM2-135M"
    result = {"machine": describe_machine(), "setting": setting, "cases": found, "times_sft": ratios}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
