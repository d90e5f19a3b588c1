"""A diagnosis of number formats as a table, and as JSON."""

import math
from typing import Any

from whet.reporting.formatting import to_json_number
from whet.studies.dtype_comparison import COSINE, ComparisonRow, Diagnosis, PathResult

SHOWN = 20  # rows of a routing table, and names in a verdict
DIVERGENT = "[ROUTING DIVERGENT]"


def describe_diagnosis(found: Diagnosis) -> str:
    """Everything that was found, for a person."""
    size = f"batch of {found.batch}, {found.parameters:,} trained parameters"
    lines = [f"reference {found.reference}: {size}, loss {found.loss:.6f}"]
    for result in found.results:
        scale = f", loss x {result.loss_scale:g}" if result.loss_scale != 1 else ""
        lines += ["", f"{result.path.name}: {_what(result)}{scale}"]
        lines.append(f"largest difference of the outputs {_number(result.largest_difference)}")
        lines += _table(found, result)
    if found.choices:
        lines += ["", *_routing(found)]
    lines.append("")
    lines += [_verdict(found, result) for result in found.results]
    return "\n".join([*lines, f"verdict: {found.verdict}"])


def _what(result: PathResult) -> str:
    if result.path.simulated:
        return "simulated, every weight and activation rounded"
    return "as the device computes it"


def _table(found: Diagnosis, result: PathResult) -> list[str]:
    width = max(len(row.name) for row in result.rows)
    head = (result.path.name, found.reference, "ratio", "|delta|", "rel", "cos")
    lines = [f"{'param':<{width}}  " + "  ".join(f"{name:>12}" for name in head)]
    for row in result.rows:
        cells = (
            f"{row.norm:.6e}" if math.isfinite(row.norm) else "inf",
            f"{row.reference:.6e}",
            _ratio(row.ratio),
            _number(row.delta),
            _number(row.relative),
            "nan" if math.isnan(row.cosine) else f"{row.cosine:.4f}",
        )
        mark = "" if row.verdict == "fine" else f"  {row.verdict}"
        lines.append(f"{row.name:<{width}}  " + "  ".join(f"{cell:>12}" for cell in cells) + mark)
    return lines


def _ratio(value: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return ">1e6" if value >= 1e6 else f"{value:.2f}"


def _number(value: float) -> str:
    return f"{value:.3e}" if math.isfinite(value) else "inf"


def _routing(found: Diagnosis) -> list[str]:
    """Rows with their experts on every path, those that differ first."""
    divergent = {place for result in found.results for place in result.divergent}
    every = [(router, row) for router, rows in enumerate(found.choices) for row in range(len(rows))]
    shown = sorted(every, key=lambda place: (place not in divergent, place))[:SHOWN]
    names = [found.reference, *(result.path.name for result in found.results)]
    several = len(found.choices) > 1
    lines = ["experts by row:", f"{'row':<12}  " + "  ".join(f"{name:>10}" for name in names)]
    for router, row in shown:
        sets = [found.choices[router][row], *(result.choices[router][row] for result in found.results)]
        cells = "  ".join(f"{','.join(map(str, experts)):>10}" for experts in sets)
        where = f"{router}:{row}" if several else str(row)
        mark = f"  {DIVERGENT}" if (router, row) in divergent else ""
        lines.append(f"{where:<12}  {cells}{mark}")
    if len(every) > len(shown):
        lines.append(f"... and {len(every) - len(shown)} more")
    return lines


def _verdict(found: Diagnosis, result: PathResult) -> str:
    worst = result.worst
    line = (
        f"{result.path.name}: {result.verdict}; worst ratio {_ratio(worst.ratio)} ({worst.name}), "
        f"lowest cosine {_cosine(result)}"
    )
    if found.choices:
        line += f", divergent rows {len(result.divergent)}/{found.routed}"
    if result.verdict != "fine":
        named = [row.name for row in result.rows if row.verdict != "fine"]
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        line += f"\n  off by more than 2, or cosine below {COSINE}: {', '.join(named[:SHOWN])}{more}"
    return line


def _cosine(result: PathResult) -> str:
    cosines = [row.cosine for row in result.rows]
    return "nan" if any(map(math.isnan, cosines)) else f"{min(cosines):.4f}"


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:  # Any: JSON values
    """The same for machines; JSON has no infinity and no NaN, so they are texts."""
    return {
        "verdict": found.verdict,
        "reference": found.reference,
        "batch": found.batch,
        "parameters": found.parameters,
        "loss": found.loss,
        "paths": [
            {
                "name": result.path.name,
                "simulated": result.path.simulated,
                "verdict": result.verdict,
                "worst_ratio": to_json_number(result.worst.ratio),
                "worst_parameter": result.worst.name,
                "loss_scale": result.loss_scale,
                "largest_output_difference": to_json_number(result.largest_difference),
                "divergent_rows": len(result.divergent),
                "routed_rows": found.routed,
                "parameters": [_row(row) for row in result.rows],
            }
            for result in found.results
        ],
        "routing": [
            {
                "router": router,
                "row": row,
                found.reference: list(experts),
                **{result.path.name: list(result.choices[router][row]) for result in found.results},
                "divergent": any((router, row) in result.divergent for result in found.results),
            }
            for router, rows in enumerate(found.choices)
            for row, experts in enumerate(rows)
        ],
    }


def _row(row: ComparisonRow) -> dict[str, Any]:  # Any: JSON values
    numbers = {
        "norm": row.norm,
        "reference_norm": row.reference,
        "ratio": row.ratio,
        "abs_diff": row.delta,
        "rel_diff": row.relative,
        "cosine": row.cosine,
    }
    return {
        "name": row.name,
        "verdict": row.verdict,
        **{name: to_json_number(v) for name, v in numbers.items()},
    }
