"""Benchmark tasks on a CPU: `python -m benchmarks.evals` writes benchmarks/results/evals-cpu.json.

Runs examples/house-task.yaml (four choices of about 20 tokens) through lm-evaluation-harness with whet's model and with
the harness's own Hugging Face model, on SmolLM2-135M-Instruct in float32, alternating in one process. Times are medians
of the whole evaluation, prompts and metrics included, without loading the model: elapsed seconds, and seconds of CPU
time, which other processes disturb less. The Hugging Face model runs with batch sizes of 1 (its default) and 8; speedups
are relative to the faster one. Needs `pip install "whet[evals]"`.
"""

import argparse
import json
import logging
import statistics
import time
from pathlib import Path

import torch

from benchmarks.machine import describe_machine

MODEL = "smollm2-135m-instruct"
TASK = Path(__file__).parents[1] / "examples" / "house-task.yaml"
CASES = {"zero_shot_chat": (24, 0, True), "three_shot": (12, 3, False)}  # items, shots, chat template
BATCH_SIZES = (1, 8)


def load_models():
    """Return the models of the harness by name."""
    from lm_eval.models.huggingface import HFLM

    from whet.evaluation.harness import HarnessModel
    from whet.model_io.resolve_model import resolve_model

    directory = str(resolve_model(MODEL))
    models = {"whet": HarnessModel(directory, dtype="float32", device="cpu")}
    for size in BATCH_SIZES:
        models[f"hf_batch_{size}"] = HFLM(
            pretrained=directory, dtype="float32", device="cpu", batch_size=size
        )
    return models


def evaluate(model, items, shots, chat):
    """Return the times of one evaluation (elapsed, CPU), its accuracy and the log-likelihoods of all choices."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    [task] = manager.load([str(TASK)])["tasks"].values()
    started, cpu_started = time.perf_counter(), time.process_time()
    results = simple_evaluate(
        model=model,
        tasks=[task],
        limit=items,
        num_fewshot=shots,
        apply_chat_template=chat,
        task_manager=manager,
        bootstrap_iters=0,
    )
    times = time.perf_counter() - started, time.process_time() - cpu_started
    samples = sorted(results["samples"]["house"], key=lambda sample: sample["doc_id"])
    logprobs = [response[0][0] for sample in samples for response in sample["resps"]]
    return times, results["results"]["house"]["acc,none"], logprobs


def compare(models, items, shots, chat, rounds):
    """Return the median time of each model, and how far the results agree."""
    times = {name: [] for name in models}
    accuracy, logprobs = {}, {}
    for _ in range(rounds):
        for name, model in models.items():
            elapsed, accuracy[name], logprobs[name] = evaluate(model, items, shots, chat)
            times[name].append(elapsed)
            print(
                f"{name}: {elapsed[0]:.1f} s, {elapsed[1]:.1f} s CPU, accuracy {accuracy[name]:.3f}",
                flush=True,
            )
    medians = {
        clock: {name: statistics.median(each[index] for each in values) for name, values in times.items()}
        for index, clock in enumerate(("seconds", "cpu_seconds"))
    }
    largest = max(abs(a - b) for a, b in zip(logprobs["whet"], logprobs["hf_batch_1"], strict=True))
    return {
        "items": items,
        "shots": shots,
        "chat": chat,
        "rounds": rounds,
        **{
            clock: {name: round(value, 2) for name, value in values.items()}
            for clock, values in medians.items()
        },
        "speedup": speedup(medians["seconds"]),
        "cpu_speedup": speedup(medians["cpu_seconds"]),
        "accuracy": accuracy,
        "largest_logprob_difference": largest,
    }


def speedup(seconds):
    """Return how many times faster whet is than the fastest other model."""
    fastest = min(value for name, value in seconds.items() if name != "whet")
    return round(fastest / seconds["whet"], 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="evaluations per model (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    models = load_models()
    results = {
        name: compare(models, items, shots, chat, arguments.rounds)
        for name, (items, shots, chat) in CASES.items()
    }
    path = Path(__file__).parent / "results" / "evals-cpu.json"
    report = {"model": MODEL, "threads": arguments.threads, "machine": describe_machine(), **results}
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
