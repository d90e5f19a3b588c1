"""Compare self-speculative with plain greedy decoding, one text at a time.

Trains examples/mtp-nano.yaml (with overrides), loads its checkpoint with the heads, and continues parts of the
validation text with both. The tokens must be equal; the acceptance rate and the speed-up are measured.

    python -m benchmarks.speculative DIRECTORY NAME [section.key=value ...]

stores the run in DIRECTORY and writes benchmarks/results/speculative-NAME.json.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import whet
from benchmarks.machine import describe_machine
from whet.config.load_config import load_config
from whet.data.synthetic.generators import generate
from whet.generation.engine import generate_tokens
from whet.generation.speculative import speculate
from whet.model_io.load import load_with_heads

ROOT = Path(__file__).parents[1]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 8, 32, 128, 3


def timed(function):
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def prompts_from(tokenizer):
    tokens = tokenizer(generate("synth:python-topics-valid")[0]["text"])["input_ids"]
    step = len(tokens) // PROMPTS
    return [tokens[start : start + PROMPT_TOKENS] for start in range(0, step * PROMPTS, step)]


def measure(model, heads, prompts):
    """Return the speed of both, alternating so that other load affects both, and the acceptance rate."""
    plain_s, speculative_s = [], []
    for _ in range(ROUNDS):
        seconds, plain = timed(
            lambda: [
                generate_tokens(model, [p], max_tokens=NEW_TOKENS, stop_tokens=set())[0] for p in prompts
            ]
        )
        plain_s.append(seconds)
        seconds, results = timed(lambda: [speculate(model, heads, p, max_tokens=NEW_TOKENS) for p in prompts])
        speculative_s.append(seconds)
        assert [each.tokens for each in results] == plain, "the tokens differ"
    tokens = sum(len(each.tokens) for each in results)
    fastest, median = (
        min(plain_s) / min(speculative_s),
        statistics.median(plain_s) / statistics.median(speculative_s),
    )
    return {
        "tokens": tokens,
        "tokens_equal": True,
        "guesses": sum(each.guessed for each in results),
        "acceptance": round(sum(e.accepted for e in results) / sum(e.guessed for e in results), 4),
        "tokens_per_pass": round(tokens / sum(each.passes for each in results), 3),
        "plain_tokens_per_s": round(tokens / min(plain_s), 1),
        "speculative_tokens_per_s": round(tokens / min(speculative_s), 1),
        "speed_up_best": round(fastest, 3),
        "speed_up_median": round(median, 3),
    }


def trained_run(directory, overrides):
    """Return the run of the example in this directory; train or resume it unless it has finished."""
    config = load_config(ROOT / "examples" / "mtp-nano.yaml", [*overrides, f"run.dir={directory}"])
    run = Path(directory) / config.run.name
    if (run / "final").is_dir():
        return run
    result = whet.resume(run) if run.exists() else whet.train(config)
    if result.unfinished:
        sys.exit(f"stopped at step {result.steps}: run the same command to resume")
    return run


def summary_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rows[-1]["summary"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="the directory of the run")
    parser.add_argument("name", help="the NAME of benchmarks/results/speculative-NAME.json")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    run = trained_run(options.directory, options.overrides)
    checkpoint = max((run / "checkpoints").glob("step-*"))
    model, heads, tokenizer = load_with_heads(checkpoint, dtype=torch.float32)
    figures, final = measure(model, heads, prompts_from(tokenizer)), summary_of(run)["final"]
    result = {
        "what": f"greedy, {PROMPTS} texts one at a time, {PROMPT_TOKENS} tokens each continued by {NEW_TOKENS}; "
        f"times are the best of {ROUNDS}",
        "config": ["examples/mtp-nano.yaml", *options.overrides],
        "layers": len(list(model.blocks())),
        "heads": len(heads),
        "parameters": sum(p.numel() for p in model.parameters()),
        "head_parameters": sum(p.numel() for p in heads.parameters()),
        **{key: round(final[key], 4) for key in ("eval_main_loss", "eval_mtp_loss", "eval_bits_per_byte")},
        **figures,
        "threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "machine": describe_machine(),
    }
    path = ROOT / "benchmarks" / "results" / f"speculative-{options.name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
