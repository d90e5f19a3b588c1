"""Benchmark generation: `python -m benchmarks.generation` writes benchmarks/results/generation.json.

Compares tokens/s of greedy decoding with whet and with transformers' `generate` on SmolLM2-135M-Instruct, alternating in
one process; values are medians. Prompts have different lengths, and no row ends early. On a CPU: float32, 16 rows of 64
new tokens. With `--device cuda`: bfloat16, also 64 rows of 256, and transformers also with a static cache, which it
compiles (`generation-cuda.json`). The capture of whet's CUDA graphs is part of its time; transformers' compilation is
not. Also measures whet with a rank-16 adapter on all linear layers and, on a CPU, the time of the linear layers of one
decoding step for several numbers of rows.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import whet
from benchmarks.machine import describe_machine
from whet.generation.engine import generate_tokens
from whet.generation.generate import encode_prompt
from whet.generation.sampling import Sampling
from whet.model_io.resolve_model import resolve_model
from whet.ops.linear import linear

MODEL = "smollm2-135m-instruct"
WORDS = "river stone lamp cloud knife paper bread glass train forest ocean winter music garden bridge mirror".split()


def questions(tokenizer, rows):
    texts = [f"Write a long story about a {WORDS[i % 16]}." + " Be vivid." * (i % 4) for i in range(rows)]
    texts = [
        f"{text} Number {i}." for i, text in enumerate(texts)
    ]  # all differ, so that no prefill is shared
    return [encode_prompt(tokenizer, text) for text in texts]


def generate_with_transformers(model, prompts, new_tokens, **settings):
    """Run transformers' generate on left-padded rows, none of which may end early."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    output = model.generate(
        tokens, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=-1, **lengths, **settings
    )
    return output[:, width:].tolist()


def timed(device, run):
    started = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def compare(ours, adapted, reference, tokenizer, *, rows, new_tokens, rounds, static):
    """Return tokens/s of each, and the number of rows with equal tokens."""
    prompts = questions(tokenizer, rows)
    device = ours.device

    def generate_with_whet(sampling=None, model=ours):
        return generate_tokens(
            model, prompts, max_tokens=new_tokens, stop_tokens=set(), sampling=sampling, seed=0
        )

    runs = {
        "whet": generate_with_whet,
        "transformers": lambda: generate_with_transformers(reference, prompts, new_tokens),
        "whet_sampled": lambda: generate_with_whet(Sampling(temperature=1.0)),
        "whet_adapter": lambda: generate_with_whet(model=adapted),
    }
    if static:
        runs["transformers_static"] = lambda: generate_with_transformers(
            reference, prompts, new_tokens, cache_implementation="static"
        )
    seconds = {name: [] for name in runs}
    outputs = {}
    for round_index in range(rounds + 1):
        for name, run in runs.items():
            elapsed, outputs[name] = timed(device, run)
            if round_index:  # the first round is a warm-up
                seconds[name].append(elapsed)
            print(f"{rows} x {new_tokens} {name}: {rows * new_tokens / elapsed:.0f} tokens/s", flush=True)
    rates = {name: round(rows * new_tokens / statistics.median(times), 1) for name, times in seconds.items()}
    return {
        "rows": rows,
        "new_tokens": new_tokens,
        "prompt_tokens": sum(map(len, prompts)),
        "rounds": rounds,
        "tokens_per_s": rates,
        "whet_to_transformers": round(rates["whet"] / rates["transformers"], 2),
        **(
            {"whet_to_transformers_static": round(rates["whet"] / rates["transformers_static"], 2)}
            if static
            else {}
        ),
        "rows_with_equal_tokens": sum(
            a == b for a, b in zip(outputs["whet"], outputs["transformers"], strict=True)
        ),
    }


def time_linear_layers(rows):
    """Return the milliseconds of the linear layers of one decoding step: torch's x W', and whet's (W x')' below 49 rows."""
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)] * 30
    weights = [torch.randn(shape) for shape in [*shapes, (49152, 576)]]
    inputs = {size: torch.randn(rows, 1, size) for size in (576, 1536)}
    seconds = {"torch": [], "whet": []}
    with torch.no_grad():
        for _ in range(9):
            for name, multiply in (("torch", F.linear), ("whet", linear)):
                started = time.perf_counter()
                for weight in weights:
                    multiply(inputs[weight.shape[1]], weight)
                seconds[name].append(time.perf_counter() - started)
    return {name: round(1000 * statistics.median(times), 1) for name, times in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-static", action="store_true", help="skip transformers' static cache")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    ours, tokenizer = whet.load(MODEL, dtype=dtype, device=arguments.device)
    adapted, _ = whet.load(MODEL, dtype=dtype, device=arguments.device)
    whet.attach_lora(adapted, rank=16)
    reference = (
        AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=dtype).to(arguments.device).eval()
    )
    results = {
        "machine": describe_machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "model": MODEL,
        "runs": [
            compare(
                ours,
                adapted,
                reference,
                tokenizer,
                rows=rows,
                new_tokens=new_tokens,
                rounds=arguments.rounds,
                static=cuda and not arguments.no_static,
            )
            for rows, new_tokens in ((16, 64), (64, 256))[: 2 if cuda else 1]
        ],
    }
    if not cuda:
        results["linear_layers_ms"] = {f"{rows}_rows": time_linear_layers(rows) for rows in (4, 16, 48, 64)}
    name = "generation-cuda.json" if cuda else "generation.json"
    (Path(__file__).parent / "results" / name).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
