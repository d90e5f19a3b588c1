"""The comparison of dtypes as text tables and as JSON."""

import math
from typing import Any

from whet.reporting.formatting import to_json_number
from whet.studies.dtype_comparison import COSINE, ComparisonRow, Diagnosis, PathResult

MAX_SHOWN = 20  # rows of the routing table, and parameter names in a verdict
DIVERGENT = "[ROUTING DIVERGENT]"


def describe_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the gradient tables, the routing table and the verdicts as text."""
    size = f"batch of {diagnosis.batch}, {diagnosis.parameters:,} trainable parameters"
    lines = [f"reference {diagnosis.reference}: {size}, loss {diagnosis.loss:.6f}"]
    for result in diagnosis.results:
        scale = f", loss scale {result.loss_scale:g}" if result.loss_scale != 1 else ""
        lines += ["", f"{result.path.name}: {_describe_path(result)}{scale}"]
        lines.append(f"largest output difference: {_number(result.largest_difference)}")
        lines += _table(diagnosis, result)
    if diagnosis.choices:
        lines += ["", *_routing(diagnosis)]
    lines.append("")
    lines += [_verdict(diagnosis, result) for result in diagnosis.results]
    return "\n".join([*lines, f"verdict: {diagnosis.verdict}"])


def _describe_path(result: PathResult) -> str:
    if result.path.simulated:
        return "simulated by rounding every weight and activation"
    return "computed by the device"


def _table(diagnosis: Diagnosis, result: PathResult) -> list[str]:
    width = max(len(row.name) for row in result.rows)
    head = (result.path.name, diagnosis.reference, "ratio", "|delta|", "rel", "cos")
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


def _routing(diagnosis: Diagnosis) -> list[str]:
    """Return a table of the experts selected per row in every dtype, with differing rows first."""
    divergent = {key for result in diagnosis.results for key in result.divergent}
    all_rows = [(router, row) for router, rows in enumerate(diagnosis.choices) for row in range(len(rows))]
    shown = sorted(all_rows, key=lambda key: (key not in divergent, key))[:MAX_SHOWN]
    names = [diagnosis.reference, *(result.path.name for result in diagnosis.results)]
    has_several_routers = len(diagnosis.choices) > 1
    lines = ["selected experts by row:", f"{'row':<12}  " + "  ".join(f"{name:>10}" for name in names)]
    for router, row in shown:
        sets = [
            diagnosis.choices[router][row],
            *(result.choices[router][row] for result in diagnosis.results),
        ]
        cells = "  ".join(f"{','.join(map(str, experts)):>10}" for experts in sets)
        label = f"{router}:{row}" if has_several_routers else str(row)
        mark = f"  {DIVERGENT}" if (router, row) in divergent else ""
        lines.append(f"{label:<12}  {cells}{mark}")
    if len(all_rows) > len(shown):
        lines.append(f"... and {len(all_rows) - len(shown)} more rows")
    return lines


def _verdict(diagnosis: Diagnosis, result: PathResult) -> str:
    worst = result.worst
    line = (
        f"{result.path.name}: {result.verdict}; worst ratio {_ratio(worst.ratio)} ({worst.name}), "
        f"lowest cosine {_cosine(result)}"
    )
    if diagnosis.choices:
        line += f", divergent rows {len(result.divergent)}/{diagnosis.routed}"
    if result.verdict != "fine":
        names = [row.name for row in result.rows if row.verdict != "fine"]
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        listed = f"{', '.join(names[:MAX_SHOWN])}{more}"
        line += f"\n  norm off by more than a factor of 2, or cosine below {COSINE}: {listed}"
    return line


def _cosine(result: PathResult) -> str:
    cosines = [row.cosine for row in result.rows]
    return "nan" if any(map(math.isnan, cosines)) else f"{min(cosines):.4f}"


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:  # Any: JSON values
    """Return the diagnosis as JSON values; infinities and NaN become strings."""
    return {
        "verdict": diagnosis.verdict,
        "reference": diagnosis.reference,
        "batch": diagnosis.batch,
        "parameters": diagnosis.parameters,
        "loss": diagnosis.loss,
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
                "routed_rows": diagnosis.routed,
                "parameters": [_row(row) for row in result.rows],
            }
            for result in diagnosis.results
        ],
        "routing": [
            {
                "router": router,
                "row": row,
                diagnosis.reference: list(experts),
                **{result.path.name: list(result.choices[router][row]) for result in diagnosis.results},
                "divergent": any((router, row) in result.divergent for result in diagnosis.results),
            }
            for router, rows in enumerate(diagnosis.choices)
            for row, experts in enumerate(rows)
        ],
    }


def _row(row: ComparisonRow) -> dict[str, Any]:  # Any: JSON values
    values = {
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
        **{name: to_json_number(v) for name, v in values.items()},
    }
