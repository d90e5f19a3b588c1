"""Measure memory per rank and speed of one run on 1, 2, 4 ... processes, replicated (DDP) and sharded (FSDP).

    python -m benchmarks.scale --sizes 1 2 4 --out benchmarks/results/scale-cpu.json
    python -m benchmarks.scale --device cuda --sizes 1 2 4 8 --model llama-1b --batch-tokens 65536

Weights and moments are computed from the sizes of a rank's shards. The peak is the allocator's on a GPU, and the
process's on a CPU, where torch itself is the largest part.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.machine import describe_machine

KINDS = ("ddp", "fsdp")


def measure(kind, size, options, directory):
    config = {
        "model": {"preset": options.model},
        "method": {"kind": "full"},
        "data": {"train": "synth:python-topics", "max_length": 512, "too_long": "split"},
        "run": {
            "name": f"{kind}-{size}",
            "dir": str(directory),
            "steps": options.steps,
            "batch_tokens": options.batch_tokens,
            "micro_batch_tokens": options.micro_batch_tokens,
            "device": options.device,
        },
        "checkpoint": {"every": None},
        "parallel": {"kind": kind},
    }
    path = directory / f"{kind}-{size}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "whet", "train", str(path), "--nproc", str(size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = directory / f"{kind}-{size}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row][options.steps // 2 :]
    line = next((line for line in (run / "log.txt").read_text().splitlines() if "a rank has" in line), None)
    return {
        "kind": kind,
        "processes": size,
        "weights_mib_a_rank": None if line is None else float(line.split("a rank has ")[1].split()[0]),
        "peak_gib_rank_0": steps[-1]["peak_gib"],
        "tokens_per_s": round(statistics.median(row["tokens_per_s"] for row in steps), 1),
        "loss": steps[-1]["loss"],
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for size in options.sizes:
            for kind in KINDS if size > 1 else KINDS[:1]:
                results.append(measure(kind, size, options, Path(directory)))
                print(json.dumps(results[-1]))
    if options.out is not None:
        shown = {name: value for name, value in vars(options).items() if name != "out"}
        result = {"machine": describe_machine(), "options": shown, "runs": results}
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
