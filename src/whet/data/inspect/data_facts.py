"""Facts about each split of a run: counts, lengths, supervised tokens, samples, overlaps."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from whet.config.run_config import RunConfig
from whet.data.batches import check_lengths
from whet.data.class_balance import class_counts, describe_classes
from whet.data.inspect.duplicates import Duplicates, SplitScan, duplicates, overlap
from whet.data.inspect.source_shares import SourceShare, source_shares
from whet.data.inspect.special_tokens import MarkerUse, count_markers, split_template_markers
from whet.data.inspect.step_facts import RunCost, StepFacts
from whet.data.inspect.token_text import Piece, TokenText
from whet.data.run_data import RunData, describe_split_conversations
from whet.data.sources.source import MAX_REASONS
from whet.data.sources.splits import TRAINING_SPLITS
from whet.data.templates.chat import probe_tokenizer
from whet.data.templates.probe import TemplateProbe
from whet.data.tokens.examples import StoredExamples, StoredPairs
from whet.errors import WhetError
from whet.models.costs import ModelSummary

MAX_COUNTED_FORMATS = 10_000  # counting reads the source again, which may be long
MAX_SHOWN_TOKENS = 300  # tokens; longer samples are shown without their middle
SHOWN_HEAD, SHOWN_TAIL = 160, 80
_BINS = 10


@dataclass(frozen=True)
class Sample:
    """One example, token by token; a long one without its middle."""

    origin: str
    kind: str  # chosen or rejected, or its class; else empty
    token_range: str  # token range within its record; empty for a complete record
    tokens: int
    supervised: int
    head: tuple[Piece, ...]
    omitted_tokens: int
    tail: tuple[Piece, ...]


@dataclass(frozen=True)
class Bin:
    """One bar of a histogram: the number of records with `low` to `high` tokens, inclusive."""

    low: int
    high: int
    count: int

    @property
    def label(self) -> str:
        """The range of the bar as text."""
        return f"{self.low:,} to {self.high:,}" if self.high > self.low else f"{self.low:,}"


@dataclass(frozen=True)
class SplitFacts:
    """Facts about train, valid, test, or the hard records of a curriculum."""

    name: str
    source: str
    record_formats: dict[str, int]  # record format -> count, among the first MAX_COUNTED_FORMATS records
    records: int  # without the bad ones
    examples: int
    tokens: int  # of the examples
    supervised: int
    lengths: tuple[int, int, int, int]  # of the records before truncation: min, median, 95%, max
    bins: tuple[Bin, ...]
    shortened: dict[str, int]  # number of records truncated, split and dropped
    skipped: int
    reasons: tuple[str, ...]  # for the first skipped records
    hint: str | None  # how to fix the first of them
    split: str | None  # conversations that became several examples, as text
    lost_turns: int  # turns that cannot follow their prompt
    only_last: int  # conversations of which only the last assistant turn is supervised
    duplicates: Duplicates
    doubled_bos: int
    first_doubled: str
    with_supervised_end: int  # examples with a supervised end token
    longest: tuple[int, str]  # number of tokens and origin of the longest example
    out_of_vocabulary: str | None  # a token outside the vocabulary of the model
    too_long_count: int  # number of records that are too long, if data.too_long is error
    too_long: tuple[str, ...]  # the first of these records
    samples: tuple[Sample, ...]
    is_classification: bool = False  # inputs to classify, without completions
    pairs: bool = False  # each record has two examples, chosen and rejected
    classes: str = ""  # number of examples per class, as text
    unread_fields: tuple[tuple[str, str], ...] = ()  # fields that are not tokenized: message and fix
    weights: dict[float, int] | None = None  # loss weight -> supervised tokens; None if all weights are 1
    sources: tuple[SourceShare, ...] = ()  # the share of each file
    cut_tokens: int = 0  # tokens of the records that are in no example
    cut_supervised: int = 0  # supervised tokens among them
    markers: tuple[MarkerUse, ...] = ()  # typed special tokens, in the first MAX_COUNTED_FORMATS records

    @property
    def can_split(self) -> bool:
        """Whether long records can be split into windows."""
        return not (self.is_classification or self.pairs)


@dataclass(frozen=True)
class Overlap:
    """Records that are both in a held-out split and in the training data."""

    held_out_split: str
    training_split: str
    duplicates: Duplicates


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts about the tokenizer and its chat template."""

    size: int
    special: dict[str, str]  # BOS, EOS, PAD -> token, if defined
    end_tokens: tuple[str, ...]  # tokens that end a completion
    template: str | None
    template_digest: str | None
    probe: TemplateProbe | None = None  # what the template reads and writes
    split_markers: dict[str, int] | None = None  # markers in the template that are several tokens -> number


