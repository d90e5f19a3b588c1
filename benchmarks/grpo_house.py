"""SmolLM2 on house commands: a brief fine-tuning, then GRPO on top of it, with the time each takes.

    python -m benchmarks.grpo_house [section.key=value ...]

runs examples/grpo-house-sft.yaml, which it stops as soon as three in ten answers are right, and
examples/grpo-house.yaml (overrides are for the latter; `sft:` before one is for the former), prints what comes of
them and writes benchmarks/results/grpo-house.json.
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


class Show(whet.Callback):
    """Progress on the terminal."""

    def on_step_end(self, step, metrics):
        if step == 1 or step % 10 == 0:
            print(
                step,
                {key: round(metrics[key], 4) for key in (*ROWS[1:], *SPEEDS) if key in metrics},
                flush=True,
            )

    def on_eval_end(self, step, metrics):
        print(f"evaluation at {step}:", {key: round(value, 4) for key, value in metrics.items()}, flush=True)


class EnoughToStartFrom(whet.Callback):
    """Ends the fine-tuning when the model is right sometimes: what comes after that is for the rewards."""

    def on_eval_end(self, step, metrics):
        return whet.StopRun("right often enough") if metrics["exact_match"] >= 0.3 else None


def timed(config: RunConfig, *callbacks: whet.Callback) -> tuple[whet.RunResult, float]:
    started = time.perf_counter()
    result = whet.train(config, [Show(), *callbacks], verbose=0)
    return result, time.perf_counter() - started


def matches(result: whet.RunResult) -> list[dict[str, float]]:
    """Exact match at each evaluation."""
    return [
        {"step": row["step"], "exact_match": row["exact_match"]}
        for row in result.history
        if "exact_match" in row
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    given = parser.parse_args().overrides
    tuned_overrides = [word.removeprefix("sft:") for word in given if word.startswith("sft:")]
    overrides = [word for word in given if not word.startswith("sft:")]
    with tempfile.TemporaryDirectory() as scratch:
        place = f"run.dir={scratch}"
        longer = ["run.steps=40", "eval.every=2", "optim.schedule=constant"]
        tuned, tuned_s = timed(
            load_config(ROOT / "examples" / "grpo-house-sft.yaml", [place, *longer, *tuned_overrides]),
            EnoughToStartFrom(),
        )
        start = f"model={tuned.directory}"
        result, seconds = timed(
            load_config(ROOT / "examples" / "grpo-house.yaml", [place, start, *overrides])
        )
        steps = [row for row in result.history if "reward_mean" in row]
        found = matches(result)
        written = {
            "what": "examples/grpo-house-sft.yaml, then examples/grpo-house.yaml",
            "machine": describe_machine(),
            "overrides": given,
            "fine_tuning": {"steps": tuned.steps, "seconds": tuned_s, "evaluations": matches(tuned)},
            "grpo": {
                "seconds": seconds,
                "exact_match_before": found[0]["exact_match"],
                "exact_match_after": found[-1]["exact_match"],
                "gain_points": 100 * (found[-1]["exact_match"] - found[0]["exact_match"]),
                "test": result.summary.get("test"),
                "evaluations": found,
                "steps": [
                    {key: row[key] for key in (*ROWS, *SPEEDS)} for row in steps[:: max(1, len(steps) // 20)]
                ],
            },
        }
    RESULT.write_text(json.dumps(written, indent=2) + "\n")
    print(json.dumps(written["grpo"] | {"steps": len(steps)}, indent=2))
    print(f"gained {written['grpo']['gain_points']:.1f} points in {seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
