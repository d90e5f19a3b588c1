"""The key facts of a run as text, and the commands to reproduce, resume or use it."""

import json
import math
import shlex
from collections.abc import Iterator
from statistics import median

from whet.config.objectives.union import objective_section
from whet.reporting.formatting import format_elapsed, format_number, format_value
from whet.run_directory import CONFIG_FILE, FINAL_DIRECTORY
from whet.runs.metric_series import as_number
from whet.runs.run_files import JsonObject, RunFiles, nested_object

_MAX_LENGTH = 200  # characters of a fact; the config has the full value


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """Return the run's settings and results as (name, value) pairs, without unknown values."""
    return [(name, text) for name, text in _facts(run) if text]


def headline(run: RunFiles) -> list[tuple[str, str]]:
    """Return the most important metrics as (name, value) pairs, without unknown values."""
    return [(name, text) for name, text in _headline(run) if text]


def _headline(run: RunFiles) -> Iterator[tuple[str, str]]:
    summary = run.summary or {}
    best = nested_object(summary, "best")
    if as_number(best.get("value")) is not None:
        yield f"best {str(best.get('metric')).replace('_', ' ')}", format_value(best["value"])
    else:
        yield "last loss", format_value(_last(run, "loss"), missing="")
    yield "steps", steps_text(run)
    yield "tokens", format_value(summary.get("tokens", _last(run, "tokens_total")), missing="")
    yield "time", format_elapsed(summary.get("seconds", _last(run, "elapsed_s")))
    rates = [value for value in _numbers(run, "tokens_per_s") if math.isfinite(value)]
    yield "median tokens/s", format_number(median(rates)) if rates else ""
    utilizations = [value for value in _numbers(run, "mfu") if math.isfinite(value)]
    yield "median MFU", f"{median(utilizations):.1%}" if utilizations else ""
    peaks = [value for value in _numbers(run, "peak_gib") if math.isfinite(value)]
    planned = planned_gib(run)
    plan_share = f", {max(peaks) / planned:.0%} of the plan" if peaks and planned else ""
    yield f"peak memory{plan_share}", f"{max(peaks):.3g} GiB" if peaks else ""


def planned_gib(run: RunFiles) -> float | None:
    """Return the peak memory of the run's plan in GiB, or None if unknown.

    None for runs on a CPU, whose measured peak includes everything the process has loaded.
    """
    if str(nested_object(run.provenance, "machine").get("device", "")).startswith("cpu"):
        return None
    peak = as_number(nested_object(run.plan, "bytes").get("peak"))
    return peak / 2**30 if peak is not None and 0 < peak < math.inf else None


def _numbers(run: RunFiles, name: str) -> list[float]:
    return [number for row in run.rows if (number := as_number(row.get(name))) is not None]


def _facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    config, summary = run.config, run.summary or {}
    yield "model", _short(config.get("model"))
    yield "method", _method(nested_object(config, "method"))
    yield "objective", _objective(nested_object(config, "objective"))
    for split in ("train", "valid", "test"):
        yield f"data.{split}", _short(nested_object(config, "data").get(split))
    yield "best", best_text(summary)
    yield (
        "test",
        ", ".join(
            f"{name.replace('_', ' ')} {format_value(value)}"
            for name, value in nested_object(summary, "test").items()
            if as_number(value) is not None and name != "s"
        ),
    )


def best_text(summary: JsonObject) -> str:
    """Return the best evaluation of a summary as text, or an empty string."""
    best = nested_object(summary, "best")
    if as_number(best.get("value")) is None:
        return ""
    name = str(best.get("metric")).replace("_", " ")
    return f"{name} {format_value(best['value'])} at step {format_value(best.get('step'))}"


def _method(method: JsonObject) -> str:
    kind = method.get("kind")
    if not isinstance(kind, str) or kind == "full":
        return kind if isinstance(kind, str) else ""
    variant = method.get("variant")
    name = f"{kind} ({variant})" if isinstance(variant, str) and variant != kind else kind
    return f"{name}, rank {format_value(method.get('rank'))}, alpha {format_value(method.get('alpha'))}"


def _objective(objective: JsonObject) -> str:
    kind = objective.get("kind")
    parts = objective.get("parts")
    if not isinstance(parts, list):
        return kind if isinstance(kind, str) else ""
    kinds = [_objective(nested_object(part, "objective")) for part in parts if isinstance(part, dict)]
    return f"{kind}: {' + '.join(kinds)}"


def _short(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):  # a preset: only the keys that are set
        text = ", ".join(f"{name} {_to_text(item)}" for name, item in value.items() if item is not None)
    else:
        text = _to_text(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _last(run: RunFiles, name: str) -> object:
    return next((row[name] for row in reversed(run.rows) if name in row), None)


def steps_text(run: RunFiles) -> str:
    """Return the number of completed steps, with the planned number if it differs."""
    done = (run.summary or {}).get("steps", _last(run, "step"))
    planned = nested_object(run.config, "run").get("steps")
    if as_number(done) is None:
        return ""
    differs = as_number(planned) is not None and planned != done
    return format_value(done) + (f" of {format_value(planned)}" if differs else "")


def reproduce_commands(run: RunFiles) -> list[str]:
    """Return the command that trains the run again, under a new name since runs are never overwritten."""
    config = shlex.quote(str(run.directory / CONFIG_FILE))
    return [f"whet train {config} {shlex.quote(f'run.name={run.name}-again')}"]


def use_commands(run: RunFiles) -> list[str]:
    """Return the commands that resume an unfinished run, or that use the final model."""
    path = shlex.quote(str(run.directory))
    if not run.is_finished:
        return [f"whet resume {path}"]
    output = objective_section(nested_object(run.config, "objective").get("kind")).output
    if output == "class":
        return [f"whet classify {path} 'a text'", f"whet classify {path} --data test.jsonl"]
    if output == "numbers":  # not a text model
        return [f"ls {shlex.quote(str(run.directory / FINAL_DIRECTORY))}"]
    return [
        f"whet chat {path}",
        f"whet generate {path} 'a prompt'",
        f"whet eval {path} --data test.jsonl",
        f"whet export {path} --to gguf --check",
    ]
