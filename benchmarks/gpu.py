"""Compare whet with transformers (+ PEFT, + Liger) on one GPU: tokens/s and peak memory of training steps.

Public model shapes with random weights and random tokens, AdamW, gradients clipped at norm 1. Every case runs in a
separate process; whet and the other libraries alternate.

    python -m benchmarks.gpu [CASE ...] [--repeat N] [--compile-first] [--out FILE]

writes benchmarks/results/gpu.json. For a library that is not installed, a row with the error is written. With
`--compile-first`, whet's layers are compiled before anything is timed, several cases at once, so that every row starts
with a warm cache. `to_first_step_s` is measured from the start of a row's process, including imports.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.machine import describe_machine

PROCESS_START = time.perf_counter()  # before any large import
RESULT = Path(__file__).parent / "results" / "gpu.json"
LENGTH = 2048
STEPS, WARMUP = 20, 5
SHAPES = {
    "1b": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "135m": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip
COMMON = {"max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
CASES = {  # name: shape, method, rows of LENGTH tokens (0: ragged texts, which whet packs and the others pad)
    "1b-lora": ("1b", "lora", 8),
    "8b-lora": ("8b", "lora", 4),
    "135m-full": ("135m", "full", 16),
    "1b-full": ("1b", "full", 8),
    "1b-lora-ragged": ("1b", "lora", 0),
    "135m-full-ragged": ("135m", "full", 0),
}
COMPILED_AT_ONCE = 4
RAGGED_TOKENS = 16384  # per step of packed ragged texts
# texts per step of the other libraries, padded to the longest: for twice as many, the logits exceed the memory
RAGGED_ROWS = {"1b": 8, "135m": 32}
RAGGED_MEAN, RAGGED_MAX = 200, 2048
OTHER_LIBRARIES = ("transformers", "liger")
WHO = {
    case: ("whet", *(("whet-fp32-master",) if rows else ()), *OTHER_LIBRARIES)
    for case, (_, _, rows) in CASES.items()
}
WHO["1b-full"] = (*WHO["1b-full"], "whet-fp8")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--who", help="comma-separated; default: all")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WHO"))
    parser.add_argument("--compile-first", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.one:
        print("ROW " + json.dumps(measure(*options.one, options.steps, profile=options.profile)), flush=True)
        return
    rows, cold = [], []
    pairs = [
        (case, who)
        for case in options.cases
        for who in (options.who.split(",") if options.who else WHO[case])
    ]
    if options.compile_first:
        ours = list(dict.fromkeys(item for item in pairs if item[1].startswith("whet")))
        with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
            cold = list(pool.map(lambda item: row_of(*item, 1), ours))
        print(json.dumps(cold), flush=True)
    for case, who in options.repeat * pairs:
        rows.append(row_of(case, who, options.steps, profile=options.profile))
        print(json.dumps(rows[-1]), flush=True)
        result = {"machine": describe_machine(), "rows": rows, "cold": cold}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def row_of(case, who, steps, *, profile=False):
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", case, who, "--steps", str(steps)]
    done = subprocess.run(command + ["--profile"] * profile, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if profile:
        print(done.stdout, flush=True)
    if lines:
        return json.loads(lines[-1][4:])
    return {"case": case, "who": who, "failed": (done.stderr.strip().splitlines() or ["?"])[-1]}


def texts(vocab_size, rows):
    """Return random tokens: full rows, or ragged ones with log-normal lengths, as chats have."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = np.full(rows, LENGTH)
    if not rows:
        lengths = rng.lognormal(np.log(RAGGED_MEAN) - 0.5, 1.0, 4000).astype(int).clip(8, RAGGED_MAX)
    return [rng.integers(0, vocab_size, length + 1) for length in lengths]


def measure(case, who, steps, *, profile):
    import torch

    shape, method, rows = CASES[case]
    run = whet_run if who.startswith("whet") else transformers_run
    warmup = WARMUP if rows else 3 * WARMUP
    recorder = Steps(warmup + 1, steps, profile=profile)
    run(shape, method, rows, who, recorder)
    times, useful = recorder.times[warmup + 1 :][:steps], recorder.tokens[warmup + 1 :][:steps]
    median = statistics.median(times)
    return {
        "case": case,
        "who": who,
        "tokens_per_s": round(rows * LENGTH / median if rows else sum(useful) / sum(times)),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "step_ms": round(1000 * median, 2),
        "spread_ms": [round(1000 * min(times), 2), round(1000 * max(times), 2)],
        "to_first_step_s": round(recorder.first_s, 1),
        **({"compile": recorder.compiled} if recorder.compiled else {}),
        "loss": round(recorder.loss, 4),
    }


