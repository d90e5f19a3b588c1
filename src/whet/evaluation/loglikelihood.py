"""Log-likelihoods of continuations, with contexts that several continuations share computed once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from whet.adapters.adapter import constant_weights
from whet.data.packing import DEFAULT_MICRO_BATCH_TOKENS
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel, eager_layers, eval_mode
from whet.ops.attention import Layout
from whet.ops.cross_entropy import chunk_rows, spans

_CPU_ROW_TOKENS = 4096  # computed per forward pass; more tokens share more prefixes and need more memory

TokenPair = tuple[Sequence[int], Sequence[int]]  # a context and its continuation, neither of them empty


@dataclass(frozen=True)
class ContinuationScore:
    """The log-likelihood of one continuation."""

    logprob: float  # the sum over the continuation's tokens
    is_greedy: bool  # whether greedy decoding would generate exactly this continuation


def score_continuations(
    model: LanguageModel,
    pairs: Sequence[TokenPair],
    *,
    max_length: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[ContinuationScore]:
    """Return the log-likelihood of each continuation given its context, in the order of the pairs.

    Equal inputs are computed once. On a CPU, shared prefixes of different inputs are computed once as well.

    Args:
        model: the model that scores them.
        pairs: token ids of contexts and continuations. Longer pairs lose tokens at the start of the context.
        max_length: the largest number of input tokens. Default: the model's context length.
        progress: called with the number of scored pairs and their total.
    """
    limit = max_length or model.max_positions
    inputs: dict[tuple[int, ...], int] = {}
    requests: list[list[tuple[int, list[int]]]] = []  # per input: the index of a pair and its target tokens
    for index, (context, continuation) in enumerate(pairs):
        tokens = (*context, *continuation)[-(limit + 1) :]
        number = inputs.setdefault(tokens[:-1], len(inputs))
        if number == len(requests):
            requests.append([])
        requests[number].append((index, list(continuation[-(len(tokens) - 1) :])))
    scores: dict[int, ContinuationScore] = {}
    with eval_mode(model), eager_layers(model), constant_weights(model):
        for row in _pack_rows(list(inputs), model):
            scores |= _score_row(model, row, [requests[inputs[tokens]] for tokens in row])
            progress(len(scores), len(pairs))
    return [scores[index] for index in range(len(pairs))]


def _pack_rows(inputs: Sequence[tuple[int, ...]], model: LanguageModel) -> Iterator[list[tuple[int, ...]]]:
    """Yield packed rows of inputs, sorted so that inputs with a shared prefix are adjacent."""
    on_cpu = model.device.type == "cpu"
    limit = _CPU_ROW_TOKENS if on_cpu else DEFAULT_MICRO_BATCH_TOKENS
    shares = (
        on_cpu and isinstance(model, Decoder) and model.paths.shared_prefixes and model.can_share_prefixes()
    )
    row: list[tuple[int, ...]] = []
    size = 0  # tokens of the row, without shared prefixes if the model computes those once
    for tokens in sorted(inputs):
        new = len(tokens) - (_shared_length(row[-1], tokens) if row and shares else 0)
        if row and size + new > limit:
            yield row
            row, size, new = [], 0, len(tokens)
        row.append(tokens)
        size += new
    if row:
        yield row


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _score_row(
    model: LanguageModel,
    row: Sequence[tuple[int, ...]],
    requests: Sequence[Sequence[tuple[int, list[int]]]],
) -> dict[int, ContinuationScore]:
    """Return the scores of a row's continuations by the index of their pair."""
    lengths = [len(tokens) for tokens in row]
    ends = np.cumsum(lengths)
    scored = [
        (index, end - len(targets) + np.arange(len(targets)), targets)
        for end, group in zip(ends, requests, strict=True)
        for index, targets in group
    ]
    states, which = np.unique(np.concatenate([positions for _, positions, _ in scored]), return_inverse=True)
    targets = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, _, tokens in scored])
    logprobs, greedy = _token_scores(model, _hidden_states(model, row, lengths)[states], which, targets)
    bounds = np.cumsum([0, *(len(tokens) for _, _, tokens in scored)])
    return {
        index: ContinuationScore(float(logprobs[start:end].sum()), bool(greedy[start:end].all()))
        for (index, _, _), start, end in zip(scored, bounds[:-1], bounds[1:], strict=True)
    }


def _hidden_states(
    model: LanguageModel, row: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> torch.Tensor:
    """Return the hidden states [tokens, D] of a packed row."""
    tokens = torch.tensor([[token for each in row for token in each]], device=model.device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)
    return model.hidden(tokens, positions, Layout.packed([lengths], device=model.device))[0]


def _token_scores(
    model: LanguageModel, hidden: torch.Tensor, which: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each target, and whether it is the most likely token.

    The logits of each hidden state are computed once, chunk by chunk, also if it has several targets.

    Args:
        model: the model, for its head.
        hidden: hidden states [states, D].
        which: the index of the state that predicts each target, [targets].
        targets: token ids [targets].
    """
    logprobs, greedy = np.empty(len(targets)), np.empty(len(targets), dtype=bool)
    for span in spans(len(hidden), chunk_rows(model.head().weight)):
        chosen = np.flatnonzero((which >= span.start) & (which < span.stop))
        logits = model.logits(hidden[span])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rows = torch.from_numpy(which[chosen] - span.start).to(logits.device)
        ids = torch.from_numpy(targets[chosen]).to(logits.device)
        logprobs[chosen] = (logits[rows, ids] - logits.logsumexp(-1)[rows]).cpu().numpy()
        greedy[chosen] = (logits.argmax(-1)[rows] == ids).cpu().numpy()
    return logprobs, greedy
