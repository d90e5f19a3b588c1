"""whet beside transformers + PEFT on a CPU: LoRA of a real 135M model on ragged chats, useful tokens a second.

Steps of eight chats, rank 8 on every linear layer, AdamW, float32. The peer pads each batch to its longest
chat, as its trainers do by default; whet packs. Padding counts for nobody.

    python -m benchmarks.cpu [--repeat N]     writes benchmarks/results/cpu.json
    python -m benchmarks.cpu --smoke          two minutes; exits with 1 where whet is the slower one

House data are short (about 70 tokens); the ragged ones have a mean of 200 and at most 2,048.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "cpu.json"
MODEL = "smollm2-135m-instruct"
CASES = {"house": 6, "ragged": 5}  # steps that are timed, after one that is not
ROWS = 8
WORDS = "the model reads a page of plain words and learns to say what comes next in it again".split()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("WHO", "CASE", "STEPS"))
    options = parser.parse_args()
    if options.one:
        who, case, steps = options.one
        print("ROW " + json.dumps(measure(who, case, int(steps))))
        return
    if options.smoke:
        found = {who: [row_of(who, "house", 2) for _ in range(2)] for who in ("whet", "transformers")}
        ratio = summary(found)["speed_ratio"]
        print(f"whet at {ratio:.2f} times the speed of transformers + PEFT")
        sys.exit(ratio < 1.0)
    results = {}
    for case, steps in CASES.items():
        found = {"whet": [], "transformers": []}
        for _ in range(options.repeat):
            for who, rows in found.items():
                rows.append(row_of(who, case, steps))
                print(json.dumps(rows[-1]), flush=True)
        results[case] = summary(found)
    RESULT.write_text(json.dumps({"machine": describe_machine(), "cases": results}, indent=1) + "\n")
    print(json.dumps({case: found["speed_ratio"] for case, found in results.items()}))


def row_of(who, case, steps):
    command = [sys.executable, "-m", "benchmarks.cpu", "--one", who, case, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        sys.exit(f"{who} failed on {case}:\n{done.stderr}")
    return json.loads(found[-1][4:])


def summary(found):
    """Medians of each side, and how they compare."""
    middle = {
        who: {key: statistics.median(row[key] for row in rows) for key in ("tokens_per_s", "peak_gib")}
        for who, rows in found.items()
    }
    ours, theirs = middle["whet"], middle["transformers"]
    return {
        **middle,
        "speed_ratio": round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3),
        "memory_ratio": round(ours["peak_gib"] / theirs["peak_gib"], 3),
        "rows": found,
    }


def chats(case, count):
    """Chat records of a case."""
    if case == "house":
        from whet.data.house import house

        return [record["messages"] for record in house("train", 400)][:count]
    rng = random.Random(0)

    def words():
        return " ".join(rng.choice(WORDS) for _ in range(min(900, int(rng.lognormvariate(4.0, 0.9)))))

    return [
        [{"role": "user", "content": words()}, {"role": "assistant", "content": words()}]
        for _ in range(count)
    ]


def measure(who, case, steps):
    step = (whet_step if who == "whet" else peer_step)(chats(case, ROWS * (steps + 1)))
    step(0)
    started = time.perf_counter()
    tokens = sum(step(number + 1) for number in range(steps))
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "who": who,
        "tokens_per_s": round(tokens / seconds, 1),
        "peak_gib": round(peak, 3),
        "tokens": tokens,
    }


def whet_step(records):
    import torch

    import whet
    from whet.config.load import make_config
    from whet.data.batches import step_batches
    from whet.data.examples import Example
    from whet.data.plan import StepSettings
    from whet.objectives.sft import SFT
    from whet.training.trainer import Trainer

    model, tokenizer = whet.load(MODEL, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=8, alpha=16)
    examples = []
    for messages in records:
        tokens = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        examples.append(Example(tokens, [True] * len(tokens), "chat"))
    settings = StepSettings(ROWS, None, None, pack=True)
    config = make_config(
        {
            "model": MODEL,
            "data": {"train": "none"},
            "optim": {"name": "adamw", "lr": 1e-4, "clip": 1.0, "schedule": "constant", "warmup": 0},
            "run": {"name": "bench", "steps": 100, "batch_size": ROWS, "precision": "fp32", "device": "cpu"},
        }
    )
    trainer = Trainer(model, SFT(), [], config)
    lengths = [example.length for example in examples]

    def step(number):
        chosen = range(number * ROWS, (number + 1) * ROWS)
        batches = step_batches(chosen, examples, lengths, settings)
        trainer.step(batches)
        return sum(len(examples[index].tokens) for index in chosen)

    return step


def peer_step(records):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from whet.models.hub import resolve

    directory = resolve(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    settings = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    texts = [
        torch.tensor(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
        for messages in records
    ]

    def step(number):
        chosen = texts[number * ROWS : (number + 1) * ROWS]
        pad = torch.nn.utils.rnn.pad_sequence
        labels = pad(chosen, batch_first=True, padding_value=-100)
        loss = model(
            input_ids=pad(chosen, batch_first=True), attention_mask=(labels >= 0).long(), labels=labels
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return sum(map(len, chosen))

    return step


if __name__ == "__main__":
    main()
