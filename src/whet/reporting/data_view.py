"""What the model will see of a run's data: every fact that is shown, found once, with no model built."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from whet.adapters.load import tokenizer_of
from whet.config.grpo import GRPOObjective
from whet.config.objectives import DistillObjective
from whet.config.preset import Preset
from whet.config.sections import RunConfig
from whet.data.batches import check_lengths
from whet.data.examples import StoredExamples, StoredPairs
from whet.data.sources import REASONS_KEPT, open_source
from whet.data.splits import LEARNED
from whet.data.strata import class_counts, describe_classes
from whet.errors import ConfigError, DataError, ModelError, WhetError
from whet.models.scratch import new_tokenizer
from whet.reporting.data_scan import Scan, Twins, duplicates, overlap, pair_hashes, scan
from whet.reporting.shown_tokens import Piece, TokenText
from whet.reporting.step_plan import StepFacts, plan_steps
from whet.training.mix_data import MixData
from whet.training.model_facts import ModelFacts, model_facts
from whet.training.reinforcement import check_config
from whet.training.run_data import SPLITS, RunData
from whet.training.sampler import fitting
from whet.training.tasks import needs_of
from whet.training.teachers import find_teachings

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


def view_parts(config: RunConfig, *, samples: int = 2) -> dict[str, DataView]:
    """The view of each part of a mix, by name; of anything else, its one view, without a name."""
    parts = config.parts()
    if not parts:
        return {"": view_data(config, samples=samples)}
    tokenizer = None
    if isinstance(config.model, Preset):  # made from the records of all parts, if it is made
        with contextlib.suppress(ConfigError, DataError):  # each part says what is wrong with it
            tokenizer = new_tokenizer(config.model, MixData(config).texts())
    return {name: view_data(part, samples=samples, tokenizer=tokenizer) for name, part in parts.items()}


def view_data(
    config: RunConfig,
    *,
    samples: int = 2,
    tokenizer: Any = None,  # Any: a transformers tokenizer; None: the config's
) -> DataView:
    """Go through every source of a config. A bad record, file or split does not hide the others."""
    _ = config.language_model  # others read no texts, and there is nothing to show
    lenient, errors = _openable(config)
    if lenient is None:
        return DataView(config, None, None, (), (), None, tuple(errors))
    try:
        data = RunData(lenient, needs_of(lenient.objective))
        tokenizer = tokenizer or _tokenizer(lenient, data)
    except (ConfigError, DataError) as error:
        return DataView(config, None, None, (), (), None, (*errors, error))
    try:
        model = model_facts(lenient.language_model, tokens=len(tokenizer))
    except ConfigError as error:
        model = None
        errors.append(error)
    if data.needs.prompts:
        return _view_prompts(config, data, tokenizer=tokenizer, model=model, errors=errors)
    return _view_examples(config, data, tokenizer=tokenizer, model=model, errors=errors, samples=samples)


def _view_examples(
    config: RunConfig,
    data: RunData,
    *,
    tokenizer: Any,  # Any: a transformers tokenizer
    model: ModelFacts | None,
    errors: list[WhetError],
    samples: int,
) -> DataView:
    ends = _ends(tokenizer, model)
    scans: dict[str, Scan] = {}
    splits: list[SplitFacts] = []
    data.use(tokenizer)
    for name in data.sources:
        try:
            examples = data.prepare_source(name)
            if name in ("valid", "test"):
                check_evaluation(examples, data)
        except DataError as error:
            errors.append(DataError(f"data.{name}: {error.message}", hint=error.hint))
        if name in data.examples:
            scanned = scan(data.examples[name].sides, bos=tokenizer.bos_token_id, ends=ends)
            pairs = data.needs.pairs
            scans[name] = replace(scanned, hashes=pair_hashes(scanned.hashes)) if pairs else scanned
            splits.append(split_facts(name, data, scans[name], config, model, samples))
    steps, held_out = None, 0
    if "train" in data.examples and ("hard" in data.examples or "hard" not in data.sources):
        try:
            if config.data.valid is None:
                before = len(data.examples["train"])
                data.hold_out()
                held_out = before - len(data.examples["train"])
            steps = plan_steps(data.config, data)
        except (ConfigError, DataError) as error:
            errors.append(error)
    text = TokenText(tokenizer)
    return DataView(
        config=config,
        model=model,
        missing=() if errors else tuple(_missing_teachings(config, data, model)),
        tokenizer=tokenizer_facts(tokenizer, tuple(text.name(token) for token in sorted(ends))),
        splits=tuple(splits),
        overlaps=tuple(find_overlaps(data, scans)),
        steps=steps,
        errors=tuple(errors),
        held_out=held_out,
        classes_left=describe_split_classes(data, "train") if held_out else "",
    )


def _missing_teachings(config: RunConfig, data: RunData, model: ModelFacts | None) -> Iterator[WhetError]:
    section, vocab_size = config.objective, model.vocab_size if model is not None else None
    if isinstance(section, DistillObjective) and section.offline is not None and vocab_size is not None:
        try:
            student = str(config.language_model)
            find_teachings(data.examples, section, student=student, vocab_size=vocab_size)
        except WhetError as error:
            yield error


def _view_prompts(
    config: RunConfig,
    data: RunData,
    *,
    tokenizer: Any,  # Any: a transformers tokenizer
    model: ModelFacts | None,
    errors: list[WhetError],
) -> DataView:
    """The prompts of a run that learns from what its model says: there are no examples to show yet."""
    assert isinstance(config.objective, GRPOObjective)
    data.use(tokenizer)
    found, unread = [], list[tuple[str, str]]()
    context = model.max_positions if model is not None and model.max_positions else config.data.max_length
    try:
        check_config(config)
        for name, source in data.sources.items():
            data.prepare_prompts(name)
            left = fitting(
                data.prompts[name],
                context=context,
                max_length=config.data.max_length,
                max_new_tokens=config.objective.max_new_tokens,
                drop=config.data.too_long == "drop",
            )
            dropped = len(data.prompts[name]) - len(left)
            more = f", {dropped:,} too long and dropped" if dropped else ""
            unread += (
                (f"{name}: {message}", hint) for message, hint in data.unread(data.prompts[name].unread)
            )
            found.append((name, f"{source.name}: {data.prompts[name].summary()}{more}"))
            if data.prompts[name].skipped.count and config.data.on_bad_record == "error":
                raise DataError(f"data.{name}: {data.prompts[name].skipped.summary()}")
    except (ConfigError, DataError) as error:
        errors.append(error)
    text = TokenText(tokenizer)
    ends = tuple(text.name(token) for token in sorted(_ends(tokenizer, model)))
    facts = tokenizer_facts(tokenizer, ends)
    return DataView(
        config,
        model,
        facts,
        (),
        (),
        None,
        tuple(errors),
        unread_prompts=tuple(unread),
        prompts=tuple(found),
    )


def _openable(config: RunConfig) -> tuple[RunConfig | None, list[WhetError]]:
    """The config with nothing in it that would stop at the first mistake; None when nothing can be read."""
    data, errors = config.data, list[WhetError]()
    changes: dict[str, Any] = {"on_bad_record": "skip"}  # Any: values of several keys
    if data.too_long == "error":
        changes["too_long"] = "truncate"
    for split in SPLITS:
        if (spec := getattr(data, split)) is not None:
            try:
                open_source(spec, split=split, form=data.format)
            except DataError as error:
                errors.append(DataError(f"data.{split}: {error.message}", hint=error.hint))
                changes[split] = None
    if "train" in changes:
        return None, errors
    return config.model_copy(update={"data": data.model_copy(update=changes)}), errors


def _tokenizer(config: RunConfig, data: RunData) -> Any:  # Any: a transformers tokenizer
    if isinstance(model := config.language_model, Preset):
        return new_tokenizer(model, data.texts())
    if (found := tokenizer_of(model)) is None:
        raise ModelError(f"{model} has no tokenizer, so it cannot read records")
    return found


def _ends(tokenizer: Any, model: ModelFacts | None) -> set[int]:  # Any: as above
    """The tokens at which generation stops, as far as the tokenizer has them."""
    found = {tokenizer.eos_token_id, *(model.stop_tokens if model is not None else ())}
    return {token for token in found if token is not None and 0 <= token < len(tokenizer)}


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
) -> str | None:  # Any: as above
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


def tokenizer_facts(tokenizer: Any, ends: tuple[str, ...]) -> TokenizerFacts:  # Any: as above
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
