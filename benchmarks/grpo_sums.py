"""Benchmark GRPO on sums: run examples/grpo-sums-sft.yaml, then examples/grpo-sums.yaml on its model.

    python -m benchmarks.grpo_sums [--note TEXT]

prints the exact match on sums that are in no training set, and writes benchmarks/results/grpo.json.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import whet
from benchmarks.machine import describe_machine
from whet.config.load_config import load_config

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "grpo.json"
ROWS = (
    "step",
    "reward_mean",
    "no_signal_fraction",
    "entropy",
    "mismatch",
    "generation_tokens_per_s",
    "tokens_per_s",
)


def run(name, *overrides):
    started = time.perf_counter()
    result = whet.train(load_config(ROOT / "examples" / f"{name}.yaml", overrides))
    evaluations = [
        {"step": row["step"], "exact_match": row["exact_match"]}
        for row in result.history
        if "exact_match" in row
    ]
    print(name, evaluations, flush=True)
    return result, {"seconds": round(time.perf_counter() - started, 1), "evaluations": evaluations}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--note", default="", help="stored with the result")
    note = parser.parse_args().note
    with tempfile.TemporaryDirectory() as scratch:
        _, before = run("grpo-sums-sft", f"run.dir={scratch}")
        result, after = run("grpo-sums", f"run.dir={scratch}", f"model={scratch}/grpo-sums-sft")
    steps = [row for row in result.history if "reward_mean" in row]
    after["steps"] = [{key: row[key] for key in ROWS} for row in steps[:: max(1, len(steps) // 12)]]
    output = {
        "what": "exact match on 500 sums that were in no training set; greedy",
        "machine": describe_machine() | {"threads": torch.get_num_threads(), "note": note},
        "examples/grpo-sums-sft.yaml": before,
        "examples/grpo-sums.yaml": after,
    }
    RESULT.write_text(json.dumps(output, indent=2) + "\n")


if __name__ == "__main__":
    main()
