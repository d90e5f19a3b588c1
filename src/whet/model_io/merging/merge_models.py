"""Merge several models tensor by tensor, with only a few copies of one tensor in memory at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from whet.errors import ConfigError, ModelError
from whet.model_io.merging import merge_methods
from whet.model_io.merging.model_source import (
    ModelSource,
    check_same_architecture,
    is_same_model,
    open_quantized_source,
    open_source,
)
from whet.model_io.safetensors import write_model_directory
from whet.model_io.tokenizer import load_model_tokenizer

METHODS = ("average", "slerp", "task", "ties", "dare", "dare-ties")
BASE_METHODS = ("task", "ties", "dare", "dare-ties")  # which need a common base model
DENSITIES = {"ties": 0.2, "dare": 0.5, "dare-ties": 0.5}  # default fraction of each update that is kept
_SUM_TO_ONE = ("average", "slerp")
_ROUNDING = 1e-6  # of weights given as decimals


@dataclass(frozen=True)
class MergeRecipe:
    """The merge method and its validated settings."""

    method: str
    weights: tuple[float, ...]
    density: float = 1.0
    seed: int = 0

    def merge(
        self, name: str, models: Iterator[torch.Tensor], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the merged tensor in float32."""
        if self.method == "average":
            return merge_methods.average(models, self.weights)
        if self.method == "slerp":
            return merge_methods.slerp(next(models), next(models), self.weights[1])
        assert base is not None
        if self.method == "task":
            return merge_methods.task_arithmetic(base, models, self.weights)
        if self.method == "ties":
            return merge_methods.ties(base, models, self.weights, density=self.density)
        generators = (merge_methods.tensor_generator(self.seed, i, name) for i in range(len(self.weights)))
        combine = merge_methods.dare if self.method == "dare" else merge_methods.dare_ties
        return combine(base, models, self.weights, density=self.density, generators=generators)


def make_recipe(
    method: str,
    count: int,
    *,
    weights: Sequence[float] | None = None,
    density: float | None = None,
    seed: int | None = None,
) -> MergeRecipe:
    """Return a validated recipe for `count` models, with defaults for missing settings."""
    if method not in METHODS:
        raise ConfigError(f"unknown merge method {method!r}", hint=f"use one of {', '.join(METHODS)}")
    if method == "slerp" and count != 2:
        raise ConfigError(f"slerp merges exactly two models, but {count} were given")
    if count < (1 if method in BASE_METHODS else 2):
        raise ConfigError(f"{method} needs at least two models")
    if density is not None and method not in DENSITIES:
        raise ConfigError(f"{method} has no density", hint=f"methods with a density: {', '.join(DENSITIES)}")
    if density is not None and not 0 < density <= 1:
        raise ConfigError(f"density {density} is not in (0, 1]")
    if seed is not None and not method.startswith("dare"):
        raise ConfigError(f"{method} is deterministic, so it has no seed")
    default = 1 / count if method in _SUM_TO_ONE else 1.0
    all_weights = tuple([default] * count if weights is None else weights)
    _check_weights(method, all_weights, count)
    return MergeRecipe(method, all_weights, density or DENSITIES.get(method, 1.0), seed or 0)


def _check_weights(method: str, weights: Sequence[float], count: int) -> None:
    listed = ", ".join(f"{weight:g}" for weight in weights)
    if len(weights) != count:
        raise ConfigError(f"there are {count} models, but {len(weights)} weights ({listed})")
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"weights must be finite: {listed}")
    if method in _SUM_TO_ONE and abs(sum(weights) - 1) > _ROUNDING:
        raise ConfigError(
            f"the weights of {method} must sum to 1, but {listed} sum to {sum(weights):g}",
            hint="task, ties and dare accept other sums",
        )
    if method.endswith("ties") and min(weights) <= 0:
        raise ConfigError(f"the weights of {method} must be greater than 0: {listed}")


