"""Benchmark data.stream: `python -m benchmarks.streaming` writes benchmarks/results/streaming.json.

It compares the tokens/s of a streamed run's data with tokenization into the store, alternating, and measures the
peak memory while a stream of growing length is read.
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

from benchmarks.data import MODEL, text, tokenizer, write_chats
from benchmarks.machine import describe_machine
from whet.data.packing import StepSettings
from whet.data.sources.record_stream import StreamedSource
from whet.data.sources.source import open_source
from whet.data.streamed_batches import StreamedBatches, StreamSettings
from whet.data.tokens.prepare_dataset import Preparation
from whet.model_io.resolve_model import resolve_model

REPETITIONS = 3
BLOCKS = 4
STEPS = StepSettings(None, 8192, 2048, pack=True)


def open_stream(tok, path, buffer):
    source = StreamedSource(open_source(str(path)), buffer=buffer, skip_bad=False)
    records = source.open(seed=0, total_steps=1)
    preparation = Preparation(tok, cache=path.parent / "unused")
    return StreamedBatches(records, preparation, STEPS, StreamSettings("train", buffer, 0, 2048, "truncate"))


def throughput(path, cache, buffer):
    """Return tokens/s into the store, and tokens/s in the steps of some blocks of a stream, alternating.

    From the first step of the first block to that of the last one, all blocks but the first are tokenized.
    """
    tok = tokenizer()
    rates = {"store": [], "stream": []}
    for _ in range(REPETITIONS):
        shutil.rmtree(cache, ignore_errors=True)
        started = time.perf_counter()
        store = Preparation(tok, cache=cache).store(open_source(str(path)))
        rates["store"].append(int(store.bounds[-1]) / (time.perf_counter() - started))
        stream = open_stream(tok, path, buffer=buffer)
        next(stream)  # the first block is ready, and the second one is being read
        started, tokens = time.perf_counter(), 0
        while stream.state()["block"] < BLOCKS or stream.state()["index"] == 0:
            tokens += sum(batch.real_tokens for batch in next(stream))
        rates["stream"].append(tokens / (time.perf_counter() - started))
        stream.close()
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    return {"tokens_per_s": medians, "ratio": round(medians["stream"] / medians["store"], 3)}


MEMORY = """
import resource, sys
from pathlib import Path
from benchmarks.streaming import open_stream
from transformers import AutoTokenizer
tok = AutoTokenizer.from_pretrained(sys.argv[1])
stream = open_stream(tok, Path(sys.argv[2]), int(sys.argv[4]))
next(stream)
tokens = 0
while tokens < int(sys.argv[3]):
    tokens += sum(batch.real_tokens for batch in next(stream))
stream.close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def memory(path, tokens, buffer):
    """Return the peak resident MiB of a process that reads a stream of so many tokens."""
    command = [sys.executable, "-c", MEMORY, str(resolve_model(MODEL)), str(path), str(tokens), str(buffer)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"tokens": tokens, "buffer": buffer, "peak_mib": round(float(output))}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    directory = Path(tempfile.mkdtemp(prefix="whet-bench-"))
    try:
        texts, chats = directory / "texts.jsonl", directory / "chats.jsonl"
        rng = random.Random(0)
        with texts.open("w") as file:
            file.writelines(json.dumps({"text": text(rng, 400)}) + "\n" for _ in range(1_500))
        write_chats(chats, 3_000)
        sizes = [(100_000, 100), (800_000, 100)]
        results = {
            "machine": describe_machine(),
            "texts": throughput(texts, directory / "cache", buffer=300),
            "chats": throughput(chats, directory / "cache", buffer=600),
            "memory": [memory(texts, tokens, buffer) for tokens, buffer in sizes],
        }
    finally:
        shutil.rmtree(directory)
    path = Path(__file__).parent / "results" / "streaming.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
