"""Benchmark the data pipeline: `python -m benchmarks.data` writes benchmarks/results/data.json.

It measures tokenization against the tokenizer's batch call, the time to the first batch of 100,000 short chats with a
cold and a warm cache, the fill rate of packed rows on ragged chats (about 200 tokens on average, at most 2048), the
time of the loader in a step of the demo, and the memory needed for a large text. `--large` adds a text of 1 GiB.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import describe_machine
from whet.data.batches import BatchStream, step_batches
from whet.data.packing import StepSettings, plan_epoch, split_step
from whet.data.sources.source import open_source
from whet.data.synthetic.house import house
from whet.data.tokens.examples import Example, build_examples
from whet.data.tokens.prepare_dataset import Preparation
from whet.model_io.resolve_model import resolve_model

MODEL = "smollm2-135m-instruct"
WORDS = "the model reads a page of plain words and learns to say what comes next in it again".split()


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_model(MODEL))


def text(rng, words):
    return " ".join(
        rng.choice(WORDS) + (str(rng.randrange(1000)) if rng.random() < 0.1 else "") for _ in range(words)
    )


def write_chats(path, count):
    """Write short chats that all differ."""
    commands = house("train", 400)
    with path.open("w") as file:
        for number in range(count):
            messages = [dict(message) for message in commands[number % 400]["messages"]]
            messages[1]["content"] += f" ({number})"
            file.write(json.dumps({"messages": messages}) + "\n")


def tokenisation(directory):
    """Compare tokens/s into the store with tokenizers' batch call on the same texts, alternating."""
    rng = random.Random(0)
    path = directory / "texts.jsonl"
    texts = [text(rng, 400) for _ in range(10_000)]
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    tok = tokenizer()
    rates = {"whet": [], "tokenizers": []}
    for _ in range(5):
        started = time.perf_counter()
        encodings = tok.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=True)
        rates["tokenizers"].append(sum(len(e) for e in encodings) / (time.perf_counter() - started))
        del encodings
        cache = directory / "cache-texts"
        shutil.rmtree(cache, ignore_errors=True)
        started = time.perf_counter()
        store = Preparation(tok, cache=cache).store(open_source(str(path)))
        rates["whet"].append(int(store.bounds[-1]) / (time.perf_counter() - started))
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    return {"tokens_per_s": medians, "ratio": round(medians["whet"] / medians["tokenizers"], 3)}


FIRST_BATCH = """
import sys, time
from pathlib import Path
from transformers import AutoTokenizer
from whet.data.batches import BatchStream
from whet.data.tokens.examples import build_examples
from whet.data.packing import StepSettings
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.sources.source import open_source
import tokenizers, jinja2
tok = AutoTokenizer.from_pretrained(sys.argv[1])
started = time.perf_counter()
store = Preparation(tok, cache=Path(sys.argv[3])).store(open_source(sys.argv[2]))
examples = build_examples(store, max_length=512, too_long="truncate")
next(BatchStream(examples, StepSettings(None, 512, 512, pack=True), seed=0))
print(time.perf_counter() - started)
"""


def first_batch(directory):
    """Return the seconds from the end of the imports to the first batch of 100,000 chats."""
    path = directory / "chats.jsonl"
    write_chats(path, 100_000)
    command = [
        sys.executable,
        "-c",
        FIRST_BATCH,
        str(resolve_model(MODEL)),
        str(path),
        str(directory / "cache-chats"),
    ]
    seconds = [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(4)
    ]
    return {"cold_s": round(seconds[0], 2), "warm_s": round(statistics.median(seconds[1:]), 2)}


def ragged_lengths(count=4000):
    """Return lognormal lengths with a mean of about 200, at most 2048, as in chat data."""
    lengths = np.random.default_rng(0).lognormal(4.9, 0.9, count)
    return np.clip(lengths.astype(int), 8, 2048)


