"""The data of a run: open, tokenize and limit its sources, and build its streams of batches."""

import copy
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config.data import Format
from whet.config.run_config import RunConfig
from whet.data.batches import Batch, BatchStream, StepStream, evaluation_batches
from whet.data.packing import StepSettings
from whet.data.sources.source import (
    GivenRows,
    Skipped,
    Source,
    SourceSpec,
    directory_has_split,
    is_source,
    open_source,
)
from whet.data.sources.splits import TRAINING_SPLITS, Split, training_entries
from whet.data.tokens.chat_template import record_text
from whet.data.tokens.eos_check import NO_EOS_HINT, count_without_eos, no_eos_message
from whet.data.tokens.examples import (
    StoredExamples,
    StoredPairs,
    build_examples,
    build_pairs,
    shortening_warning,
)
from whet.data.tokens.field_audit import Unread, unread_fields
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.tokenize import Question, token_bytes
from whet.errors import ConfigError, DataError
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens
from whet.storage import tokens_dir

if TYPE_CHECKING:
    from whet.data.class_labels import ClassLabels
    from whet.data.streamed_batches import StreamedBatches
    from whet.data.tokens.prompts import Prompts

log = logging.getLogger("whet")

SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Needs:
    """The parts of a record that an objective reads, and how its training examples are selected."""

    pairs: bool = False
    prompts: bool = False  # only the prompts; the record is passed to the rewards
    columns: tuple[str, ...] = ()
    labels: "ClassLabels | None" = None
    scored_from: tuple[str, ...] = ()  # fields from which the columns were computed before the run
    valid_share: float = 0.0  # share of each class to hold out for validation without data.valid
    oversample: bool = False  # repeat examples of rare classes
    weights: bool = True  # the loss uses the weights of tokens; records with weights are refused otherwise

    @property
    def unit(self) -> str:
        """The unit in which the size of a step is counted."""
        return "pairs" if self.pairs else "prompts" if self.prompts else "examples"


@dataclass(frozen=True)
class EvaluationSplit:
    """The batches and prompts of the valid or test split."""

    batches: list[Batch]
    questions: list[Question]


