"""Problems of a run's data, derived from its facts."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from whet.data.inspect.data_facts import DataView, SplitFacts
from whet.data.inspect.special_tokens import MarkerUse
from whet.data.sources.splits import TRAINING_SPLITS
from whet.data.tokens.eos_check import NO_EOS_HINT, no_eos_message
from whet.data.tokens.examples import shortening_warning, too_long_hint

MAX_DUPLICATES = 0.05  # warn if a larger fraction of the records are duplicates


@dataclass(frozen=True)
class Problem:
    """A problem of the data, with the records that show it."""

    message: str
    hint: str | None = None
    details: tuple[str, ...] = ()
    is_fatal: bool = False  # `whet train` would not start


def find_problems(view: DataView) -> list[Problem]:
    """Return all problems, those that stop a run first."""
    problems = [Problem(error.message, error.hint, is_fatal=True) for error in view.errors]
    problems += _template_problems(view)
    for split in view.splits:
        problems += _record_problems(split, strict=view.config.data.on_bad_record == "error")
        problems += _model_problems(split, view)
        problems += _mask_problems(split, view)
        problems += _count_problems(split)
        problems += map(functools.partial(_marker_problem, split.name), split.markers)
        problems += (Problem(f"{split.name}: {message}", hint) for message, hint in split.unread_fields)
    problems += (Problem(message, hint) for message, hint in view.unread_prompts)
    for shared in view.overlaps:
        if shared.duplicates.count:
            count = _format_records(shared.duplicates.count)
            message = f"{shared.held_out_split}: {count} also in {shared.training_split}"
            hint = "remove them from one split: evaluating on training records is meaningless"
            problems.append(Problem(message, hint, (" = ".join(shared.duplicates.pair),)))
    return sorted(problems, key=lambda problem: not problem.is_fatal)


def _record_problems(split: SplitFacts, *, strict: bool) -> Iterator[Problem]:
    if split.skipped:
        fixes = [split.hint or "fix them", *(["set data.on_bad_record to skip"] if strict else [])]
        hint = "; or ".join(fixes) if strict or split.hint else None
        bad = f"{split.skipped:,} bad record{'s' * (split.skipped != 1)}"
        yield Problem(
            f"{split.name}: {bad}", hint, _with_remainder(split.reasons, split.skipped), is_fatal=strict
        )
    if split.too_long_count:
        yield Problem(
            f"{split.name}: {_format_records(split.too_long_count)} longer than data.max_length",
            too_long_hint(can_split=split.can_split),
            _with_remainder(split.too_long, split.too_long_count),
            is_fatal=True,
        )
    if split.only_last:
        yield Problem(
            f"{split.name}: the chat template rewrites earlier turns of "
            f"{_format_conversations(split.only_last)}, so only the last assistant turn is supervised",
            "set data.turns to auto, to train on all of them as several examples",
        )
    if split.lost_turns:
        yield Problem(
            f"{split.name}: {split.lost_turns:,} assistant turns cannot follow the prompt that the model is "
            "served, and are not supervised",
            "set data.turns to each to see the error, or mask them with weight: 0",
        )


def _model_problems(split: SplitFacts, view: DataView) -> Iterator[Problem]:
    if view.model is None:
        return
    if split.out_of_vocabulary is not None:
        yield Problem(
            f"{split.name}: {split.out_of_vocabulary} is outside the model's vocabulary of "
            f"{view.model.vocab_size:,}",
            "the tokenizer belongs to another model",
            is_fatal=True,
        )
    length, origin = split.longest
    positions = view.model.max_positions
    if positions is not None and length - 1 > positions:
        yield Problem(
            f"{split.name}: {origin}: {length:,} tokens exceed the {positions:,} positions of "
            f"{view.model.name}",
            f"set data.max_length to {positions}",
            is_fatal=True,
        )


def _mask_problems(split: SplitFacts, view: DataView) -> Iterator[Problem]:
    if split.doubled_bos:
        yield Problem(
            f"{split.name}: {_format_records(split.doubled_bos)} with a duplicate BOS token",
            "remove BOS from the texts: the tokenizer or the chat template adds it",
            (f"first: {split.first_doubled}",),
        )
    ends = view.tokenizer.end_tokens if view.tokenizer is not None else ()
    if (
        ends
        and not split.with_supervised_end
        and split.name in TRAINING_SPLITS
        and not split.is_classification
    ):
        yield Problem(f"{split.name}: {no_eos_message(ends)}", NO_EOS_HINT)


def _count_problems(split: SplitFacts) -> Iterator[Problem]:
    if (warning := shortening_warning(split.shortened, split.records, can_split=split.can_split)) is not None:
        message, hint = warning
        yield Problem(f"{split.name}: {message}", hint)
    if split.duplicates.count > MAX_DUPLICATES * split.records:
        share = split.duplicates.count / split.records
        yield Problem(
            f"{split.name}: {share:.0%} of the records are duplicates (more than {MAX_DUPLICATES:.0%})",
            "duplicates have more weight in training; remove them: whet data clean",
            (" = ".join(split.duplicates.pair),),
        )


def _template_problems(view: DataView) -> Iterator[Problem]:
    markers = view.tokenizer.split_markers if view.tokenizer is not None else None
    if markers:
        listed = ", ".join(f"{marker} ({count} tokens)" for marker, count in markers.items())
        yield Problem(
            f"the chat template writes {listed}, which the tokenizer splits into ordinary tokens",
            "use a template whose markers are tokens of this model, such as data.template: simple",
        )


def _marker_problem(split: str, use: MarkerUse) -> Problem:
    contains = "contains" if use.records == 1 else "contain"
    message = f"{split}: {_format_records(use.records)} {contains} {use.marker} in the text"
    first = (f"first: {use.first}",)
    if use.tokens == 1:
        hint = "it can end or start a turn in the middle of a text; remove it, or write it differently"
        return Problem(f"{message}, which becomes the special token", hint, first)
    return Problem(
        f"{message}, which is not a token: it becomes {use.tokens} ordinary tokens",
        "remove it; to train on chats, use messages, and the chat template writes the markers of the model",
        first,
    )


def _with_remainder(shown: tuple[str, ...], count: int) -> tuple[str, ...]:
    remaining = count - len(shown)
    return (*shown, *([f"and {remaining:,} more"] if remaining else []))


def _format_records(count: int) -> str:
    return f"{count:,} record{'s' * (count != 1)}"


def _format_conversations(count: int) -> str:
    return f"{count:,} conversation{'s' * (count != 1)}"
