"""Benchmark mixture-of-experts layers: `python -m benchmarks.experts [--device cuda] [--threads N]`.

Measures forward and backward of one layer with 4 and 32 experts of equal size, two per token, with torch's grouped
matmul and with a loop over experts, and of a dense layer as wide as two experts. On a CPU it uses one thread, so that
other processes on the machine affect the times less. With several threads, each matmul of an expert waits for the
slowest thread. Writes benchmarks/results/experts-DEVICE.json.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from whet.models.feedforward import FeedForward
from whet.models.moe import MixtureOfExperts
from whet.models.spec import ExpertsSpec, FeedForwardSpec
from whet.ops import grouped_experts

SIZES = {  # tokens, d_model, width of an expert
    "cpu": [(4096, 256, 256), (4096, 512, 256), (8192, 256, 128), (8192, 256, 256)],
    "cuda": [(4096, 1024, 1024), (16384, 1024, 1024), (16384, 2048, 1024)],
}


def layers(d_model, width):
    """Return the layers to compare, by name."""
    experts = {f"{n} experts": MixtureOfExperts(ExpertsSpec(n, 2, width), d_model=d_model) for n in (4, 32)}
    return {**experts, "dense": FeedForward(FeedForwardSpec(2 * width), d_model=d_model)}


def seconds(layer, x):
    """Return the seconds of one forward and backward pass."""
    _synchronize(x.device)
    started = time.perf_counter()
    layer(x).square().sum().backward()
    _synchronize(x.device)
    elapsed = time.perf_counter() - started
    layer.zero_grad(set_to_none=True)
    x.grad = None
    return elapsed


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(tokens, d_model, width, *, device, dtype, repeats=6):
    """Return the best time of each layer; the layers alternate, and other load only increases a time."""
    torch.manual_seed(0)
    compared = {name: layer.to(device, dtype) for name, layer in layers(d_model, width).items()}
    x = torch.randn(tokens, d_model, device=device, dtype=dtype, requires_grad=True)
    times = {name: [] for name in compared}
    for round_index in range(repeats + 1):
        for name, layer in compared.items():
            elapsed = seconds(layer, x)
            if round_index:  # the first round is a warm-up
                times[name].append(elapsed)
    best = {name: min(each) for name, each in times.items()}
    return {
        "tokens": tokens,
        "d_model": d_model,
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "computed": grouped_experts.describe_expert_matmuls(device, dtype, (d_model, width)),
        "best_ms": {name: round(1e3 * value, 2) for name, value in best.items()},
        "32_over_4": round(best["32 experts"] / best["4 experts"], 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows = []
    for size in SIZES[device.type]:
        rows.append(compare(*size, device=device, dtype=dtype))
        print(json.dumps(rows[-1]))
    problem, grouped_experts.grouped_mm_problem = (
        grouped_experts.grouped_mm_problem,
        lambda *_: "to compare with",
    )
    for size in SIZES[device.type][:1]:
        rows.append(compare(*size, device=device, dtype=dtype))
        print(json.dumps(rows[-1]))
    grouped_experts.grouped_mm_problem = problem
    path = Path(__file__).parent / "results" / f"experts-{device.type}.json"
    path.write_text(json.dumps({"machine": describe_machine(), "layers": rows}, indent=2) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
