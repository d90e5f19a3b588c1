"""Batched decoding with a key/value cache, for prompts of any lengths."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from whet.adapters.adapter import constant_weights
from whet.errors import DataError
from whet.generation.cuda_graph import StaticDecodeBatch, graph_unsupported_reason
from whet.generation.decode_batch import DecodeBatch
from whet.generation.sampling import Sampling, TokenSampler, row_seeds
from whet.models.language_model import LanguageModel, eager_layers, eval_mode
from whet.ops.kernels import fused_decode

# called with the index of a row and its tokens so far, without stop tokens; returning False ends the row
StopWatcher = Callable[[int, list[int]], bool]


@dataclass(frozen=True)
class Completion:
    """The generated continuation of a prompt."""

    tokens: list[int]  # including the stop token, if one ended it
    logprobs: list[float]  # one per token: at temperature 1, without filters and penalties
    finished: bool  # ended by a stop token or by the watcher (a stop string), not by the length limit


def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_tokens: Collection[int],
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    watch: StopWatcher | None = None,
) -> list[Completion]:
    """Generate a completion for each prompt, as one batch.

    The tokens of a row depend on its prompt and its seed only, not on the other rows, the batch size or the
    device, unless its two best candidates differ by no more than rounding.

    Args:
        model: the model to decode with.
        prompts: the token ids of each prompt.
        max_tokens: the largest number of new tokens per prompt.
        stop_tokens: tokens that end a row; the stop token is the last token of its completion.
        sampling: how tokens are sampled. None: greedy decoding.
        seeds: one seed per prompt. None: the seeds are random.
        watch: called with the index of a row and its tokens so far, after each new token except stop tokens;
            returning False ends the row. On a GPU it is called a few tokens late.

    Returns:
        One completion per prompt, in order. Log-probabilities are computed in float32, at temperature 1 and
        without filters and penalties.

    Raises:
        DataError: a prompt is empty, does not fit the model's context or has tokens outside its vocabulary,
            or the number of seeds is not the number of prompts.
    """
    check_prompts(model, prompts)
    if seeds is None:
        seeds = row_seeds(len(prompts), seed=None)
    elif len(seeds) != len(prompts):
        raise DataError(f"{len(seeds)} seeds for {len(prompts)} prompts", hint="pass one seed per prompt")
    limits = [min(max_tokens, model.max_positions - len(prompt)) for prompt in prompts]
    rows = [_Row(index, limit) for index, limit in enumerate(limits)]
    if prompts and max_tokens > 0:
        with decoding_mode(model):
            _decode(model, prompts, rows, stop_tokens, sampling or Sampling(), seeds, watch)
    return [Completion(row.tokens, row.logprobs, row.finished) for row in rows]


@contextlib.contextmanager
def decoding_mode(model: LanguageModel) -> Iterator[None]:
    """Prepare a model for token-by-token decoding within the `with` block: eval mode, no compilation."""
    with eval_mode(model), eager_layers(model), constant_weights(model), fused_decode.fused_decoding():
        yield


def generate_tokens(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_tokens: Collection[int],
    sampling: Sampling | None = None,
    seed: int | None = None,
    watch: StopWatcher | None = None,
) -> list[list[int]]:
    """Return the generated tokens of each prompt, without stop tokens.

    Args:
        model: the model to decode with.
        prompts: the token ids of each prompt.
        max_tokens: the largest number of new tokens per prompt.
        stop_tokens: tokens that end a row.
        sampling: how tokens are sampled. None: greedy decoding.
        seed: determines the seeds of all rows. None: the seeds are random.
        watch: called with the index of a row and its tokens so far; returning False ends the row.
    """
    completions = complete(
        model,
        prompts,
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        sampling=sampling,
        seeds=row_seeds(len(prompts), seed=seed),
        watch=watch,
    )
    return [strip_stop_token(completion, stop_tokens) for completion in completions]


def strip_stop_token(completion: Completion, stop_tokens: Collection[int]) -> list[int]:
    """Return the tokens of a completion without a stop token at the end."""
    tokens = completion.tokens
    return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens


@dataclass
class _Row:
    """A row of the batch during decoding."""

    index: int
    limit: int  # of new tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False

    def append(
        self, token: int, logprob: float, stop_tokens: Collection[int], watch: StopWatcher | None
    ) -> None:
        if self.is_done:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.finished = token in stop_tokens or (watch is not None and not watch(self.index, self.tokens))

    @property
    def is_done(self) -> bool:
        return self.finished or len(self.tokens) >= self.limit


def _decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    rows: list[_Row],
    stop_tokens: Collection[int],
    sampling: Sampling,
    seeds: Sequence[int],
    watch: StopWatcher | None,
) -> None:
    """Decode until all rows are done."""
    sampler = TokenSampler(
        sampling,
        prompts,
        seeds,
        max_tokens=max(row.limit for row in rows),
        vocab_size=model.head().weight.shape[0],
        device=model.device,
    )
    decoding = start_decoding(model, prompts, sampler, max_tokens=max(row.limit for row in rows))
    while rows:
        for tokens, logprobs in decoding.decode():
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                row.append(token, logprob, stop_tokens, watch)
        live = [i for i, row in enumerate(rows) if not row.is_done]
        if len(live) < len(rows):
            decoding.keep(live)
            rows = [rows[i] for i in live]


class Decoding(Protocol):
    """A batch in decoding, static or growing."""

    def decode(self) -> list[tuple[list[int], list[float]]]:
        """Return the next tokens and log-probabilities of all rows, one pair of lists per step."""

    def keep(self, indices: list[int]) -> None:
        """Continue with the given rows only."""


def start_decoding(
    model: LanguageModel, prompts: Sequence[Sequence[int]], sampler: TokenSampler, *, max_tokens: int
) -> Decoding:
    """Prefill the prompts, and return a batch that decodes with CUDA graphs if the model supports them."""
    rows = DecodeBatch(model, prompts, new_tokens=max_tokens)
    if graph_unsupported_reason(model, rows.cache) is None:
        return StaticDecodeBatch(rows, sampler, max_tokens=max_tokens)
    return GrowingDecodeBatch(rows, sampler)


class GrowingDecodeBatch:
    """A batch decoded token by token with a growing cache; finished rows are dropped at once."""

    def __init__(self, rows: DecodeBatch, sampler: TokenSampler) -> None:
        self.rows, self.sampler = rows, sampler
        self._tokens: torch.Tensor | None = None  # the last token of each row

    def decode(self) -> list[tuple[list[int], list[float]]]:
        """Return the next token of each row and its log-probability."""
        if self._tokens is not None:
            self.rows.advance(self._tokens)
        self._tokens, logprobs = self.sampler(self.rows.logits())
        return [(self._tokens.tolist(), logprobs.tolist())]

    def keep(self, indices: list[int]) -> None:
        """Continue with the given rows only."""
        if not indices or self._tokens is None:
            return
        rows = torch.tensor(indices, device=self._tokens.device)
        self.rows.keep(rows)
        self.sampler.keep(rows)
        self._tokens = self._tokens[rows]


def check_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    """Raise DataError for prompts that are empty, too long, or have tokens outside the vocabulary."""
    for prompt in prompts:
        if not prompt:
            raise DataError("an empty prompt cannot be completed: it must have at least one token")
        if len(prompt) >= model.max_positions:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room for new tokens in the model's context of "
                f"{model.max_positions} tokens"
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < model.vocab_size:
                raise DataError(f"token {token} is outside the model's vocabulary of {model.vocab_size}")
