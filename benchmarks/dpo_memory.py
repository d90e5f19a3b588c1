"""Compare the peak memory of DPO and SFT steps on the same 8 x 512 tokens, with the shape of SmolLM2-135M.

    python -m benchmarks.dpo_memory [--device cuda] [--methods lora,full] [--cases sft,dpo-precomputed,dpo-online]

Each case runs in a separate process: two steps with AdamW in float32, one micro-batch each. On a CPU the peak is the
process's resident memory, on a GPU torch's allocated memory. `above` is the memory of a step without the loaded model.
The cases are added to benchmarks/results/dpo-memory-DEVICE.json.
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
ROWS, LENGTH, ANSWER, VOCAB_SIZE = 8, 512, 256, 49152
MIB = 2**20


def make_dpo_batch() -> Batch:
    """Return eight sequences with a supervised second half; for DPO, four pairs with reference log-probabilities."""
    rng = random.Random(0)
    loss_mask = [False] * (LENGTH + 1 - ANSWER) + [True] * ANSWER
    rows = [
        [Example([rng.randrange(VOCAB_SIZE) for _ in loss_mask], loss_mask, f"row {row}", values=(-2800.0,))]
        for row in range(ROWS)
    ]
    packed = make_batch([[example for row in rows for example in row]])
    assert packed.real_tokens == ROWS * LENGTH
    return packed


def measure(method: str, case: str, device: torch.device) -> dict[str, float]:
    """Return the peak memory of two steps, and the memory in use before them."""
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
    batch = make_dpo_batch() if case != "sft" else replace(make_dpo_batch(), columns={})

    def batches() -> Iterator[list[Batch]]:
        while True:
            yield [batch]

    trainer = Trainer(model, objective, batches(), config)
    loaded = memory_in_use(device)
    started = time.perf_counter()
    for _ in range(2):
        trainer.step(next(trainer.stream))
    return {
        "loaded_mib": loaded / MIB,
        "peak_mib": peak_memory(device) / MIB,
        "above_mib": (peak_memory(device) - loaded) / MIB,
        "seconds": time.perf_counter() - started,
    }


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def peak_memory(device: torch.device) -> int:
    """Return the peak of the bytes in use."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure each case in its own process, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--one", nargs=2, metavar=("METHOD", "CASE"), help="measure in this process, and print JSON"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, torch.device(options.device))))
        return
    path = ROOT / "benchmarks" / "results" / f"dpo-memory-{options.device}.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    cases = result.get("cases", {})
    for method in options.methods.split(","):
        for case in options.cases.split(","):
            command = [sys.executable, "-m", "benchmarks.dpo_memory", "--device", options.device, "--one"]
            done = subprocess.run(
                [*command, method, case], cwd=ROOT, capture_output=True, text=True, check=True
            )
            cases[f"{method} {case}"] = json.loads(done.stdout.splitlines()[-1])
            print(method, case, cases[f"{method} {case}"], flush=True)
    ratios = {
        name: {
            key: round(values[key] / cases[f"{name.split()[0]} sft"][key], 3)
            for key in ("peak_mib", "above_mib")
        }
        for name, values in cases.items()
        if f"{name.split()[0]} sft" in cases and not name.endswith(" sft")
    }
    setting = f"{ROWS} x {LENGTH} tokens, one micro-batch, float32, AdamW, the shape of SmolLM2-135M"
    result = {"machine": describe_machine(), "setting": setting, "cases": cases, "times_sft": ratios}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