class Steps:
    """Records the time of each step, from the end of the previous one."""

    def __init__(self, skipped, measured, *, profile):
        self.skipped, self.measured, self.profile = skipped, measured, profile
        self.times, self.tokens, self.loss, self.compiled = [], [], 0.0, ""
        self.before = time.perf_counter()

    @property
    def total(self):
        return self.skipped + self.measured + 3 * self.profile

    def done(self, loss, tokens):
        """Record the end of a step, whose loss is known on the host."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        now = time.perf_counter()
        self.times.append(now - self.before)
        self.tokens.append(tokens)
        self.loss = loss
        count = len(self.times)
        if count == 1:
            self.first_s = now - PROCESS_START
        if count == self.skipped:
            torch.cuda.reset_peak_memory_stats()
        if self.profile and count == self.skipped + self.measured:
            self.profiler = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
            self.profiler.start()
        if self.profile and count == self.skipped + self.measured + 2:
            torch.cuda.synchronize()
            self.profiler.stop()
            show_profile(self.profiler)
        self.before = time.perf_counter()


def whet_run(name, method, rows, who, recorder):
    """Train with whet's Trainer, as `whet train` does."""
    import torch

    import whet
    from whet.config.load_config import validate_config
    from whet.data.batches import BatchStream
    from whet.data.packing import StepSettings
    from whet.data.tokens.examples import Example
    from whet.hardware import choose_precision
    from whet.models import families
    from whet.models.decoder import Decoder
    from whet.objectives.sft import SFT
    from whet.recipes.model_setup import use_fp8
    from whet.training.callbacks import Callback
    from whet.training.compile import compile_blocks
    from whet.training.trainer import Trainer

    shape, kind = SHAPES[name], "bf16" if who == "whet-fp32-master" else "bf16-pure"
    device = torch.device("cuda")
    precision = choose_precision(kind, device)
    config = {"model_type": "llama", **shape, **COMMON}
    dtype = precision.frozen if method == "lora" else precision.trained
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(families.FAMILIES["llama"].from_config(config), source_config=config).to(dtype)
    model.to_empty(device=device)
    init_weights(model)
    if method == "lora":
        whet.attach_lora(model, rank=16, alpha=32)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(precision.trained)
    else:
        model.requires_grad_(True)
    if who == "whet-fp8":
        print("fp8:", use_fp8(model, method))
    config = validate_config(
        {
            "model": "random",
            "method": {"kind": method},
            "data": {"train": "none"},
            "optim": {"name": "adamw", "lr": 1e-5, "clip": 1.0, "schedule": "constant", "warmup": 0},
            "run": {"name": "bench", "steps": 1000, "batch_size": 1, "precision": kind, "device": "cuda"},
        }
    )
    examples = [Example(row, [True] * len(row), "random") for row in texts(shape["vocab_size"], rows)]
    full = StepSettings(
        rows or None, None if rows else RAGGED_TOKENS, (rows * LENGTH) or RAGGED_TOKENS, pack=not rows
    )
    stream = BatchStream(examples, full, seed=0)
    recorder.compiled = compile_blocks(model, stream.peek()[0], precision)

    class Clock(Callback):
        def on_step_end(self, step, metrics):
            recorder.done(metrics["loss"], metrics["tokens"])

    Trainer(model, SFT(), stream, config, [Clock()], total_steps=recorder.total, precision=precision).fit()


def init_weights(model):
    """Initialize as transformers does, so that losses are comparable: N(0, 0.02), and 1 for norms."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02)


def transformers_run(name, method, rows, who, recorder):
    """Train with a plain loop around transformers and PEFT."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = True
    if who == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = LlamaConfig(**SHAPES[name], **COMMON, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    sequences = [torch.from_numpy(text[:-1]) for text in texts(config.vocab_size, rows)]
    size = rows or RAGGED_ROWS[name]
    starts = itertools.cycle(range(0, len(sequences) - size + 1, size))

    for _ in range(recorder.total):
        start = next(starts)
        batch = sequences[start : start + size]
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad(batch, batch_first=True).cuda()
        labels = pad(batch, batch_first=True, padding_value=-100).cuda()
        ragged = {} if rows else {"attention_mask": (labels >= 0).long()}
        loss = model(input_ids=tokens, labels=labels, **ragged).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.done(loss.item(), sum(map(len, batch)))


def show_profile(profiler):
    """Print the device time of two steps by kernel."""
    import torch

    totals = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent, count = totals.get(event.name, (0.0, 0))
            totals[event.name] = (spent + event.device_time_total / 1000, count + 1)
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Optimizer.step")
    )
    gaps, end, before = [], None, ""
    for start, stop, name in kernels:
        if end is not None and start > end:
            gaps.append(((start - end) / 1000, before[:40], name[:40]))
        if end is None or stop > end:
            end, before = stop, name
    span = (kernels[-1][1] - kernels[0][0]) / 1000
    print(f"PROFILE span {span:.1f} ms, idle {sum(g[0] for g in gaps):.2f} ms in {len(gaps)} gaps")
    for gap in sorted(gaps, reverse=True)[:8]:
        print("PROFILE gap {:.2f} ms after {} before {}".format(*gap))
    total = sum(spent for spent, _ in totals.values())
    print(f"PROFILE kernels {total:.1f} ms")
    for name, (spent, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:44]:
        print(f"PROFILE {spent:8.2f} ms {count:5d} x {name[:110]}")


if __name__ == "__main__":
    main()
