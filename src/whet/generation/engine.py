"""Batched decoding with a key/value cache over prompts of any lengths."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from whet.adapters.adapter import unchanging
from whet.errors import DataError
from whet.generation.cuda_graph import StaticDecodeBatch, graphs_problem
from whet.generation.decode_batch import DecodeBatch
from whet.generation.sampling import Picker, Sampling, row_seeds
from whet.models.language_model import LanguageModel, evaluating, uncompiled
from whet.ops.kernels import fused_decode

# called with a row and its tokens so far, a stop token left out; False ends the row
StopWatcher = Callable[[int, list[int]], bool]


@dataclass(frozen=True)
class Completion:
    """What followed a prompt."""

    tokens: list[int]  # with the stop token, where one ended it
    logprobs: list[float]  # of each of the tokens, under the model's plain distribution
    finished: bool  # ended by a stop token or by the watcher (a stop string), not by length


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
    """What follows each prompt, up to a stop token (which is the last of its tokens) or `max_tokens`.

    `seeds` has one for each row: a row's tokens depend on its prompt and its seed, not on its neighbours, on
    the batch size or on the device, wherever its two best candidates differ by more than rounding. The
    log-probabilities are those of the sampled tokens at temperature 1, without filters and penalties, in
    float32. `watch` is called with each token of each row, in order, but not with stop tokens; on a GPU some
    tokens late.
    """
    check_prompts(model, prompts)
    if seeds is None:
        seeds = row_seeds(len(prompts), seed=None)
    elif len(seeds) != len(prompts):
        raise DataError(f"{len(seeds)} seeds for {len(prompts)} prompts", hint="one seed a row")
    limits = [min(max_tokens, model.max_positions - len(prompt)) for prompt in prompts]
    rows = [_Row(index, limit) for index, limit in enumerate(limits)]
    if prompts and max_tokens > 0:
        with generating(model):
            _decode(model, prompts, rows, stop_tokens, sampling or Sampling(), seeds, watch)
    return [Completion(row.tokens, row.logprobs, row.finished) for row in rows]


@contextlib.contextmanager
def generating(model: LanguageModel) -> Iterator[None]:
    """The model as it is read token by token, for the time of a `with` block."""
    with evaluating(model), uncompiled(model), unchanging(model), fused_decode.decoding():
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
    """The tokens that follow each prompt, up to a stop token (left out) or `max_tokens`."""
    completions = complete(
        model,
        prompts,
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        sampling=sampling,
        seeds=row_seeds(len(prompts), seed=seed),
        watch=watch,
    )
    return [without_stop(completion, stop_tokens) for completion in completions]


def without_stop(completion: Completion, stop_tokens: Collection[int]) -> list[int]:
    """Its tokens, less the stop token at the end."""
    tokens = completion.tokens
    return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens


@dataclass
class _Row:
    """One row as it grows."""

    index: int
    limit: int  # tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False

    def take(
        self, token: int, logprob: float, stop_tokens: Collection[int], watch: StopWatcher | None
    ) -> None:
        if self.ended:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.finished = token in stop_tokens or (watch is not None and not watch(self.index, self.tokens))

    @property
    def ended(self) -> bool:
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
    """Fill the rows."""
    picker = Picker(
        sampling,
        prompts,
        seeds,
        max_tokens=max(row.limit for row in rows),
        vocab_size=model.head().weight.shape[0],
        device=model.device,
    )
    decoding = start_decoding(model, prompts, picker, max_tokens=max(row.limit for row in rows))
    while rows:
        for tokens, logprobs in decoding.decode():
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                row.take(token, logprob, stop_tokens, watch)
        alive = [place for place, row in enumerate(rows) if not row.ended]
        if len(alive) < len(rows):
            decoding.keep(alive)
            rows = [rows[place] for place in alive]


class Decoding(Protocol):
    """Rows under way."""

    def decode(self) -> list[tuple[list[int], list[float]]]:
        """The next tokens and log-probabilities of all rows, step by step."""

    def keep(self, places: list[int]) -> None:
        """Go on with these of the rows."""


def start_decoding(
    model: LanguageModel, prompts: Sequence[Sequence[int]], picker: Picker, *, max_tokens: int
) -> Decoding:
    """Read the prompts, and choose how to go on: by recorded steps where there are CUDA graphs."""
    rows = DecodeBatch(model, prompts, new_tokens=max_tokens)
    if graphs_problem(model, rows.cache) is None:
        return StaticDecodeBatch(rows, picker, max_tokens=max_tokens)
    return GrowingDecodeBatch(rows, picker)


class GrowingDecodeBatch:
    """Rows decoded token by token; those that ended are dropped at once."""

    def __init__(self, rows: DecodeBatch, picker: Picker) -> None:
        self.rows, self.picker = rows, picker
        self._chosen: torch.Tensor | None = None

    def decode(self) -> list[tuple[list[int], list[float]]]:
        """One more token of each row."""
        if self._chosen is not None:
            self.rows.advance(self._chosen)
        self._chosen, logprobs = self.picker(self.rows.logits())
        return [(self._chosen.tolist(), logprobs.tolist())]

    def keep(self, places: list[int]) -> None:
        """Go on with these of the rows."""
        if not places or self._chosen is None:
            return
        kept = torch.tensor(places, device=self._chosen.device)
        self.rows.keep(kept)
        self.picker.keep(kept)
        self._chosen = self._chosen[kept]


def check_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that the model cannot go on from."""
    for prompt in prompts:
        if not prompt:
            raise DataError("an empty prompt has nothing to go on from")
        if len(prompt) >= model.max_positions:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room in the {model.max_positions} of the model"
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < model.vocab_size:
                raise DataError(f"token {token} is outside the model's vocabulary of {model.vocab_size}")
