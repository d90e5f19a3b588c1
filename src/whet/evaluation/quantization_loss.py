"""Measure what quantization costs: KL divergence, perplexity and exact match, against the float model."""

import contextlib
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.data.batches import Batch, make_batch
from whet.data.tokens.examples import Example
from whet.data.tokens.tokenize import Question
from whet.evaluation.exact_match import exact_match
from whet.evaluation.sample_text import SAMPLE_TEXT
from whet.models.language_model import LanguageModel, eval_mode

MAX_TOKENS = 16_384  # of the evaluation data, which limits the time on a CPU
_CHUNK = 256  # tokens whose logits are in memory at once
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class EvaluationData:
    """What two models are compared on."""

    label: str
    batches: Sequence[Batch]
    questions: Sequence[Question] = ()  # for exact match


@dataclass(frozen=True)
class QuantizationLoss:
    """How a quantized model differs from the float model, over the supervised tokens of some data."""

    label: str
    tokens: int
    kl: float  # mean over tokens of KL(float || quantized), in nats
    float_perplexity: float
    perplexity: float
    float_exact_match: float | None = None
    exact_match: float | None = None

    @property
    def perplexity_increase(self) -> float:
        """The increase of the perplexity, relative to that of the float model."""
        return self.perplexity / self.float_perplexity - 1

    def broken_bounds(self, max_kl: float | None, max_perplexity_increase: float | None) -> list[str]:
        """Return a sentence for each measurement above its bound. NaN breaks every bound."""
        measured = (
            ("KL divergence", self.kl, max_kl),
            ("relative increase of the perplexity", self.perplexity_increase, max_perplexity_increase),
        )
        return [
            f"the {name} is {value:.4g}, above the bound of {bound:g}"
            for name, value, bound in measured
            if bound is not None and not value <= bound
        ]


def sample_data(model: LanguageModel, tokenizer: Any) -> EvaluationData:  # Any: a transformers tokenizer
    """Return the bundled text as evaluation data."""
    batches = []
    for text in SAMPLE_TEXT:
        tokens = tokenizer(text)["input_ids"][: min(512, model.max_positions)]
        batches.append(make_batch([[Example(tokens, [True] * len(tokens), "bundled text")]]))
    return EvaluationData("the bundled text", batches)


def first_batches(batches: Iterable[Batch], max_tokens: int = MAX_TOKENS) -> list[Batch]:
    """Return the first batches with at most `max_tokens` tokens, at least one."""
    selected: list[Batch] = []
    count = 0
    for batch in batches:
        count += batch.real_tokens
        if selected and count > max_tokens:
            break
        selected.append(batch)
    return selected


def measure_quantization(
    float_model: LanguageModel,
    quantized: LanguageModel,
    data: EvaluationData,
    *,
    tokenizer: Any,  # Any: a transformers tokenizer
    generate: bool = False,
) -> QuantizationLoss:
    """Compare a quantized model with the float model on the same data.

    Args:
        float_model: The model before quantization.
        quantized: The model with dequantized weights.
        data: The batches, and the questions for `generate`.
        tokenizer: The tokenizer of both.
        generate: Also compute the exact match of both.
    """
    totals = torch.zeros(3, dtype=torch.float64)  # KL divergence, NLL of both models
    tokens = 0
    with eval_mode(float_model), eval_mode(quantized):
        for batch in data.batches:
            totals += _sum_losses(float_model, quantized, batch.to(float_model.device)).cpu()
            tokens += batch.supervised
        matches: list[float | None] = [None, None]
        if generate and data.questions:
            matches = [
                exact_match(model, tokenizer, data.questions).metrics()["exact_match"]
                for model in (float_model, quantized)
            ]
    kl, float_nll, nll = (totals / max(1, tokens)).tolist()
    return QuantizationLoss(
        data.label, tokens, max(0.0, kl), _exp(float_nll), _exp(nll), matches[0], matches[1]
    )


def _exp(nll: float) -> float:
    return math.inf if nll >= 700 else math.exp(nll)


def _sum_losses(float_model: LanguageModel, quantized: LanguageModel, batch: Batch) -> torch.Tensor:
    """Return the sums over the supervised tokens: KL(float || quantized), and the NLL of both models."""
    sums = torch.zeros(3, dtype=torch.float64, device=batch.tokens.device)
    states, quantized_states = float_model.states(batch), quantized.states(batch)
    for start in range(0, batch.supervised, _CHUNK):
        rows = slice(start, start + _CHUNK)
        log_p = F.log_softmax(float_model.logits(states[rows]).float(), -1)
        log_q = F.log_softmax(quantized.logits(quantized_states[rows]).float(), -1)
        targets = batch.supervised_targets[rows, None]
        kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        nll, quantized_nll = (-each.gather(-1, targets).squeeze(-1) for each in (log_p, log_q))
        sums += torch.stack([kl, nll, quantized_nll]).double().sum(-1)
    return sums


@contextlib.contextmanager
def quantized_activations(model: LanguageModel, weights: Container[str]) -> Iterator[None]:
    """Round the inputs of linear layers to float8 with a scale per token in the `with` block.

    This is what vLLM computes for fp8 exports. Experts are not covered.

    Args:
        model: The model.
        weights: The names of the layers' weights in files.
    """
    handles = [
        module.register_forward_pre_hook(lambda _, inputs: (_round_to_float8(inputs[0]), *inputs[1:]))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and model.hf_name(f"{path}.weight") in weights
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _round_to_float8(x: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(_FLOAT8).max
    scales = x.abs().amax(-1, keepdim=True) / largest
    scales = torch.where(scales == 0, 1, scales)
    return (x / scales).clamp(-largest, largest).to(_FLOAT8).to(x.dtype) * scales
