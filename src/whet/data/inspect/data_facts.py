"""Facts about each split of a run: counts, lengths, supervised tokens, samples, overlaps."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from whet.config.run_config import RunConfig
from whet.data.batches import check_lengths
from whet.data.class_balance import class_counts, describe_classes
from whet.data.inspect.duplicates import Scan, Twins, duplicates, overlap
from whet.data.inspect.step_facts import StepFacts
from whet.data.inspect.token_text import Piece, TokenText
from whet.data.run_data import RunData
from whet.data.sources.source import REASONS_KEPT
from whet.data.sources.splits import LEARNED
from whet.data.tokens.examples import StoredExamples, StoredPairs
from whet.errors import WhetError
from whet.models.costs import ModelFacts

SHAPES_COUNTED = 10_000  # a source may be long, and is read once more for it
SHOWN_WHOLE = 300  # tokens; of a longer sample the head and the tail are shown
SHOWN_HEAD, SHOWN_TAIL = 160, 80
_BINS = 10


@dataclass(frozen=True)
class Sample:
    """One example, token by token; a long one without its middle."""

    origin: str
    kind: str  # chosen or rejected, or the class, where it is one of these
    place: str  # which part of its record it is, where it is not the whole
    tokens: int
    supervised: int
    head: tuple[Piece, ...]
    left_out: int
    tail: tuple[Piece, ...]


@dataclass(frozen=True)
class Bin:
    """One bar of a histogram: records of `low` to `high` tokens, both included."""

    low: int
    high: int
    count: int

    @property
    def label(self) -> str:
        """Its range, for a person."""
        return f"{self.low:,} to {self.high:,}" if self.high > self.low else f"{self.low:,}"


@dataclass(frozen=True)
class SplitFacts:
    """Train, valid, test, or the hard records of a curriculum."""

    name: str
    source: str
    shapes: dict[str, int]  # how many of its records, the first SHAPES_COUNTED at most, have which
    records: int  # without the bad ones
    examples: int
    tokens: int  # of the examples
    supervised: int
    lengths: tuple[int, int, int, int]  # of the records, before any is cut: min, median, 95%, max
    bins: tuple[Bin, ...]
    cut: dict[str, int]  # truncated, split, dropped
    skipped: int
    reasons: tuple[str, ...]  # why, for the first of them
    hint: str | None  # what to do about the first of them
    only_last: int  # conversations of which the template lets only the last answer be found
    duplicates: Twins
    doubled_bos: int
    first_doubled: str
    ended: int  # examples in which a token that ends an answer is learned
    longest: tuple[int, str]  # tokens of an example, and where it came from
    outside: str | None  # a token that the model does not know
    refused: int  # records that are too long, where data.too_long is error
    too_long: tuple[str, ...]  # the first of them
    samples: tuple[Sample, ...]
    is_judged: bool = False  # its texts are classified, so that nothing follows them
    pairs: bool = False  # records are pairs of two examples each, chosen and rejected
    classes: str = ""  # how many examples each class has, for a person
    unread: tuple[tuple[str, str], ...] = ()  # fields that reach no token, and what to do about each

    @property
    def can_split(self) -> bool:
        """Whether what is too long can be split into windows."""
        return not (self.is_judged or self.pairs)


@dataclass(frozen=True)
class Overlap:
    """Records that are learned from and held out."""

    held: str
    learned: str
    twins: Twins


@dataclass(frozen=True)
class TokenizerFacts:
    """How texts become tokens."""

    size: int
    special: dict[str, str]  # BOS, EOS, PAD: the name, for those that there are
    ends: tuple[str, ...]  # tokens at which an answer ends
    template: str | None
    template_digest: str | None


@dataclass(frozen=True)
class DataView:
    """Everything that is shown."""

    config: RunConfig
    model: ModelFacts | None
    tokenizer: TokenizerFacts | None
    splits: tuple[SplitFacts, ...]
    overlaps: tuple[Overlap, ...]
    steps: StepFacts | None
    errors: tuple[WhetError, ...]  # what `whet train` would stop at, and nothing above tells
    missing: tuple[WhetError, ...] = ()  # what must be written first: fine for the data, not for a run
    held_out: int = 0  # of the training examples, for validation
    classes_left: str = ""  # how many training examples each class then has, for a person
    unread_prompts: tuple[tuple[str, str], ...] = ()  # fields of the prompts that reach no token, as above
    prompts: tuple[tuple[str, str], ...] = ()  # what is to be completed, where nothing else is learned from
    completions: int = 0  # of each prompt
    completion_tokens: int = 0  # of the longest


def check_evaluation(examples: StoredExamples | StoredPairs, data: RunData) -> None:
    """Refuse examples that no micro-batch of an evaluation can hold."""
    limit = data.steps.micro_tokens
    check_lengths(examples, replace(data.steps, batch_size=None, batch_tokens=limit, order="sequential"))


def split_facts(
    name: str, data: RunData, found: Scan, config: RunConfig, model: ModelFacts | None, samples: int
) -> SplitFacts:
    """Return the facts of one prepared split, with a few samples."""
    examples, source = data.examples[name].sides, data.sources[name]
    store, limit = examples.store, config.data.max_length
    judged, sides = data.needs.labels is not None, 2 if data.needs.pairs else 1
    sizes = np.diff(store.bounds) - judged
    in_order = np.sort(sizes)
    low, middle, high, top = (int(in_order[round(q * (len(sizes) - 1))]) for q in (0, 0.5, 0.95, 1))
    longest = int(examples.lengths.argmax())
    longer = sizes.reshape(-1, sides).max(1)  # of a pair, the longer side
    refused = np.flatnonzero(longer > limit) if config.data.too_long == "error" else np.array([], dtype=int)
    text = TokenText(data.tokenizer)
    return SplitFacts(
        name=name,
        source=source.name,
        is_judged=judged,
        pairs=data.needs.pairs,
        classes=describe_split_classes(data, name),
        shapes=Counter(str(record.shape) for record in islice(source, SHAPES_COUNTED)),
        records=len(store) // sides,
        examples=len(examples),
        tokens=int((examples.stops - examples.starts - judged).sum()),
        supervised=examples.supervised,
        lengths=(low, middle, high, top),
        bins=histogram(sizes),
        cut={what: 0 if len(refused) else count for what, count in examples.counts.items()},
        skipped=store.notes["skipped"],
        reasons=tuple(store.notes["reasons"]),
        hint=store.notes.get("hint"),
        only_last=store.notes["only_last"],
        duplicates=duplicates(store, found.hashes),
        doubled_bos=found.doubled_bos,
        first_doubled=found.first_doubled,
        ended=found.ended,
        longest=(int(examples.lengths[longest]) + 1, examples[longest].origin),
        outside=_outside(examples, data.tokenizer, model),
        refused=len(refused),
        too_long=tuple(
            f"{store.origin(sides * record)}: {longer[record]:,} tokens"
            for record in refused[:REASONS_KEPT].tolist()
        ),
        unread=tuple(data.unread(store.notes["unread"])),
        samples=tuple(
            _sample(examples, index, text, kind=_kind(data, examples, index))
            for index in range(min(samples * sides, len(examples)))
        ),
    )


def describe_split_classes(data: RunData, name: str) -> str:
    """The classes of a split with their numbers of examples; nothing for other objectives."""
    if (labels := data.needs.labels) is None:
        return ""
    return describe_classes(labels.names, class_counts(labels, data.examples[name].sides))


def _kind(data: RunData, examples: StoredExamples, index: int) -> str:
    """Which side of a pair an example is, or its classes."""
    if data.needs.pairs:
        return "rejected" if index % 2 else "chosen"
    if data.needs.labels is None:
        return ""
    names, values = data.needs.labels.names, examples.store.values_of(int(examples.records[index]))
    if not data.needs.labels.multi_label:
        return f"label {names[int(values[0])]}"
    marked = [
        f"{name} {value:g}" if value < 1 else name
        for name, value in zip(names, values, strict=False)
        if value
    ]
    return f"labels {', '.join(marked) or 'none'}"


def _outside(
    examples: StoredExamples, tokenizer: Any, model: ModelFacts | None
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
    marks = [False, *np.asarray(example.supervised[1:], dtype=bool).tolist()]
    if examples.judged:  # all of it is read, and the token behind it never is
        tokens, marks = tokens[:-1], [True] * (len(tokens) - 1)
    long = len(tokens) > SHOWN_WHOLE
    head = SHOWN_HEAD if long else len(tokens)
    tail = len(tokens) - SHOWN_TAIL if long else len(tokens)
    whole = (start, stop) == (begin, end)
    behind = examples.judged
    return Sample(
        origin=example.origin,
        kind=kind,
        place=""
        if whole
        else f"tokens {start - begin + 1:,} to {stop - begin - behind:,} of {end - begin - behind:,}",
        tokens=len(tokens),
        supervised=0 if examples.judged else example.supervised_count,
        head=text.pieces(tokens[:head], marks[:head]),
        left_out=tail - head,
        tail=text.pieces(tokens[tail:], marks[tail:]),
    )


def histogram(sizes: np.ndarray) -> tuple[Bin, ...]:
    """Bars of even width, or each twice as wide as the one before where a few are far longer than most."""
    low, top = int(sizes.min()), int(sizes.max())
    if top > 16 * float(np.median(sizes)):
        edges = 2 ** np.arange(int(np.log2(low)), int(np.log2(top)) + 2)
    else:
        magnitude = 10 ** np.floor(np.log10(max(1, (top - low) / _BINS)))
        step = int(magnitude * next(f for f in (1, 2, 5, 10) if f * magnitude >= (top - low) / _BINS))
        edges = np.arange(low // step * step, top + step + 1, step)
    counts, _ = np.histogram(sizes, edges)
    return tuple(
        Bin(int(first), int(after) - 1, int(count))
        for first, after, count in zip(edges, edges[1:], counts, strict=False)
        if first <= top
    )


def find_overlaps(data: RunData, scans: dict[str, Scan]) -> list[Overlap]:
    """Return the texts that valid or test share with what is trained on."""
    found = []
    for held in ("valid", "test"):
        for learned in LEARNED:
            if held in scans and learned in scans:
                twins = overlap(
                    data.examples[held].store,
                    scans[held].hashes,
                    data.examples[learned].store,
                    scans[learned].hashes,
                )
                found.append(Overlap(held, learned, twins))
    return found


def tokenizer_facts(tokenizer: Any, ends: tuple[str, ...]) -> TokenizerFacts:  # Any: a transformers tokenizer
    """Return the special tokens of a tokenizer, and what it does with chats."""
    named = {name: getattr(tokenizer, f"{name.lower()}_token") for name in ("BOS", "EOS", "PAD")}
    template = tokenizer.chat_template or None
    text = template if template is None or isinstance(template, str) else repr(template)
    return TokenizerFacts(
        size=len(tokenizer),
        special={name: str(token) for name, token in named.items() if token is not None},
        ends=ends,
        template=text,
        template_digest=None if text is None else hashlib.sha256(text.encode()).hexdigest()[:12],
    )
