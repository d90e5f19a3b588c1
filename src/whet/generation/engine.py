"""Batched decoding with a key/value cache over prompts of any lengths."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whet.errors import DataError
from whet.generation.sampling import Sampling, row_generators, sample
from whet.models.language_model import LanguageModel
from whet.ops.attention import Layout

# called with a row and its tokens so far; False ends the row
Watch = Callable[[int, list[int]], bool]

_SHARED_PREFIX = 8  # a common start shorter than this is not worth a pass of its own


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, for the time of a `with` block."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def generate_tokens(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_tokens: Collection[int],
    sampling: Sampling | None = None,
    seed: int | None = None,
    watch: Watch | None = None,
) -> list[list[int]]:
    """What follows each prompt, up to a stop token (left out) or `max_tokens`."""
    _check_prompts(model, prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_tokens < 1:
        return outputs
    sampling = sampling or Sampling()
    generators = row_generators(len(prompts), seed=seed) if sampling.temperature else []
    rows = list(range(len(prompts)))  # the rows still decoding
    with evaluating(model), _uncompiled(model):
        state = _Rows(model, prompts)
        for _ in range(max_tokens):
            chosen = sample(state.logits(), sampling, [generators[row] for row in rows if generators])
            alive = []
            for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
                if token in stop_tokens:
                    continue
                outputs[row].append(token)
                if len(prompts[row]) + len(outputs[row]) >= model.max_positions:
                    continue
                if watch is None or watch(row, outputs[row]):
                    alive.append(place)
            if not alive or len(outputs[rows[alive[0]]]) >= max_tokens:
                break
            if len(alive) < len(rows):
                kept = torch.tensor(alive, device=chosen.device)
                state.keep(kept)
                chosen, rows = chosen[kept], [rows[place] for place in alive]
            state.advance(chosen)
    return outputs


@dataclass(frozen=True)
class Completion:
    """What followed a prompt: tokens (the stop token included), and log p of each at temperature 1."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_tokens: Collection[int],
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    watch: Watch | None = None,
) -> list[Completion]:
    """What follows each prompt, with log-probabilities; a row's tokens depend on its own seed alone."""
    _check_prompts(model, prompts)
    sampling = sampling or Sampling()
    found = [Completion([], [], False) for _ in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or []]
    rows = list(range(len(prompts)))
    with evaluating(model), _uncompiled(model):
        state = _Rows(model, prompts)
        for _ in range(max_tokens):
            logits = state.logits()
            chosen = sample(logits, sampling, [generators[row] for row in rows if generators])
            scores = logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
            alive = []
            for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
                found[row].tokens.append(token)
                found[row].logprobs.append(scores[place])
                if token in stop_tokens:
                    found[row] = Completion(found[row].tokens, found[row].logprobs, True)
                elif len(prompts[row]) + len(found[row].tokens) < model.max_positions and (
                    watch is None or watch(row, found[row].tokens)
                ):
                    alive.append(place)
            if not alive or len(found[rows[alive[0]]].tokens) >= max_tokens:
                break
            kept = torch.tensor(alive, device=chosen.device)
            state.keep(kept)
            chosen, rows = chosen[kept], [rows[place] for place in alive]
            state.advance(chosen)
    return found


@contextlib.contextmanager
def _uncompiled(model: LanguageModel) -> Iterator[None]:
    """Run compiled layers as they are: the changing shapes of decoding would use up their recompilations."""
    if not any(getattr(block, "_compiled_call_impl", None) for block in model.blocks()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _check_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        if not prompt:
            raise DataError("an empty prompt has nothing to go on from")
        if len(prompt) >= model.max_positions:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room in the {model.max_positions} of the model"
            )
        if max(prompt) >= model.vocab_size:
            raise DataError(f"token {max(prompt)} is outside the model's vocabulary of {model.vocab_size}")


class _Rows:
    """The decoding rows: their cache, which slots are real, and the hidden state to read next."""

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.cache: Any = model.new_cache()  # Any: opaque, but for keep(rows)
        device = model.device
        shared = _common_prefix(prompts) if len(prompts) > 1 else 0
        if shared >= _SHARED_PREFIX:
            start = torch.tensor([list(prompts[0][:shared])], device=device)
            model.hidden(start, None, Layout(visible=torch.ones_like(start, dtype=torch.bool)), self.cache)
            self.cache.keep(torch.zeros(len(prompts), dtype=torch.long, device=device))
        else:
            shared = 0
        tails = [list(prompt[shared:]) for prompt in prompts]
        width = max(map(len, tails))
        self.padded = any(len(tail) < width for tail in tails)
        tokens = torch.tensor([[0] * (width - len(tail)) + tail for tail in tails], device=device)
        lengths = torch.tensor([len(tail) for tail in tails], device=device)
        real = torch.arange(width, device=device) >= width - lengths[:, None]
        self.visible = torch.cat((real.new_ones(len(tails), shared), real), dim=1)
        positions = (shared + torch.arange(width, device=device) - (width - lengths[:, None])).clamp(min=0)
        self.next_position = shared + lengths
        before = torch.arange(shared, device=device).expand(len(tails), -1)
        self.slots = torch.cat((before, positions), dim=1)
        self._read(tokens, positions)

    def _read(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        layout = Layout.cached(self.visible, new_tokens=tokens.shape[1], padded=self.padded, slots=self.slots)
        self.hidden = self.model.hidden(tokens, positions, layout, self.cache)[:, -1]

    def logits(self) -> torch.Tensor:
        """Logits of each row's next token."""
        return self.model.logits(self.hidden)

    def advance(self, chosen: torch.Tensor) -> None:
        """Feed each row its new token."""
        self.visible = torch.cat((self.visible, self.visible.new_ones(len(chosen), 1)), dim=1)
        positions, self.next_position = self.next_position, self.next_position + 1
        self.slots = torch.cat((self.slots, positions[:, None]), dim=1)
        self._read(chosen[:, None], positions[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the other rows from everything that is computed."""
        self.cache.keep(rows)
        self.visible, self.slots = self.visible[rows], self.slots[rows]
        self.next_position = self.next_position[rows]


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts start with, leaving each at least one of its own."""
    shortest = min(map(len, prompts)) - 1
    first = prompts[0]
    for index in range(shortest):
        if any(prompt[index] != first[index] for prompt in prompts):
            return index
    return shortest
