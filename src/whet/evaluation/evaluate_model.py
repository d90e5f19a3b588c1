"""Evaluate the loss and the exact match of a model on data, for `whet eval`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from whet.data.batches import evaluation_batches
from whet.data.packing import DEFAULT_MICRO_BATCH_TOKENS, StepSettings
from whet.data.sources.source import Record, Source
from whet.data.tokens.chat_template import NothingToSuperviseError
from whet.data.tokens.examples import TooLong, build_examples
from whet.data.tokens.field_audit import unread_fields
from whet.data.tokens.loss_mask import Supervise
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.tokenize import Question, token_bytes
from whet.errors import DataError
from whet.evaluation.exact_match import ExactMatch, exact_match, greedy_answers
from whet.generation.engine import generate_tokens
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens
from whet.objectives.sft import SFT
from whet.storage import tokens_dir
from whet.training.loss import evaluate_loss

log = logging.getLogger("whet")


def _unsupported_record(record: Record) -> DataError:
    """Return the error for a record without a next-token loss."""
    hint = "use records with messages, with prompt and completion, or with text"
    if record.record_format == "preference":
        hint += "; a run evaluates preference pairs as data.valid or data.test"
    return DataError(
        f"{record.origin}: whet eval computes a next-token loss, and a {record.record_format} record has "
        "none",
        hint=hint,
    )


class ModelEvaluation:
    """Evaluates a model on the records of a source: loss, exact match, and sample answers.

    Args:
        model: the model to evaluate.
        tokenizer: the model's tokenizer.
        source: the records.
        max_length: the largest number of tokens per example.
        supervise: which messages of a chat count in the loss.
        too_long: how examples longer than `max_length` are treated.
        supervise_thinking: whether the thinking of answers counts in the loss.
        template_args: arguments of the chat template.

    Raises:
        DataError: a record has no next-token loss.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer
        source: Source,
        *,
        max_length: int,
        supervise: Supervise = "assistant",
        too_long: TooLong = "truncate",
        supervise_thinking: bool = True,
        template_args: Mapping[str, Any] | None = None,  # Any: JSON values
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        preparation = Preparation(
            tokenizer,
            cache=tokens_dir(),
            supervise=supervise,
            allow_empty=True,
            template_args=template_args,
            supervise_thinking=supervise_thinking,
        )
        try:
            store = preparation.store(source)
            examples = build_examples(store, max_length=max_length, too_long=too_long)
        except NothingToSuperviseError as error:
            raise _unsupported_record(error.record) from error
        self.summary = examples.summary()
        for message, _ in unread_fields(store.notes["unread"], used={"group", "weight"}):
            log.warning("%s: %s", source.name, message)
        tokens = max(max_length, DEFAULT_MICRO_BATCH_TOKENS if model.device.type == "cuda" else 512)
        self.examples = examples
        self.settings = StepSettings(None, tokens, tokens, pack=True, order="sequential")
        self.token_bytes = token_bytes(tokenizer, vocab_size=model.vocab_size)  # per token id
        self.batches = evaluation_batches(examples, self.settings, token_bytes=self.token_bytes)
        self.questions = preparation.questions(source)

    def loss(self) -> dict[str, float]:
        """Return eval_loss, eval_perplexity and eval_s."""
        dtype = self.model.head().weight.dtype
        precision = Precision(dtype, dtype, dtype, "as loaded")
        return evaluate_loss(self.model, SFT(), self.batches, precision=precision)

    def exact_match(self, *, max_tokens: int, progress: Callable[[int], None] = lambda _: None) -> ExactMatch:
        """Return which questions were answered exactly as expected.

        Args:
            max_tokens: the largest number of tokens per answer.
            progress: called with the number of answered questions.
        """
        return exact_match(
            self.model, self.tokenizer, self.questions, max_tokens=max_tokens, progress=progress
        )

    def all_answers(self, *, max_tokens: int, progress: Callable[[int], None] = lambda _: None) -> list[str]:
        """Return the complete greedy answer to each question.

        Args:
            max_tokens: the largest number of tokens per answer.
            progress: called with the number of answered questions.
        """
        return greedy_answers(
            self.model, self.tokenizer, self.questions, max_tokens=max_tokens, progress=progress
        )

    def answers(self, count: int, *, max_tokens: int) -> Iterator[tuple[Question, str]]:
        """Yield the first `count` questions with the model's greedy answers."""
        stops = stop_tokens(self.model, self.tokenizer)
        for question in self.questions[:count]:
            [tokens] = generate_tokens(
                self.model, [question.tokens], max_tokens=max_tokens, stop_tokens=stops
            )
            yield question, self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