def merge_models(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    method: str,
    base: str | Path | None = None,
    weights: Sequence[float] | None = None,
    density: float | None = None,
    seed: int | None = None,
) -> MergeRecipe:
    """Merge models with a method, and write the result as a Hugging Face model directory.

    Tensors keep the dtype of the base, or of the first input if the method has no base. The tokenizer is
    that of the first input.

    Args:
        inputs: The models to merge. Each is a model, a run, or an adapter with its base.
        out: The directory to write.
        method: One of "average", "slerp", "task", "ties", "dare" and "dare-ties".
        base: The common base model for all methods but "average" and "slerp". Adapters of the same base do
            not need it.
        weights: One weight per model. They must sum to 1 for "average" and "slerp".
        density: The fraction of each update that "ties", "dare" and "dare-ties" keep.
        seed: The random seed of "dare" and "dare-ties".

    Returns:
        The method and the settings that were used.

    Raises:
        ConfigError: If a setting is invalid.
        ModelError: If the models differ in architecture, base or tokenizer, or the result is not finite.
    """
    recipe = make_recipe(method, len(inputs), weights=weights, density=density, seed=seed)
    models = [open_source(str(name)) for name in inputs]
    base_source = _open_base(method, models, None if base is None else str(base))
    sources = models if base_source is None else [base_source, *models]
    check_same_architecture(sources)
    tokenizer = _common_tokenizer(
        [model.name for model in models] + ([base_source.name] if base_source else [])
    )
    reference = sources[0]

    def merge_tensor(name: str) -> torch.Tensor:
        target = reference.tensors[name]
        if not target.is_floating_point():
            return _require_equal(name, sources)
        base_tensor = None if base_source is None else base_source.get(name)
        merged = recipe.merge(name, (model.get(name) for model in models), base_tensor).to(target.dtype)
        if merged.numel() and not all(bound.isfinite() for bound in merged.aminmax()):
            raise ModelError(f"{name}: the result of {method} is not finite in {target.dtype}")
        return merged

    write_model_directory(
        Path(out),
        reference.tensors,
        config=models[0].config | {"dtype": _dtype_name(reference)},
        source=models[0].directory,
        tokenizer=tokenizer,
        compute_tensor=merge_tensor,
    )
    return recipe


def _open_base(method: str, models: Sequence[ModelSource], base: str | None) -> ModelSource | None:
    """Open the base model that updates are computed against. All adapters must have the same base."""
    if method not in BASE_METHODS:
        if base is not None:
            raise ConfigError(f"{method} has no base", hint=f"methods with a base: {', '.join(BASE_METHODS)}")
        return None
    for model in models:
        if model.base is not None and not is_same_model(model.base, base or models[0].base or model.base):
            expected = base or models[0].base
            raise ModelError(
                f"{model.name} is an adapter of {model.base}, not of {expected}",
                hint="merge it into its base first (whet merge), or give adapters of the same base",
            )
    if base is None and any(model.base is None for model in models):
        raise ConfigError(
            f"{method} needs the common base model of all models", hint="set it with --base MODEL"
        )
    base_name = base or models[0].base
    assert base_name is not None
    if not any(model.is_quantized for model in models):
        return open_source(base_name)
    if unquantized := [model.name for model in models if not model.is_quantized]:
        quantized = next(model.name for model in models if model.is_quantized)
        raise ModelError(
            f"{quantized} was trained on a 4-bit base, but {unquantized[0]} was not: {method} needs a common "
            "base",
            hint="merge the first into its base (whet merge), or use a method without a base",
        )
    return open_quantized_source(base_name)


def _common_tokenizer(names: Sequence[str]) -> Any:  # Any: a transformers tokenizer or None
    """Return the first model's tokenizer, and raise ModelError if a model maps tokens to other ids."""
    first = load_model_tokenizer(names[0])
    for name in names[1:]:
        tokenizer = load_model_tokenizer(name)
        if first is None or tokenizer is None:
            continue
        ours, theirs = first.get_vocab(), tokenizer.get_vocab()
        different = sorted(
            (text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text)),
            key=lambda text: ours.get(text, theirs.get(text)),
        )
        if different:
            examples = ", ".join(repr(text) for text in different[:4])
            raise ModelError(
                f"the tokenizers of {names[0]} and {name} differ in {len(different)} tokens: {examples}",
                hint="the same row of the embedding would represent different text",
            )
    return first


def _require_equal(name: str, sources: Sequence[ModelSource]) -> torch.Tensor:
    first = sources[0].get(name)
    for source in islice(sources, 1, None):
        if not torch.equal(first, source.get(name)):
            raise ModelError(f"{name} has {first.dtype} values that differ between the models")
    return first


def _dtype_name(source: ModelSource) -> str:
    dtypes = [tensor.dtype for tensor in source.tensors.values() if tensor.is_floating_point()]
    return str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