@dataclass(frozen=True)
class DataView:
    """Everything that `whet data` shows."""

    config: RunConfig
    model: ModelSummary | None
    tokenizer: TokenizerFacts | None
    splits: tuple[SplitFacts, ...]
    overlaps: tuple[Overlap, ...]
    steps: StepFacts | None
    errors: tuple[WhetError, ...]  # other errors with which `whet train` would fail
    missing_inputs: tuple[WhetError, ...] = ()  # inputs that a run needs and that do not exist yet
    held_out: int = 0  # number of training examples held out for validation
    remaining_classes: str = ""  # number of remaining training examples per class, as text
    unread_prompts: tuple[tuple[str, str], ...] = ()  # prompt fields that are not tokenized: message and fix
    prompts: tuple[tuple[str, str], ...] = ()  # prompts to complete, for objectives that train on completions
    completions: int = 0  # per prompt
    completion_tokens: int = 0  # maximum per completion
    cost: RunCost | None = None  # time and memory on a device, if one was named


def check_evaluation(examples: StoredExamples | StoredPairs, data: RunData) -> None:
    """Raise an error for examples that do not fit into a micro-batch of an evaluation."""
    limit = data.steps.micro_tokens
    check_lengths(examples, replace(data.steps, batch_size=None, batch_tokens=limit, order="sequential"))


def split_facts(
    name: str, data: RunData, scanned: SplitScan, config: RunConfig, model: ModelSummary | None, samples: int
) -> SplitFacts:
    """Return the facts of one prepared split, with a few samples."""
    examples, source = data.examples[name].sides, data.sources[name]
    store, limit = examples.store, config.data.max_length
    is_judged, sides = data.needs.labels is not None, 2 if data.needs.pairs else 1
    sizes = np.diff(store.bounds) - is_judged
    sorted_sizes = np.sort(sizes)
    low, middle, high, top = (int(sorted_sizes[round(q * (len(sizes) - 1))]) for q in (0, 0.5, 0.95, 1))
    longest = int(examples.lengths.argmax())
    record_sizes = sizes.reshape(-1, sides).max(1)  # the longer side of a pair
    refused = (
        np.flatnonzero(record_sizes > limit) if config.data.too_long == "error" else np.array([], dtype=int)
    )
    text = TokenText(data.tokenizer)
    counted = count_markers(islice(source, MAX_COUNTED_FORMATS), data.tokenizer)
    tokens = int((examples.stops - examples.starts - is_judged).sum())
    repeated = len(examples) - len(
        np.unique(examples.records)
    )  # a window starts with the last token before it
    return SplitFacts(
        name=name,
        source=source.name,
        is_classification=is_judged,
        pairs=data.needs.pairs,
        classes=describe_split_classes(data, name),
        record_formats=counted.formats,
        records=len(store) // sides - store.notes.get("turn_examples", 0) + store.notes.get("split", 0),
        examples=len(examples),
        tokens=tokens,
        supervised=examples.supervised,
        lengths=(low, middle, high, top),
        bins=histogram(sizes),
        shortened={action: 0 if len(refused) else count for action, count in examples.length_counts.items()},
        skipped=store.notes["skipped"],
        reasons=tuple(store.notes["reasons"]),
        hint=store.notes.get("hint"),
        split=describe_split_conversations(store.notes),
        lost_turns=store.notes.get("lost_turns", 0),
        only_last=store.notes["only_last"],
        duplicates=duplicates(store, scanned.hashes),
        doubled_bos=scanned.doubled_bos,
        first_doubled=scanned.first_doubled,
        with_supervised_end=scanned.with_supervised_end,
        longest=(int(examples.lengths[longest]) + 1, examples[longest].origin),
        out_of_vocabulary=_out_of_vocabulary(examples, data.tokenizer, model),
        too_long_count=len(refused),
        too_long=tuple(
            f"{store.origin(sides * record)}: {record_sizes[record]:,} tokens"
            for record in refused[:MAX_REASONS].tolist()
        ),
        unread_fields=tuple(data.unread_field_warnings(store.notes["unread"])),
        weights=_weight_counts(examples),
        sources=source_shares(examples, sides=sides),
        cut_tokens=int(sizes.sum()) - tokens + repeated,
        cut_supervised=int(store.supervised_counts.sum()) - int(examples.supervised_counts().sum()),
        markers=counted.uses(),
        samples=tuple(
            _sample(examples, index, text, kind=_kind(data, examples, index))
            for index in range(min(samples * sides, len(examples)))
        ),
    )


def describe_split_classes(data: RunData, name: str) -> str:
    """Return the number of examples per class of a split as text; empty for other objectives."""
    if (labels := data.needs.labels) is None:
        return ""
    return describe_classes(labels.names, class_counts(labels, data.examples[name].sides))


def _kind(data: RunData, examples: StoredExamples, index: int) -> str:
    """Return "chosen" or "rejected" for an example of a pair, its labels for a classifier, else ""."""
    if data.needs.pairs:
        return "rejected" if index % 2 else "chosen"
    if data.needs.labels is None:
        return ""
    names, values = data.needs.labels.names, examples.store.column_values(int(examples.records[index]))
    if not data.needs.labels.multi_label:
        return f"label {names[int(values[0])]}"
    positive = [
        f"{name} {value:g}" if value < 1 else name
        for name, value in zip(names, values, strict=False)
        if value
    ]
    return f"labels {', '.join(positive) or 'none'}"


