"""Tables of generated samples: before and after training for equal prompts, else the first and last step."""

from collections.abc import Sequence

from whet.reporting.formatting import format_value
from whet.reporting.html_page import html_lines, html_text
from whet.runs.run_files import JsonObject, nested_object

_MAX_SAMPLES = 6  # of the first step with samples, and of the last
_MAX_TEXT = 2000  # characters


def samples_section(samples: Sequence[JsonObject]) -> str:
    """Return the sample tables as HTML, with the number of samples."""
    by_step: dict[str, list[JsonObject]] = {}
    for sample in samples:
        by_step.setdefault(format_value(sample.get("step")), []).append(sample)
    steps = list(by_step)
    first, last = by_step[steps[0]], by_step[steps[-1]]
    if len(steps) > 1 and _prompts(first) == _prompts(last):
        shown = min(len(first), _MAX_SAMPLES)
        tables = _before_and_after(steps[0], first[:_MAX_SAMPLES], steps[-1], last[:_MAX_SAMPLES])
        note = f"{shown} of {len(first):,} prompts, sampled at {len(steps):,} steps"
    else:
        selected = steps[:1] + steps[1:][-1:]
        tables = "".join(_at_step(step, by_step[step][:_MAX_SAMPLES]) for step in selected)
        note = (
            f"{sum(min(len(by_step[step]), _MAX_SAMPLES) for step in selected)} of {len(samples):,} samples"
        )
    return f"{tables}<p class='quiet'>{note}; all are in samples.jsonl</p>"


def _prompts(samples: Sequence[JsonObject]) -> list[object]:
    return [sample.get("prompt") for sample in samples]


def _before_and_after(
    before: str, first: Sequence[JsonObject], after: str, last: Sequence[JsonObject]
) -> str:
    rows = [
        (_truncate(old.get("prompt")), _completion(old), _completion(new))
        for old, new in zip(first, last, strict=True)
    ]
    return _table(("prompt", f"before (step {before})", f"after (step {after})"), rows)


def _completion(sample: JsonObject) -> str:
    reward = _reward(sample)
    return _truncate(sample.get("completion")) + (f"\nreward {reward}" if reward else "")


def _at_step(step: str, samples: Sequence[JsonObject]) -> str:
    rewarded = any(map(_reward, samples))
    head = ("prompt", "completion", *(["reward"] if rewarded else []))
    rows = [
        (
            _truncate(sample.get("prompt")),
            _truncate(sample.get("completion")),
            *([_reward(sample)] if rewarded else []),
        )
        for sample in samples
    ]
    return f"<h3>step {html_text(step)}</h3>{_table(head, rows)}"


def _reward(sample: JsonObject) -> str:
    total = format_value(sample.get("reward"), missing="")
    parts = ", ".join(
        f"{name} {format_value(value)}" for name, value in nested_object(sample, "rewards").items()
    )
    return f"{total or '-'} ({parts})" if parts else total


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heading = "".join(f"<th>{html_text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{html_lines(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table class='grid samples'><tr>{heading}</tr>{lines}</table>"


def _truncate(text: object) -> str:
    if not isinstance(text, str):
        return "-"
    more = len(text) - _MAX_TEXT
    return f"{text[:_MAX_TEXT]}… {more:,} more characters" if more > 0 else text
