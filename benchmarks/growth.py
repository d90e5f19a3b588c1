"""Measure tokens/s and peak memory of LoRA steps on one GPU while one size grows at a time.

    python -m benchmarks.growth [length] [vocabulary] [rank] [batch]

writes benchmarks/results/growth.json, and growth.png if matplotlib is installed; rows of other sizes are retained.

The shape is that of a 1B model (random weights), bf16, compiled layers, rank 16 on every linear layer, 32,768 tokens per
step unless the batch grows. `length` is the number of tokens per row. No recompilation is expected after the first
steps of a shape: the number of compilations is in the result.
"""

import argparse
import gc
import json
import time
from pathlib import Path

import numpy as np
import torch

import whet
from benchmarks.gpu import COMMON, SHAPES, init_weights
from benchmarks.machine import describe_machine
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.data.tokens.examples import Example
from whet.hardware import choose_precision
from whet.models import families
from whet.models.decoder import Decoder
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback
from whet.training.compile import compile_blocks
from whet.training.trainer import Trainer

RESULT = Path(__file__).parent / "results" / "growth.json"
TOKENS, LENGTH, VOCAB_SIZE, RANK = 32768, 2048, 128256, 16
GROWTH = {
    "length": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    "vocabulary": (32000, 64000, 128256, 256000),
    "rank": (4, 16, 64, 256),
    "batch": (2048, 4096, 8192, 16384, 32768, 65536),
}
WARMUP, STEPS = 3, 4


class Clock(Callback):
    """Records the time of the steps after the warm-up, and the compilations during them."""

    def __init__(self):
        self.times, self.compiled = [], 0

    def on_step_end(self, step, metrics):
        if step == WARMUP:
            torch.cuda.reset_peak_memory_stats()
            self.before = compilations()
        if step > WARMUP:
            self.times.append(metrics["step_s"])
            self.compiled = compilations() - self.before


def compilations():
    return sum(torch._dynamo.utils.counters["stats"].values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=list(GROWTH))
    chosen = parser.parse_args().sizes
    built = {}
    before = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = [row for row in before if row["what"] not in chosen]
    for what in chosen:
        for size in GROWTH[what]:
            sizes = {
                "length": LENGTH,
                "vocabulary": VOCAB_SIZE,
                "rank": RANK,
                "batch": TOKENS,
                what: size,
            }
            key = (sizes["vocabulary"], sizes["rank"])
            if key not in built:
                built.clear()
                gc.collect()  # a trainer and its callbacks are a reference cycle
                torch.cuda.empty_cache()
                torch._dynamo.reset()  # otherwise the layers of several ranks would exceed the recompile limit
                built[key] = build(*key)
            started = time.perf_counter()
            rows.append({"what": what, "size": size, **measure(built[key], sizes)})
            print(json.dumps(rows[-1]), f"{time.perf_counter() - started:.1f} s", flush=True)
            RESULT.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    plot(rows, RESULT.with_suffix(".png"))


def build(vocabulary, rank):
    config = {"model_type": "llama", **SHAPES["1b"], **COMMON, "vocab_size": vocabulary}
    config["max_position_embeddings"] = max(GROWTH["length"])
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(families.FAMILIES["llama"].from_config(config), source_config=config).bfloat16()
    model.to_empty(device="cuda")
    init_weights(model)
    return whet.attach_lora(model, rank=rank, alpha=2 * rank)


def measure(model, sizes):
    length = min(sizes["length"], sizes["batch"])
    count = sizes["batch"] // length
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, sizes["vocabulary"], length + 1) for _ in range(count)]
    examples = [Example(row, [True] * len(row), "random") for row in rows]
    config = validate_config(
        {
            "model": "random",
            "data": {"train": "none"},
            "optim": {"lr": 1e-5, "clip": 1.0, "schedule": "constant"},
            "run": {"name": "growth", "steps": WARMUP + STEPS, "batch_size": count, "precision": "bf16-pure"},
        }
    )
    clock = Clock()
    stream = BatchStream(examples, StepSettings(count, None, sizes["batch"], pack=False), seed=0)
    precision = choose_precision("bf16-pure", torch.device("cuda"))
    compile_blocks(model, stream.peek()[0], precision)
    Trainer(model, SFT(), stream, config, [clock], precision=precision).fit()
    median = sorted(clock.times)[len(clock.times) // 2]
    return {
        "tokens_per_s": round(sizes["batch"] / median),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "compiled_again": clock.compiled,
    }


def plot(rows, path):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(2, len(GROWTH))
    for column, what in enumerate(GROWTH):
        selected = [row for row in rows if row["what"] == what]
        for row, (key, label) in enumerate((("tokens_per_s", "tokens/s"), ("peak_gib", "GiB"))):
            axes = panels[row][column]
            axes.plot([each["size"] for each in selected], [each[key] for each in selected], marker="o")
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, 1.1 * max(each[key] for each in selected))
            axes.set(xlabel=what, ylabel=label if column == 0 else "")
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