def _out_of_vocabulary(
    examples: StoredExamples, tokenizer: Any, model: ModelSummary | None
) -> str | None:  # Any: a transformers tokenizer
    store = examples.store
    if model is None or model.vocab_size is None or store.largest < model.vocab_size:
        return None
    name = tokenizer.convert_ids_to_tokens(store.largest)
    return f"{store.origin(store.record_with(store.largest))}: token {store.largest} ({name!r})"


def _sample(examples: StoredExamples, index: int, text: TokenText, *, kind: str) -> Sample:
    example, store = examples[index], examples.store
    record = int(examples.records[index])
    begin, end = (int(store.bounds[at]) for at in (record, record + 1))
    start, stop = int(examples.starts[index]), int(examples.stops[index])
    tokens = np.asarray(example.tokens).tolist()
    mask = [False, *np.asarray(example.supervised[1:], dtype=bool).tolist()]
    if examples.is_classification:  # the model reads all tokens but the extra one at the end
        tokens, mask = tokens[:-1], [True] * (len(tokens) - 1)
    weights = [1.0] * len(tokens) if example.weights is None else np.asarray(example.weights).tolist()
    is_long = len(tokens) > MAX_SHOWN_TOKENS
    head = SHOWN_HEAD if is_long else len(tokens)
    tail = len(tokens) - SHOWN_TAIL if is_long else len(tokens)
    is_complete = (start, stop) == (begin, end)
    extra = examples.is_classification
    return Sample(
        origin=example.origin,
        kind=kind,
        token_range=""
        if is_complete
        else f"tokens {start - begin + 1:,} to {stop - begin - extra:,} of {end - begin - extra:,}",
        tokens=len(tokens),
        supervised=0 if examples.is_classification else example.supervised_count,
        head=text.pieces(tokens[:head], mask[:head], weights[:head]),
        omitted_tokens=tail - head,
        tail=text.pieces(tokens[tail:], mask[tail:], weights[tail:]),
    )


def _weight_counts(examples: StoredExamples) -> dict[float, int] | None:
    """Return the number of supervised targets of each loss weight, from the smallest weight."""
    if not examples.store.has_weights:
        return None
    counts: Counter[float] = Counter()
    for start, stop in zip(examples.starts.tolist(), examples.stops.tolist(), strict=True):
        mask = examples.store.read(start + 1, stop)[1]
        weights = examples.store.read_weights(start + 1, stop)
        assert weights is not None
        values, sizes = np.unique(weights[mask], return_counts=True)
        counts.update(dict(zip(values.tolist(), sizes.tolist(), strict=True)))
    return dict(sorted(counts.items()))


def histogram(sizes: np.ndarray) -> tuple[Bin, ...]:
    """Return bars of equal width, or of doubling width if a few records are far longer than most."""
    low, top = int(sizes.min()), int(sizes.max())
    if top > 16 * float(np.median(sizes)):
        edges = 2 ** np.arange(int(np.log2(low)), int(np.log2(top)) + 2)
    else:
        magnitude = 10 ** np.floor(np.log10(max(1, (top - low) / _BINS)))
        step = int(magnitude * next(f for f in (1, 2, 5, 10) if f * magnitude >= (top - low) / _BINS))
        edges = np.arange(low // step * step, top + step + 1, step)
    counts, _ = np.histogram(sizes, edges)
    return tuple(
        Bin(int(first), int(next_edge) - 1, int(count))
        for first, next_edge, count in zip(edges, edges[1:], counts, strict=False)
        if first <= top
    )


def find_overlaps(data: RunData, scans: dict[str, SplitScan]) -> list[Overlap]:
    """Return the records that valid or test share with the training data."""
    overlaps = []
    for held_out in ("valid", "test"):
        for trained in TRAINING_SPLITS:
            if held_out in scans and trained in scans:
                twins = overlap(
                    data.examples[held_out].store,
                    scans[held_out].hashes,
                    data.examples[trained].store,
                    scans[trained].hashes,
                )
                overlaps.append(Overlap(held_out, trained, twins))
    return overlaps


def tokenizer_facts(
    tokenizer: Any,  # Any: a transformers tokenizer
    ends: tuple[str, ...],
    *,
    template_args: Mapping[str, Any] | None = None,  # Any: JSON values
    is_own_template: bool = True,
) -> TokenizerFacts:
    """Return the special tokens and the chat template of a tokenizer.

    Args:
        tokenizer: The tokenizer.
        ends: The tokens that end a completion.
        template_args: The arguments of the template.
        is_own_template: Whether the template comes with the model; if not, the config names it.
    """
    named = {name: getattr(tokenizer, f"{name.lower()}_token") for name in ("BOS", "EOS", "PAD")}
    template = tokenizer.chat_template or None
    text = template if template is None or isinstance(template, str) else repr(template)
    return TokenizerFacts(
        size=len(tokenizer),
        special={name: str(token) for name, token in named.items() if token is not None},
        end_tokens=ends,
        template=text,
        template_digest=None if text is None else hashlib.sha256(text.encode()).hexdigest()[:12],
        probe=None if text is None else probe_tokenizer(tokenizer, template_args=template_args),
        split_markers=None
        if text is None
        else split_template_markers(text, tokenizer, is_own=is_own_template),
    )