class RunData:
    """The data section of a config. Sources are read only when needed."""

    def __init__(
        self,
        config: RunConfig,
        needs: Needs,
        *,
        today: date | None = None,
        given: GivenRows = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.python_sources = given  # records passed from Python, for placeholders in the config
        self.today = today  # for chat templates that print the date
        data, run = config.data, config.run
        self.needs = needs
        self.record_format: Format = "classification" if self.needs.labels is not None else data.format
        self.steps = StepSettings(
            batch_size=run.batch_size,
            batch_tokens=run.batch_tokens,
            micro_batch_tokens=run.micro_batch_tokens,
            pack=data.pack,
            order=data.order,
        )
        self.sources: dict[str, Source] = {
            split: self._open(spec, split) for split in SPLITS if is_source(spec := getattr(data, split))
        }
        if data.stream is not None:
            from whet.data.stream_setup import check_stream, open_stream_source

            check_stream(config, needs, self.steps)
            self.sources["train"] = open_stream_source(self.sources["train"], data)
        self.streamed: StreamedBatches | None = None  # the training steps, if they are streamed
        curriculum = data.curriculum
        if curriculum is not None and curriculum.hard is not None:
            self.sources["hard"] = self._open(curriculum.hard, "train")
        if (size := self._held_out_size()) is not None:
            from whet.data.sources.hold_out import HoldOut, split_sources

            settings = HoldOut(size, run.seed, data.group, by_class=needs.labels is not None)
            self.sources = split_sources(self.sources, settings)
        self.warns_without_validation = True  # False for parts of a mix, if another part warns or validates
        self.held_out: Mapping[str, object] | None = None  # which training records are held out
        self.examples: dict[str, StoredExamples | StoredPairs] = {}
        self.prompts: dict[str, Prompts] = {}  # instead of examples, if the objective needs prompts

    def _held_out_size(self) -> float | None:
        """Return the share or number of records to hold out before tokenization, or None."""
        data = self.config.data
        if data.valid is None and data.group is not None:
            return self.needs.valid_share or None  # of a classifier
        return data.held_out

    def _open(self, spec: SourceSpec, split: Split) -> Source:
        data = self.config.data
        return open_source(
            spec,
            split=split,
            form=self.record_format,
            on_bad=data.on_bad_record,
            ignore=data.ignore,
            columns=data.columns,
            given=self.python_sources,
            seed=self.config.run.seed,
        )

    def training_texts(self) -> Iterator[str]:
        """Yield the text of all training records, to train a tokenizer."""
        for record in itertools.chain(*training_entries(self.sources)):
            try:
                yield record_text(record)
            except DataError:  # counted during tokenization
                if self.config.data.on_bad_record == "error":
                    raise

    def digests(self) -> dict[str, str]:
        """Return a hash of the content of each source."""
        return {name: source.digest() for name, source in self.sources.items()}

    def token_digests(self) -> dict[str, str]:
        """Return a hash of the tokens of each source."""
        return {name: examples.store.digest for name, examples in self.examples.items()}

    def prepare(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        """Tokenize every source, or reuse its stored tokens, and log a summary and warnings."""
        self.set_tokenizer(tokenizer)
        for name, source in self.sources.items():
            if self.needs.prompts:
                self.prepare_prompts(name)
                self._warn_about_unread(name, self.prompts[name].unread_fields)
                continue
            examples = self.prepare_source(name)
            is_streamed = name == "train" and self.streamed is not None
            note = "the first block has " if is_streamed else ""
            log.info("%s: %s: %s%s", name, source.name, note, examples.summary())
            if (line := describe_split_conversations(examples.store.notes)) is not None:
                log.info("%s: %s", name, line)
            for line in preparation_warnings(examples.store.notes):
                log.warning("%s: %s", name, line)
            units = len(examples.store) // (2 if self.needs.pairs else 1)
            can_split = not self.needs.pairs and self.needs.labels is None
            warning = shortening_warning(examples.sides.length_counts, units, can_split=can_split)
            if warning is not None:
                log.warning("%s: %s: %s", name, *warning)
            self._warn_about_unread(name, examples.store.notes["unread"])
        self.hold_out_validation()
        self._log_validation()

    def _log_validation(self) -> None:
        """Log how many records are held out, or how to get validation data if there is none."""
        data = self.config.data
        by_split = self.prompts if self.needs.prompts else self.examples
        if "valid" not in by_split:
            if self.warns_without_validation:
                warn_without_validation(data.train, can_hold_out=data.stream is None)
        elif self._held_out_size() is not None:
            held_out, remaining = len(by_split["valid"]), len(by_split["train"])
            log.info(
                "valid: held out %d of %d %s of data.train, grouped by %s (seed %d)",
                held_out,
                held_out + remaining,
                self.needs.unit,
                data.group or "prompt",
                self.config.run.seed,
            )

    def unread_field_warnings(self, unread: Unread) -> Iterator[tuple[str, str]]:
        """Yield a message and a fix for each field that neither the tokens nor the objective use."""
        curriculum, needs = self.config.data.curriculum, self.needs
        used = {
            "group",
            *((self.config.data.group,) if self.config.data.group else ()),
            "weight",
            *needs.columns,
            *needs.scored_from,
            *(("label", "labels") if needs.labels is not None else ()),
        }
        if curriculum is not None and curriculum.score:
            used.add(curriculum.score)
        return unread_fields(unread, used=None if needs.prompts else used)

    def _warn_about_unread(self, name: str, unread: Unread) -> None:
        for message, hint in self.unread_field_warnings(unread):
            log.warning("%s: %s: %s", name, message, hint)

    def hold_out_validation(self) -> None:
        """Hold out validation examples of a classifier, if no validation records are given."""
        share, labels = self.needs.valid_share, self.needs.labels
        if "valid" in self.examples or labels is None or not share:
            return
        from whet.data.class_balance import exclude_texts, hold_out, record_hashes

        train = self.examples["train"]
        assert isinstance(train, StoredExamples)
        remaining, valid, self.held_out = hold_out(train, labels, share=share, seed=self.config.run.seed)
        self.examples |= {"train": remaining, "valid": valid}
        if isinstance(hard := self.examples.get("hard"), StoredExamples):
            self.examples["hard"] = exclude_texts(hard, set(record_hashes(valid)))

    def set_tokenizer(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer
        """Set the tokenizer."""
        data = self.config.data
        if data.template is not None:
            from whet.data.templates.builtin import load_template

            tokenizer.chat_template = load_template(data.template)  # saved with the final model
        self.tokenizer = tokenizer
        self.preparation = self._preparation(tokenizer)

    def _preparation(self, tokenizer: Any) -> Preparation:  # Any: as above
        data = self.config.data
        return Preparation(
            tokenizer,
            cache=tokens_dir(),
            supervise=data.supervise,
            skip_bad=data.on_bad_record == "skip",
            allow_empty=data.allow_empty_answers,
            pairs=self.needs.pairs,
            form=self.record_format,
            labels=self.needs.labels,
            today=self.today,
            weights=self.needs.weights,
            template_args=data.template_args,
            supervise_thinking=data.supervise_thinking,
            turns=data.turns,
        )

    def _columns(self, name: str) -> tuple[str, ...]:
        """Return the numeric fields that the objective reads, then the score field of a curriculum."""
        curriculum = self.config.data.curriculum
        if curriculum is None or curriculum.kind == "length" or not curriculum.score or name != "train":
            return self.needs.columns
        return (*self.needs.columns, curriculum.score)

    def prepare_source(self, name: str) -> StoredExamples | StoredPairs:
        """Tokenize one source, or reuse its stored tokens; of a stream, read the first block."""
        data = self.config.data
        if name == "train" and data.stream is not None:
            self.examples[name] = self._start_stream().first_block()
            return self.examples[name]
        store = self.preparation.with_columns(self._columns(name)).store(self.sources[name])
        if self.needs.pairs:
            self.examples[name] = build_pairs(
                store, max_length=data.max_length, too_long=data.too_long, pack=data.pack
            )
        else:
            judged = self.needs.labels is not None
            self.examples[name] = build_examples(
                store, max_length=data.max_length, too_long=data.too_long, is_classification=judged
            )
        return self.examples[name]

    def _start_stream(self) -> "StreamedBatches":
        from whet.data.stream_setup import start_stream

        if self.streamed is None:
            # a copy, because another thread uses it while the run trains and generates
            preparation = self._preparation(copy.deepcopy(self.tokenizer)).with_columns(self.needs.columns)
            self.streamed = start_stream(self.config, self.sources["train"], preparation, self.steps)
        return self.streamed

    def prepare_prompts(self, name: str) -> None:
        """Read the prompts of one source, and log a summary."""
        from whet.data.tokens.prompts import read_prompts

        source = self.sources[name]
        self.prompts[name] = read_prompts(
            source,
            self.tokenizer,
            skip_bad=self.config.data.on_bad_record == "skip",
            today=self.today,
            template_args=self.config.data.template_args,
        )
        log.info("%s: %s: %s", name, source.name, self.prompts[name].summary())
        if self.prompts[name].skipped.count:
            log.warning("%s: %s", name, self.prompts[name].skipped.summary())

    def check_model_limits(self, model: LanguageModel) -> None:
        """Reject tokens or lengths that the model does not support; warn if EOS is never supervised."""
        for examples in self.examples.values():
            store = examples.store
            if store.largest >= model.vocab_size:
                name = self.tokenizer.convert_ids_to_tokens(store.largest)
                raise DataError(
                    f"{store.origin(store.record_with(store.largest))}: token {store.largest} ({name!r}) is "
                    f"outside the model's vocabulary: vocab_size={model.vocab_size}, but the tokenizer has "
                    f"{len(self.tokenizer)} tokens",
                    hint="the tokenizer belongs to another model",
                )
            sides = examples.sides
            longest = int(sides.lengths.argmax())
            if sides.lengths[longest] > model.max_positions:
                raise DataError(
                    f"{sides[longest].origin}: {sides.lengths[longest] + 1} tokens exceed the "
                    f"{model.max_positions} positions of {model.name}",
                    hint=f"set data.max_length to {model.max_positions}",
                )
        if self.streamed is not None:
            from whet.data.stream_setup import check_stream_limits

            check_stream_limits(self.streamed, model)
        if self.needs.labels is None:
            self._warn_about_missing_eos(model)

    def _warn_about_missing_eos(self, model: LanguageModel) -> None:
        """Warn if no inspected example supervises EOS. `whet data --check` inspects all examples."""
        vocabulary = range(len(self.tokenizer))
        ends = sorted(token for token in stop_tokens(model, self.tokenizer) if token in vocabulary)
        for name in TRAINING_SPLITS if ends else ():
            if name in self.examples and (inspected := count_without_eos(self.examples[name].sides, ends)):
                message = no_eos_message(self.tokenizer.convert_ids_to_tokens(ends), inspected=inspected)
                log.warning("%s: %s: %s: %s", name, self.sources[name].name, message, NO_EOS_HINT)

    def stream(self) -> StepStream:
        """Return the training steps, in the order that the config asks for."""
        if self.streamed is not None:
            return self.streamed
        examples, seed = self.examples["train"], self.config.run.seed
        curriculum = self.config.data.curriculum
        if curriculum is None:
            return BatchStream(self._oversample(examples), self.steps, seed=seed)
        if self.config.run.steps is None:
            raise ConfigError(
                "data.curriculum needs a number of steps", hint="set run.steps instead of run.epochs"
            )
        from whet.data.curriculum import EasyToHardStream, ExampleSubset, StagedStream, stages_by_length

        if curriculum.kind == "length":
            per_stage = curriculum.steps or max(1, self.config.run.steps // (2 * curriculum.stages))
            stages = stages_by_length(
                examples, self.steps, shortest=curriculum.shortest, stages=curriculum.stages, steps=per_stage
            )
            log.info("curriculum: %d stages of %d steps, from short to long examples", len(stages), per_stage)
            return StagedStream(stages, self.steps, seed=seed)
        ramp = round(curriculum.ramp * self.config.run.steps)
        if "hard" in self.examples:
            easy: Any = examples  # Any: both are sequences of examples
            hard: Any = self.examples["hard"]
        else:
            scores = examples.store.values[examples.sides.records[:: 2 if self.needs.pairs else 1], -1]
            middle = float(np.median(scores))
            easy = ExampleSubset(examples, np.flatnonzero(scores <= middle))
            hard = ExampleSubset(examples, np.flatnonzero(scores > middle))
        log.info(
            "curriculum: %d easy and %d hard examples; all hard from step %d", len(easy), len(hard), ramp
        )
        return EasyToHardStream(easy, hard, self.steps, seed=seed, ramp=ramp)

    def describe_steps(self) -> str:
        """Return the size of a step as text."""
        size = self.steps.batch_tokens or self.steps.batch_size
        unit = "tokens" if self.steps.batch_tokens else self.needs.unit
        return f"{size:,} {unit}, in micro-batches of at most {self.steps.micro_tokens:,} tokens"

    def _oversample(self, examples: StoredExamples | StoredPairs) -> Any:  # Any: a sequence of either
        """Return the training examples, with rare classes repeated if the config asks for it."""
        if not self.needs.oversample:
            return examples
        assert isinstance(examples, StoredExamples)
        from whet.data.class_balance import label_values, oversample_indices
        from whet.data.curriculum import ExampleSubset

        classes = label_values(examples, 1)[:, 0].astype(np.int64)
        indices = oversample_indices(classes, seed=self.config.run.seed)
        log.info("oversampled: %d examples from %d", len(indices), len(examples))
        return ExampleSubset(examples, indices)

    def evaluation_split(self, name: str, model: LanguageModel) -> EvaluationSplit | None:
        """Return the batches of valid or test, and the prompts for evaluation by generation."""
        if name not in self.examples:
            return None
        questions = []
        if self.config.eval.generate or self.config.eval.metrics:
            all_questions = self.preparation.questions(self.sources[name])
            questions = [q for q in all_questions if len(q.tokens) < model.max_positions]
            if not all_questions:
                key = "eval.generate" if self.config.eval.generate else "eval.metrics"
                log.warning("%s: no record of data.%s has a reference answer", key, name)
            if len(questions) < len(all_questions):
                skipped = len(all_questions) - len(questions)
                log.warning("%s: skipping %d prompts that fill the model's context", name, skipped)
        batches = evaluation_batches(
            self.examples[name],
            self.steps,
            limit=self.config.eval.batches if name == "valid" else None,
            token_bytes=token_bytes(self.tokenizer, vocab_size=model.vocab_size),
        )
        return EvaluationSplit(batches, questions)


def warn_without_validation(train: SourceSpec, *, can_hold_out: bool = True) -> None:
    """Log that a run has no validation data, and how to get some."""
    has_split = directory_has_split(train, "valid")
    suggestion = f"{train}, which has a valid split" if has_split else "a source"
    if can_hold_out and not has_split:
        suggestion += ", or to a share such as 0.05"
    log.warning("no validation data: set data.valid to %s", suggestion)


def preparation_warnings(notes: dict[str, Any]) -> Iterator[str]:  # Any: JSON values
    """Yield warnings about the tokenization of a source."""
    if count := notes.get("skipped"):
        yield Skipped(count, notes["reasons"]).summary()
    if count := notes.get("only_last"):
        yield (
            f"the chat template rewrites earlier turns of {count} conversation{'s' * (count != 1)}, "
            "so only the last assistant turn of each is supervised"
        )
    if count := notes.get("lost_turns"):
        yield (
            f"{count} assistant turn{'s' * (count != 1)} cannot follow the prompt that the model is served: "
            "not supervised"
        )


def describe_split_conversations(notes: dict[str, Any]) -> str | None:  # Any: JSON values
    """Return how many conversations became several examples, or None if none did."""
    if not (count := notes.get("split")):
        return None
    conversations = f"{count:,} conversation{'s' * (count != 1)}"
    return (
        f"{conversations} as {notes['turn_examples']:,} examples, because the chat template rewrites earlier "
        "turns"
    )
