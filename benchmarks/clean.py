"""Benchmark `whet data clean`: `python -m benchmarks.clean` writes benchmarks/results/clean.json.

It measures time and peak memory for 100,000 synthetic records of 60 to 140 words, of which one in ten is an exact copy
and one in ten a copy with changed words, against an evaluation set of 1,000 records; and for 20,000 records that all
start with the same 200 words, the worst case for the candidates of LSH. The recall is that of the changed copies whose
similarity, computed from the words in this script, is at least the threshold.
"""

import argparse
import importlib.metadata
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import describe_machine

WORDS = 20_000
THRESHOLD, SHINGLE = 0.8, 5


def sentence(rng, count):
    return " ".join(f"w{int(WORDS ** rng.random())}" for _ in range(count))


def write_records(path, count, *, prefix="", seed=0):
    """Write records; return the pairs of a changed copy and its original that are similar enough."""
    rng = random.Random(seed)
    texts, similar = [], []
    with path.open("w") as file:
        for number in range(count):
            kind = rng.random()
            if texts and kind < 0.1:
                text = rng.choice(texts)
            elif texts and kind < 0.2:
                original = rng.choice(texts)
                words = original.split()
                for _ in range(rng.randint(1, 6)):
                    words[rng.randrange(len(words))] = f"x{rng.randrange(WORDS)}"
                text = " ".join(words)
                if jaccard(text, original) >= THRESHOLD:
                    similar.append(number)
            else:
                text = prefix + sentence(rng, rng.randint(60, 140))
                texts.append(text)
            file.write(json.dumps({"id": number, "text": text}) + "\n")
    return similar


def jaccard(one, other):
    """Return the Jaccard similarity of two texts, from sets of tuples of words."""
    first, second = (
        {tuple(w[i : i + SHINGLE]) for i in range(len(w) - SHINGLE + 1)} for w in (one.split(), other.split())
    )
    return len(first & second) / len(first | second)


CLEAN = """
import json, sys, time
from whet.data.clean.clean_data import clean_data
import datasketch, numpy
def peak_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
before = peak_mib()
started, cpu_started = time.perf_counter(), time.process_time()
report = clean_data(sys.argv[1], sys.argv[2], against=sys.argv[3:])
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
print(json.dumps({"seconds": seconds, "cpu_s": cpu, "peak_mib": peak_mib(), "imports_mib": before, "removed": report.to_json()["removed"]}))
"""


def measure(directory, name, count, *, prefix="", against=()):
    source, target = directory / f"{name}.jsonl", directory / f"{name}-clean.jsonl"
    similar = write_records(source, count, prefix=prefix)
    command = [sys.executable, "-c", CLEAN, str(source), str(target), *map(str, against)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rows = map(json.loads, target.with_suffix(".removed.jsonl").read_text().splitlines())
    removed = {int(row["origin"].rpartition(":")[2]) - 1 for row in rows}
    return {
        "records": count,
        "seconds": round(measured["seconds"], 1),
        "cpu_seconds": round(measured["cpu_s"], 1),
        "records_per_cpu_s": round(count / measured["cpu_s"]),
        "peak_mib": round(measured["peak_mib"]),
        "peak_without_imports_mib": round(measured["peak_mib"] - measured["imports_mib"]),
        "removed": measured["removed"],
        "similar_copies": len(similar),
        "similar_copies_removed": len(removed.intersection(similar)),
    }


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as temporary:
        directory = Path(temporary)
        write_records(directory / "test.jsonl", 1000, seed=1)
        results = {
            "machine": describe_machine() | {"datasketch": importlib.metadata.version("datasketch")},
            "settings": {"threshold": THRESHOLD, "shingle": SHINGLE, "ngram": 13},
            "independent_texts": measure(
                directory, "independent", 100_000, against=[directory / "test.jsonl"]
            ),
            "shared_beginning": measure(
                directory, "shared", 20_000, prefix=sentence(random.Random(2), 200) + " "
            ),
        }
    path = Path(__file__).parent / "results" / "clean.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
