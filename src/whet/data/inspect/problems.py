"""What is wrong with a run's data, judged from the facts: all of it at once."""

from collections.abc import Iterator
from dataclasses import dataclass

from whet.data.inspect.data_facts import DataView, SplitFacts
from whet.data.sources.splits import LEARNED
from whet.data.tokens.eos_check import ENDLESS_HINT, endless_message
from whet.data.tokens.examples import cut_warning, too_long_hint

MOST_DUPLICATES = 0.05  # of the records


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and the records that show it."""

    message: str
    hint: str | None = None
    details: tuple[str, ...] = ()
    stops: bool = False  # `whet train` would refuse to start


def find_problems(view: DataView) -> list[Problem]:
    """Every problem, what stops a run first."""
    found = [Problem(error.message, error.hint, stops=True) for error in view.errors]
    for split in view.splits:
        found += _of_records(split, strict=view.config.data.on_bad_record == "error")
        found += _of_model(split, view)
        found += _of_masks(split, view)
        found += _of_amounts(split)
        found += (Problem(f"{split.name}: {message}", hint) for message, hint in split.unread)
    found += (Problem(message, hint) for message, hint in view.unread_prompts)
    for each in view.overlaps:
        if each.twins.count:
            message = f"{each.held}: {_records(each.twins.count)} also in {each.learned}"
            hint = "an evaluation on records that were learned from says nothing"
            found.append(Problem(message, hint, (" = ".join(each.twins.pair),)))
    return sorted(found, key=lambda problem: not problem.stops)


def _of_records(split: SplitFacts, *, strict: bool) -> Iterator[Problem]:
    if split.skipped:
        ways = [split.hint or "fix them", *(["set data.on_bad_record to skip"] if strict else [])]
        hint = "; or ".join(ways) if strict or split.hint else None
        bad = f"{split.skipped:,} bad record{'s' * (split.skipped != 1)}"
        yield Problem(f"{split.name}: {bad}", hint, _listed(split.reasons, split.skipped), stops=strict)
    if split.refused:
        yield Problem(
            f"{split.name}: {_records(split.refused)} longer than data.max_length",
            too_long_hint(can_split=split.can_split),
            _listed(split.too_long, split.refused),
            stops=True,
        )
    if split.only_last:
        yield Problem(
            f"{split.name}: the chat template rewrites earlier turns of {_conversations(split.only_last)}: "
            "only the last answer of each is learned",
            "set data.supervise to last or all to say what is meant",
        )


def _of_model(split: SplitFacts, view: DataView) -> Iterator[Problem]:
    if view.model is None:
        return
    if split.outside is not None:
        yield Problem(
            f"{split.name}: {split.outside} is outside the model's vocabulary of {view.model.vocab_size:,}",
            "the tokenizer belongs to another model",
            stops=True,
        )
    length, origin = split.longest
    positions = view.model.max_positions
    if positions is not None and length - 1 > positions:
        yield Problem(
            f"{split.name}: {origin}: {length:,} tokens, and {view.model.name} was made for {positions:,}",
            f"set data.max_length to {positions}",
            stops=True,
        )


def _of_masks(split: SplitFacts, view: DataView) -> Iterator[Problem]:
    if split.doubled_bos:
        yield Problem(
            f"{split.name}: {_records(split.doubled_bos)} beginning with BOS twice",
            "take it out of the texts: the tokenizer or the template writes it",
            (f"first: {split.first_doubled}",),
        )
    ends = view.tokenizer.ends if view.tokenizer is not None else ()
    if ends and not split.ended and split.name in LEARNED and not split.is_judged:
        yield Problem(f"{split.name}: {endless_message(ends)}", ENDLESS_HINT)


def _of_amounts(split: SplitFacts) -> Iterator[Problem]:
    if (warning := cut_warning(split.cut, split.records, can_split=split.can_split)) is not None:
        message, hint = warning
        yield Problem(f"{split.name}: {message}", hint)
    if split.duplicates.count > MOST_DUPLICATES * split.records:
        share = split.duplicates.count / split.records
        yield Problem(
            f"{split.name}: {share:.0%} of the records are duplicates (more than {MOST_DUPLICATES:.0%})",
            "each is learned once more than the others",
            (" = ".join(split.duplicates.pair),),
        )


def _listed(found: tuple[str, ...], count: int) -> tuple[str, ...]:
    more = count - len(found)
    return (*found, *([f"and {more:,} more"] if more else []))


def _records(count: int) -> str:
    return f"{count:,} record{'s' * (count != 1)}"


def _conversations(count: int) -> str:
    return f"{count:,} conversation{'s' * (count != 1)}"
