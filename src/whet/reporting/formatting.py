"""Human-readable numbers, durations, sizes and counts, and columns of them."""

import math
from collections.abc import Sequence
from typing import Any

from whet.data.inspect.token_text import to_visible_text
from whet.runs.metric_series import as_number


def format_number(value: float) -> str:
    """Return integers with thousands separators, other numbers with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def format_value(value: object, missing: str = "-") -> str:
    """Format a value read from a run's files, or return `missing` if it is not a number."""
    number = as_number(value)
    return missing if number is None else format_number(number)


def format_count(value: float) -> str:
    """Return a count with an SI prefix, such as 12.3 M."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f}"


def format_memory(size: float) -> str:
    """Format a memory size given in bytes, from KiB (one decimal) to TiB (two decimals)."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def format_file_size(count: int) -> str:
    """Format a file size given in bytes, from B to TiB with one decimal."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def format_estimate(seconds: float) -> str:
    """Format an estimated duration in one unit, from seconds to days."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 72 * 3600 else f"{seconds / 86400:.1f} days"


def format_elapsed(seconds: object) -> str:
    """Format a measured duration in hours, minutes and seconds; empty if it is not a valid duration."""
    number = as_number(seconds)
    if number is None or not 0 <= number < 1e12:
        return ""
    if number < 100:
        return f"{number:.3g} s"
    minutes, rest = divmod(round(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_age(seconds: float) -> str:
    """Format an age in its largest unit: days, hours, minutes or seconds."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def to_json_number(value: Any) -> Any:  # Any: a JSON value, or a non-finite float
    """Replace NaN and infinities, which JSON does not support, by their names."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns: the first to the left, the others to the right."""
    cells = [[to_visible_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
