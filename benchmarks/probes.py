"""Measure the cost of probes at their default intervals, as a fraction of the step time.

    python -m benchmarks.probes [--rounds N] [--plain-steps N] [--device D] [CASE...]; cases: nano, smollm2-lora, smollm2-full

Each round runs some plain steps, then every probe once, so that a temporary slowdown affects both. The cost is the sum
over probes of (median seconds / interval), divided by the median seconds of a step. Writes
benchmarks/results/probes.json (with --device cuda, probes-cuda.json).
"""

import argparse
import json
import logging
import statistics
import time
from pathlib import Path

import torch

import whet
from benchmarks.machine import describe_machine
from whet.config.load_config import validate_config
from whet.config.log import Probes
from whet.runs.assemble import open_assembly
from whet.training.observe.probe_batches import probe_batches
from whet.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
SMOLLM2 = {
    "model": "smollm2-135m-instruct",
    "data": {"train": "synth:house:400", "max_length": 512},
    "run": {"steps": 1000, "batch_tokens": 512},
}
CASES = {
    "nano": {
        "model": {"preset": "nano"},
        "method": {"kind": "full"},
        "data": {"train": "synth:python-topics", "max_length": 257, "too_long": "split"},
        "run": {"steps": 1000, "batch_tokens": 2048},
    },
    "smollm2-lora": {**SMOLLM2, "method": {"kind": "lora", "rank": 8}},
    "smollm2-full": {**SMOLLM2, "method": {"kind": "full"}},
}


def measure(case, *, rounds, plain_steps, device, directory):
    settings = {**CASES[case], "run": {**CASES[case]["run"], "device": device, "dir": str(directory)}}
    config, defaults = validate_config(settings), Probes()
    with open_assembly(config) as assembly:
        batches = probe_batches(assembly.stream, assembly.objective)
        probes = {
            "gradients": whet.GradientStats(batches[0], defaults.gradients),
            "weights": whet.WeightStats(defaults.weights),
            "activations": whet.ActivationStats(batches[0], defaults.activations),
            "attention": whet.AttentionEntropy(batches[0], defaults.attention),
            "noise": whet.GradientNoise(batches, defaults.noise),
            "rank": whet.EffectiveRank(defaults.rank),
        }
        trainer = Trainer(
            assembly.model, assembly.objective, assembly.stream, config, precision=assembly.precision
        )
        for probe in probes.values():
            probe.trainer = trainer
            probe.on_train_begin(trainer.view)
        steps, seconds = [], {name: [] for name in probes}
        trainer.step(next(assembly.stream))  # warm-up
        for _ in range(rounds):
            steps += [trainer.step(next(assembly.stream))["step_s"] for _ in range(plain_steps)]
            for name, probe in probes.items():
                started = time.perf_counter()
                probe.on_step_end(probe.every, metrics := {})
                if device == "cuda":
                    torch.cuda.synchronize()
                assert any(key.startswith("exp_") for key in metrics), name
                seconds[name].append(time.perf_counter() - started)
        step = statistics.median(steps)
        each = {name: statistics.median(values) for name, values in seconds.items()}
        return {
            "step_s": step,
            "probes": {
                name: {
                    "seconds": each[name],
                    "every": probe.every,
                    "share": each[name] / probe.every / step,
                }
                for name, probe in probes.items()
            },
            "share": sum(each[name] / probe.every / step for name, probe in probes.items()),
            "rounds": rounds,
            "device": str(assembly.device),
            "precision": assembly.precision.reason,
            "threads": torch.get_num_threads(),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain-steps", type=int, default=3, help="plain steps per round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    logging.getLogger("whet").setLevel(logging.WARNING)
    path = RESULTS / ("probes.json" if options.device == "cpu" else f"probes-{options.device}.json")
    results = json.loads(path.read_text())["cases"] if path.is_file() else {}
    for case in options.cases:
        result = measure(
            case,
            rounds=options.rounds,
            plain_steps=options.plain_steps,
            device=options.device,
            directory=path.parent / "none",
        )
        results[case] = {**result, "note": options.note} if options.note else result
        parts = ", ".join(f"{name} {each['share']:.2%}" for name, each in result["probes"].items())
        print(f"{case}: step {result['step_s']:.3f} s; probes {result['share']:.2%} ({parts})", flush=True)
    path.write_text(json.dumps({"machine": describe_machine(), "cases": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