def packing():
    """Return the fill rate of steps of 16,384 tokens, and the fraction of positions that are not padding."""
    lengths = ragged_lengths()
    settings = StepSettings(None, 16_384, 4096, pack=True)
    steps = list(plan_epoch(lengths, settings, seed=0, epoch=0))
    examples = [
        Example(np.zeros(length + 1, dtype=int), np.ones(length + 1, dtype=bool), "") for length in lengths
    ]
    batches = [batch for step in steps for batch in step_batches(step, examples, lengths, settings)]
    positions = sum(batch.tokens.numel() for batch in batches)
    rows = split_step(range(len(lengths)), lengths, StepSettings(1, None, 2048, pack=True))
    return {
        "mean_length": round(float(lengths.mean()), 1),
        "real_tokens_of_positions": round(int(lengths.sum()) / positions, 4),
        "fill_of_steps": round(int(lengths.sum()) / (len(steps) * 16_384), 4),
        "fill_of_rows_of_2048": round(int(lengths.sum()) / (len(rows) * 2048), 4),
    }


def loader(directory, step_s=1.9):
    """Return the milliseconds to build the batches of a demo step, which takes about `step_s` s on two cores."""
    tok = tokenizer()
    store = Preparation(tok, cache=directory / "cache-demo").store(open_source("synth:house:400"))
    stream = BatchStream(
        build_examples(store, max_length=512, too_long="truncate"),
        StepSettings(None, 512, 512, pack=True),
        seed=0,
    )
    seconds = []
    for _ in range(200):
        started = time.perf_counter()
        next(stream)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    return {"step_batches_ms": round(median * 1000, 3), "share_of_a_demo_step": round(median / step_s, 5)}


MEMORY = """
import sys, threading, time
from pathlib import Path
import torch
from transformers import AutoTokenizer
from whet.data.batches import BatchStream
from whet.data.tokens.examples import build_examples
from whet.data.packing import StepSettings
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.sources.source import open_source
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.config.load_config import validate_config
from whet.objectives.sft import SFT
from whet.training.trainer import Trainer

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024

tok = AutoTokenizer.from_pretrained(sys.argv[1])
model = new_decoder(preset_spec("nano", vocab_size=len(tok)), seed=0)
config = validate_config({"model": "x", "data": {"train": "x"}, "method": {"kind": "full"}, "run": {"steps": 5, "batch_tokens": 512, "precision": "fp32", "device": "cpu"}})
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.02)
watcher = threading.Thread(target=watch)
watcher.start()
started = time.perf_counter()
store = Preparation(tok, cache=Path(sys.argv[3])).store(open_source(sys.argv[2]))
seconds = time.perf_counter() - started
examples = build_examples(store, max_length=257, too_long="split")
Trainer(model, SFT(), BatchStream(examples, StepSettings(None, 512, 512, pack=True), seed=0), config).fit()
done = True
watcher.join()
print(peak - before, seconds, int(store.bounds[-1]))
"""


def memory(directory, mebibytes):
    """Return the peak resident MiB above the model while tokenizing a text and training five steps on it."""
    path = directory / "large.jsonl"
    rng = random.Random(1)
    paragraphs = [text(rng, 300) for _ in range(200)]
    with path.open("w") as file:
        while file.tell() < mebibytes * 2**20:
            file.write(
                json.dumps({"text": rng.choice(paragraphs) + str(rng.random()) + rng.choice(paragraphs)})
                + "\n"
            )
    command = [
        sys.executable,
        "-c",
        MEMORY,
        str(resolve_model(MODEL)),
        str(path),
        str(directory / "cache-large"),
    ]
    peak, seconds, tokens = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {
        "text_mib": mebibytes,
        "peak_mib": round(float(peak)),
        "tokenise_s": round(float(seconds), 1),
        "tokens": int(tokens),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--large", action="store_true", help="also 1 GiB of text: takes minutes, and 3 GiB of disk"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    directory = Path(tempfile.mkdtemp(prefix="whet-bench-"))
    try:
        results = {
            "machine": describe_machine(),
            "tokenisation": tokenisation(directory),
            "first_batch_of_100k_chats": first_batch(directory),
            "packing": packing(),
            "loader": loader(directory),
            "memory": [memory(directory, size) for size in (64, 1024)[: 2 if arguments.large else 1]],
        }
    finally:
        shutil.rmtree(directory)
    path = Path(__file__).parent / "results" / "data.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
