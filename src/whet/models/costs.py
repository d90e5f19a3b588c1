"""Parameter counts and FLOPs of a decoder, computed from its spec alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from whet.models.spec import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    ModelSpec,
    NormSpec,
)

Matrix = tuple[int, int, bool]  # inputs, outputs, whether it has a bias


def parameter_counts(spec: ModelSpec, *, active: bool = False) -> dict[str, int]:
    """Return the parameter count of each part: embedding, positions, attention, feedforward, norms, head.

    A tied head counts 0. With `active`, only the experts that a token is routed to are counted.
    """
    counts = {
        "embedding": spec.vocab_size * spec.d_model,
        "positions": spec.max_positions * spec.d_model if spec.positions == "learned" else 0,
        "attention": 0,
        "feedforward": 0,
        "norms": _norm_size(spec.norm, spec.d_model),
        "head": 0 if spec.tied_head else spec.vocab_size * spec.d_model,
    }
    for block in spec.blocks:
        counts["attention"] += sum(map(_matrix_size, _attention_matrices(block, spec.d_model)))
        matrices = _feedforward_matrices(block, spec.d_model, active=active)
        counts["feedforward"] += sum(map(_matrix_size, matrices))
        counts["norms"] += sum(_norm_size(spec.norm, size) for size in _norm_widths(block, spec.d_model))
    return counts


def forward_flops(spec: ModelSpec, length: int, *, visible_only: bool = True) -> dict[str, int]:
    """Return the matmul FLOPs of one forward pass over `length` tokens, two per multiply-add, by part.

    The parts are attention (projections), scores (queries with keys, weights with values), feedforward and
    head. Only the chosen experts count. With `visible_only`, scores count only the pairs that a causal or
    windowed layer attends to. `visible_only=False` is the cost of kernels that compute all pairs and mask.
    A step that trains every weight costs three times as much. Frozen weights save the third for their
    gradient.
    """
    flops: Counter[str] = Counter()
    for block in spec.blocks:
        flops["attention"] += length * sum(2 * i * o for i, o, _ in _attention_matrices(block, spec.d_model))
        flops["feedforward"] += length * sum(
            2 * i * o for i, o, _ in _feedforward_matrices(block, spec.d_model, active=True)
        )
        flops["scores"] += score_flops(block.attention, length, visible_only=visible_only)
    flops["head"] = length * 2 * spec.d_model * spec.vocab_size
    return dict(flops)


def flops_per_token(spec: ModelSpec, length: int) -> float:
    """Return the mean forward FLOPs per token in a document of `length` tokens."""
    return sum(forward_flops(spec, length).values()) / length


def tokens_per_second(
    spec: ModelSpec, length: int, *, flops_per_s: float, utilisation: float = 0.4, training: bool = True
) -> float:
    """Return the throughput of a device at the given utilization. Training costs three forward passes."""
    return flops_per_s * utilisation / (flops_per_token(spec, length) * (3 if training else 1))


def _matrix_size(matrix: Matrix) -> int:
    inputs, outputs, bias = matrix
    return inputs * outputs + (outputs if bias else 0)


def _norm_size(norm: NormSpec, width: int) -> int:
    return {"rms": width, "layer": 2 * width, "none": 0}[norm.kind]


def _norm_widths(block: BlockSpec, d_model: int) -> Iterator[int]:
    norms_per_part = 2 if block.placement == "sandwich" else 1
    for part in (block.attention, block.feedforward):
        if part is not None:
            yield from [d_model] * norms_per_part
    match block.attention:
        case AttentionSpec(qk_norm="head", head_dim=size):
            yield from (size, size)
        case AttentionSpec(qk_norm="all") as attention:
            yield from (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim)
        case LatentAttentionSpec(kv_rank=rank, q_rank=q_rank):
            yield from (rank,) if q_rank is None else (rank, q_rank)


def _attention_matrices(block: BlockSpec, d_model: int) -> Iterator[Matrix]:
    match block.attention:
        case AttentionSpec() as a:
            queries, shared = a.heads * a.head_dim, a.kv_heads * a.head_dim
            yield from ((d_model, size, a.bias) for size in (queries, shared, shared))
            yield queries, d_model, a.out_bias
        case LatentAttentionSpec() as a:
            queries = a.heads * (a.plain_dim + a.rope_dim)
            if a.q_rank is None:
                yield d_model, queries, False
            else:
                yield d_model, a.q_rank, False
                yield a.q_rank, queries, False
            yield d_model, a.kv_rank + a.rope_dim, False
            yield a.kv_rank, a.heads * (a.plain_dim + a.value_dim), False
            yield a.heads * a.value_dim, d_model, False


def _feedforward_matrices(block: BlockSpec, d_model: int, *, active: bool) -> Iterator[Matrix]:
    match block.feedforward:
        case FeedForwardSpec(width=width, gated=gated, bias=bias):
            yield from [(d_model, width, bias)] * (2 if gated else 1)
            yield width, d_model, bias
        case ExpertsSpec(experts=experts, top_k=top_k, width=width, shared=shared):
            yield d_model, experts, False
            for _ in range((top_k if active else experts) + shared):
                yield from ((d_model, width, False), (d_model, width, False), (width, d_model, False))


def score_flops(
    attention: AttentionSpec | LatentAttentionSpec | None, length: int, *, visible_only: bool = True
) -> int:
    """Return the FLOPs of queries with keys and weights with values, for `length` tokens in one layer."""
    match attention:
        case AttentionSpec(head_dim=size):
            keys, values = size, size
        case LatentAttentionSpec() as a:
            keys, values = a.plain_dim + a.rope_dim, a.value_dim
        case None:
            return 0
    pairs = length * length
    if visible_only:
        window = min(attention.window or length, length)
        pairs = window * (window + 1) // 2 + (length - window) * window
    return 2 * attention.heads * pairs * (keys + values)


@dataclass(frozen=True)
class ModelSummary:
    """The sizes and stop tokens of a model. A size is None if the config does not state it."""

    name: str
    vocab_size: int | None
    max_positions: int | None
    parameters: int | None
    stop_tokens: frozenset[int] = frozenset()
