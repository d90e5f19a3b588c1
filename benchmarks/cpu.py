"""Compare whet with transformers + PEFT on a CPU: LoRA of a real 135M model on chats, in real tokens/s.

A step has eight chats; rank 8 on every linear layer, AdamW, float32. transformers pads each batch to its
longest chat, as its trainers do by default; whet packs. Padding tokens are not counted.

    python -m benchmarks.cpu [--steps N]      writes benchmarks/results/cpu.json
    python -m benchmarks.cpu --smoke          takes a minute; exits with 1 if whet is slower

House chats are short (about 60 tokens); ragged chats have 200 tokens on average and at most 2,048. On house chats
the two processes alternate step by step on the same chats, so that a temporary slowdown affects both. On ragged
chats transformers needs all the memory, so the processes run one after the other.
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
CASES = {"house": 12, "ragged": 6}  # timed steps, after one warm-up step
ALONE = ("ragged",)  # cases whose processes do not fit into memory together
WHO = ("whet", "transformers")
ROWS = 8
WORDS = "the model reads a page of plain words and learns to say what comes next in it again".split()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help="timed steps, instead of the default of each case")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("WHO", "CASE", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        who, case, steps = options.one
        serve(who, case, int(steps))
    elif options.smoke:
        ratio = summary(measure("house", options.steps or 9))["speed_ratio"]
        print(f"whet at {ratio['median']:.2f} times the speed of transformers + PEFT")
        sys.exit(ratio["median"] < 1.0)
    else:
        results = {case: summary(measure(case, options.steps or steps)) for case, steps in CASES.items()}
        RESULT.write_text(json.dumps({"machine": describe_machine(), "cases": results}, indent=1) + "\n")
        print(json.dumps({case: result["speed_ratio"] for case, result in results.items()}))


def measure(case, steps):
    """Return the rows of both libraries, without their first step."""
    rows = {who: [] for who in WHO}
    numbers = range(steps + 1)
    turns = (
        [(who, n) for who in WHO for n in numbers]
        if case in ALONE
        else [(who, n) for n in numbers for who in WHO]
    )
    workers = {}
    for who, number in turns:
        if who not in workers:
            workers[who] = Worker(who, case, steps)
        row = workers[who].step(number)
        if number > 0:
            rows[who].append(row)
        if number == steps:
            workers[who].close()
    return rows


class Worker:
    """A process that runs one of the libraries, and trains one step per request."""

    def __init__(self, who, case, steps):
        command = [sys.executable, "-m", "benchmarks.cpu", "--one", who, case, str(steps)]
        self.who = who
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self, number):
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ROW "):
                return json.loads(line[4:])
        sys.exit(f"{self.who} failed")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve(who, case, steps):
    """Run a worker: read step numbers from stdin, train these steps, and print their rows."""
    step = (whet_step if who == "whet" else peer_step)(chats(case, ROWS * (steps + 1)))
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = step(int(line))
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row = {"tokens": tokens, "seconds": round(seconds, 3), "peak_gib": round(peak, 3)}
        print("ROW " + json.dumps(row), flush=True)


def summary(rows):
    """Return tokens/s and memory of each library, and the ratios of their step times."""
    result = {
        who: {
            "tokens_per_s": spread([row["tokens"] / row["seconds"] for row in library_rows]),
            "peak_gib": max(row["peak_gib"] for row in library_rows),
        }
        for who, library_rows in rows.items()
    }
    pairs = zip(*(rows[who] for who in WHO), strict=True)
    ratio = spread([theirs["seconds"] / ours["seconds"] for ours, theirs in pairs])
    memory = round(result["whet"]["peak_gib"] / result["transformers"]["peak_gib"], 3)
    return {**result, "speed_ratio": ratio, "memory_ratio": memory, "rows": rows}


def spread(values):
    return {
        "median": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
    }


def chats(case, count):
    """Return the chats of a case."""
    if case == "house":
        from whet.data.synthetic.house import house

        return [record["messages"] for record in house("train", 400)][:count]
    rng = random.Random(0)

    def words():
        return " ".join(rng.choice(WORDS) for _ in range(min(900, int(rng.lognormvariate(4.0, 0.9)))))

    return [
        [{"role": "user", "content": words()}, {"role": "assistant", "content": words()}]
        for _ in range(count)
    ]


def whet_step(records):
    import torch

    import whet
    from whet.config.load_config import validate_config
    from whet.data.batches import step_batches
    from whet.data.packing import StepSettings
    from whet.data.tokens.examples import Example
    from whet.objectives.sft import SFT
    from whet.training.trainer import Trainer

    model, tokenizer = whet.load(MODEL, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=8, alpha=16)
    examples = []
    for messages in records:
        tokens = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        examples.append(Example(tokens, [True] * len(tokens), "chat"))
    settings = StepSettings(ROWS, None, None, pack=True)
    config = validate_config(
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

    from whet.model_io.resolve_model import resolve_model

    directory = resolve_model(MODEL)
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
