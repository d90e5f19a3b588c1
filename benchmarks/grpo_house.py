"""Benchmark GRPO on house commands: fine-tune SmolLM2 briefly, continue with GRPO, and time both.

    python -m benchmarks.grpo_house [section.key=value ...]

runs examples/grpo-house-sft.yaml, which it stops as soon as 30% of the answers are correct, and then
examples/grpo-house.yaml. Overrides apply to the latter; with the prefix `sft:`, to the former. It prints the results
and writes benchmarks/results/grpo-house.json.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import whet
from benchmarks.machine import describe_machine
from whet.config.load_config import load_config
from whet.config.run_config import RunConfig

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "grpo-house.json"
ROWS = (
    "step",
    "reward_mean",
    "no_signal_fraction",
    "entropy",
    "completion_tokens",
    "truncated_fraction",
    "mismatch",
)
SPEEDS = ("generation_tokens_per_s", "tokens_per_s", "generation_s", "reward_s", "step_s")


class PrintMetrics(whet.Callback):
    """Prints the metrics of steps and evaluations."""

    def on_step_end(self, step, metrics):
        if step == 1 or step % 10 == 0:
            print(
                step,
                {key: round(metrics[key], 4) for key in (*ROWS[1:], *SPEEDS) if key in metrics},
                flush=True,
            )

    def on_eval_end(self, step, metrics):
        print(f"evaluation at {step}:", {key: round(value, 4) for key, value in metrics.items()}, flush=True)


class StopAtExactMatch(whet.Callback):
    """Stops fine-tuning when 30% of the answers are correct, so that GRPO can improve the rest."""

    def on_eval_end(self, step, metrics):
        return whet.StopRun("exact_match has reached 0.3") if metrics["exact_match"] >= 0.3 else None


def timed(config: RunConfig, *callbacks: whet.Callback) -> tuple[whet.RunResult, float]:
    started = time.perf_counter()
    result = whet.train(config, [PrintMetrics(), *callbacks], verbose=0)
    return result, time.perf_counter() - started


def exact_matches(result: whet.RunResult) -> list[dict[str, float]]:
    """Return the exact match of each evaluation."""
    return [
        {"step": row["step"], "exact_match": row["exact_match"]}
        for row in result.history
        if "exact_match" in row
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args().overrides
    tuned_overrides = [word.removeprefix("sft:") for word in arguments if word.startswith("sft:")]
    overrides = [word for word in arguments if not word.startswith("sft:")]
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = f"run.dir={scratch}"
        sft_overrides = ["run.steps=40", "eval.every=2", "optim.schedule=constant"]
        tuned, tuned_s = timed(
            load_config(
                ROOT / "examples" / "grpo-house-sft.yaml", [run_dir, *sft_overrides, *tuned_overrides]
            ),
            StopAtExactMatch(),
        )
        start = f"model={tuned.directory}"
        result, seconds = timed(
            load_config(ROOT / "examples" / "grpo-house.yaml", [run_dir, start, *overrides])
        )
        steps = [row for row in result.history if "reward_mean" in row]
        evaluations = exact_matches(result)
        output = {
            "what": "examples/grpo-house-sft.yaml, then examples/grpo-house.yaml",
            "machine": describe_machine(),
            "overrides": arguments,
            "fine_tuning": {"steps": tuned.steps, "seconds": tuned_s, "evaluations": exact_matches(tuned)},
            "grpo": {
                "seconds": seconds,
                "exact_match_before": evaluations[0]["exact_match"],
                "exact_match_after": evaluations[-1]["exact_match"],
                "gain_points": 100 * (evaluations[-1]["exact_match"] - evaluations[0]["exact_match"]),
                "test": result.summary.get("test"),
                "evaluations": evaluations,
                "steps": [
                    {key: row[key] for key in (*ROWS, *SPEEDS)} for row in steps[:: max(1, len(steps) // 20)]
                ],
            },
        }
    RESULT.write_text(json.dumps(output, indent=2) + "\n")
    print(json.dumps(output["grpo"] | {"steps": len(steps)}, indent=2))
    print(f"gained {output['grpo']['gain_points']:.1f} points in {seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
