"""Generation in numbers: `python -m benchmarks.generation` writes benchmarks/results/generation.json.

Greedy tokens a second of whet and of transformers' `generate` on SmolLM2-135M-Instruct, in one process, one after the
other in turn, medians; prompts of different lengths, no row ends early. On a CPU in float32, 16 rows of 64 new tokens;
with `--device cuda` in bfloat16, also 64 rows of 256, and transformers with a static cache (which it compiles) beside
its default (`generation-cuda.json`). Setting up whet's CUDA graphs is in its time; transformers' compilation is not in
its. Also whet with an adapter of rank 16 on all linear layers. On a CPU also the time of a step's linear layers, for
several numbers of rows.
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
from whet.model_io.hub import resolve_model
from whet.ops.linear import linear

MODEL = "smollm2-135m-instruct"
WORDS = "river stone lamp cloud knife paper bread glass train forest ocean winter music garden bridge mirror".split()


def questions(tokenizer, rows):
    texts = [f"Write a long story about a {WORDS[i % 16]}." + " Be vivid." * (i % 4) for i in range(rows)]
    texts = [f"{text} Number {i}." for i, text in enumerate(texts)]  # no two alike: none is read for another
    return [encode_prompt(tokenizer, text) for text in texts]


def theirs(model, prompts, new_tokens, **settings):
    """transformers' generate on left-padded rows, none of which may end early."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    found = model.generate(
        tokens, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=-1, **lengths, **settings
    )
    return found[:, width:].tolist()


def timed(device, run):
    started = time.perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def compare(ours, adapted, reference, tokenizer, *, rows, new_tokens, rounds, static):
    """Tokens a second of each, and in how many rows the tokens are the same."""
    prompts = questions(tokenizer, rows)
    device = ours.device

    def by_whet(sampling=None, model=ours):
        return generate_tokens(
            model, prompts, max_tokens=new_tokens, stop_tokens=set(), sampling=sampling, seed=0
        )

    runs = {
        "whet": by_whet,
        "transformers": lambda: theirs(reference, prompts, new_tokens),
        "whet_sampled": lambda: by_whet(Sampling(temperature=1.0)),
        "whet_adapter": lambda: by_whet(model=adapted),
    }
    if static:
        runs["transformers_static"] = lambda: theirs(
            reference, prompts, new_tokens, cache_implementation="static"
        )
    seconds = {name: [] for name in runs}
    found = {}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            taken, found[name] = timed(device, run)
            if turn:  # the first turn warms up
                seconds[name].append(taken)
            print(f"{rows} x {new_tokens} {name}: {rows * new_tokens / taken:.0f} tokens/s", flush=True)
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
            a == b for a, b in zip(found["whet"], found["transformers"], strict=True)
        ),
    }


def products(rows):
    """Milliseconds for the linear layers of one decoding step: torch's x W', and whet's (W x')' below 49 rows."""
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
    parser.add_argument("--no-static", action="store_true", help="leave out transformers' static cache")
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
        results["linear_layers_ms"] = {f"{rows}_rows": products(rows) for rows in (4, 16, 48, 64)}
    name = "generation-cuda.json" if cuda else "generation.json"
    (Path(__file__).parent / "results" / name).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
