"""The text of `whet doctor --recommend`."""

from collections.abc import Iterator, Sequence

from whet.planning.plan import MAX_MICRO_BATCH_TOKENS
from whet.reporting.formatting import format_memory
from whet.studies.recommend import MARGIN, MAX_LENGTH, METHODS, RANK, Recommendation

_WIDTH = 21


def recommend_lines(recommendation: Recommendation) -> Iterator[str]:
    """Yield a table of sizes and methods, then one recommendation per method."""
    target = recommendation.target
    usable = format_memory(target.usable_memory)
    yield f"device     {target.name}: {format_memory(target.memory)} of memory, {usable} usable"
    yield f"precision  {target.precision.reason}"
    yield (
        f"estimated  sft, data.max_length={MAX_LENGTH}, run.grad_checkpoint=true, AdamW; "
        f"adapters of rank {RANK}"
    )
    yield ""
    yield _row("model", METHODS)
    for size in dict.fromkeys(estimate.size for estimate in recommendation.estimates):
        cells = [
            f"{recommendation.verdict(estimate):<6}{format_memory(estimate.peak):>11}"
            for estimate in recommendation.estimates
            if estimate.size == size
        ]
        yield _row(size, cells)
    yield f"(peak memory of one document per micro-batch; tight: less than {MARGIN:.0%} is left)"
    yield ""
    for method in METHODS:
        yield f"{method:<7}{_describe(recommendation, method)}"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<7}{''.join(f'{cell:<{_WIDTH}}' for cell in cells)}".rstrip()


def _describe(recommendation: Recommendation, method: str) -> str:
    best = recommendation.best[method]
    if best is None:
        return f"no model of the table fits with {MARGIN:.0%} to spare"
    tokens = recommendation.micro_batch_tokens[method]
    or_more = " or more" if tokens > 0.9 * MAX_MICRO_BATCH_TOKENS else ""
    return f"up to {best.size}, with run.micro_batch_tokens up to {tokens:,}{or_more}"
