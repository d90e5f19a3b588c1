"""Several models made into one, tensor by tensor: never more than a few copies of one tensor in memory."""

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
    check_alike,
    open_quantised,
    open_source,
    same_model,
)
from whet.model_io.safetensors import write_model_directory
from whet.model_io.tokenizer import tokenizer_of

METHODS = ("average", "slerp", "task", "ties", "dare", "dare-ties")
ON_A_BASE = ("task", "ties", "dare", "dare-ties")
DENSITIES = {"ties": 0.2, "dare": 0.5, "dare-ties": 0.5}  # the share of each update that is kept
_SUM_TO_ONE = ("average", "slerp")
_ROUNDING = 1e-6  # of weights typed as decimals


@dataclass(frozen=True)
class MergeRecipe:
    """What is done to each tensor."""

    method: str
    weights: tuple[float, ...]
    density: float = 1.0
    seed: int = 0

    def merge(
        self, name: str, models: Iterator[torch.Tensor], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The merged tensor, in float32."""
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
    """A recipe for so many models, every number checked."""
    if method not in METHODS:
        raise ConfigError(f"unknown merge method {method!r}", hint=f"known: {', '.join(METHODS)}")
    if method == "slerp" and count != 2:
        raise ConfigError(f"slerp is between two models, and {count} were given")
    if count < (1 if method in ON_A_BASE else 2):
        raise ConfigError(f"{method} needs at least two models")
    if density is not None and method not in DENSITIES:
        raise ConfigError(f"{method} has no density", hint=f"these have one: {', '.join(DENSITIES)}")
    if density is not None and not 0 < density <= 1:
        raise ConfigError(f"density {density} is not in (0, 1]")
    if seed is not None and not method.startswith("dare"):
        raise ConfigError(f"{method} draws no random numbers, so it has no seed")
    even = 1 / count if method in _SUM_TO_ONE else 1.0
    chosen = tuple([even] * count if weights is None else weights)
    _check_weights(method, chosen, count)
    return MergeRecipe(method, chosen, density or DENSITIES.get(method, 1.0), seed or 0)


def _check_weights(method: str, weights: Sequence[float], count: int) -> None:
    shown = ", ".join(f"{weight:g}" for weight in weights)
    if len(weights) != count:
        raise ConfigError(f"there are {count} models and {len(weights)} weights ({shown})")
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"weights must be finite numbers: {shown}")
    if method in _SUM_TO_ONE and abs(sum(weights) - 1) > _ROUNDING:
        raise ConfigError(
            f"the weights of {method} must sum to 1; {shown} sum to {sum(weights):g}",
            hint="task, ties and dare take other weights",
        )
    if method.endswith("ties") and min(weights) <= 0:
        raise ConfigError(f"the weights of {method} must be above 0: {shown}")


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
    """Write the model that `method` makes of the inputs, each a model, a run or an adapter with its base.

    Tensors keep the dtype they have in the base, or in the first input where the method has no base; the
    tokenizer is that of the first input.
    """
    recipe = make_recipe(method, len(inputs), weights=weights, density=density, seed=seed)
    models = [open_source(str(name)) for name in inputs]
    base_source = _base_for(method, models, None if base is None else str(base))
    everyone = models if base_source is None else [base_source, *models]
    check_alike(everyone)
    tokenizer = _common_tokenizer(
        [model.name for model in models] + ([base_source.name] if base_source else [])
    )
    reference = everyone[0]

    def make(name: str) -> torch.Tensor:
        wanted = reference.described[name]
        if not wanted.is_floating_point():
            return _equal_everywhere(name, everyone)
        root = None if base_source is None else base_source.get(name)
        merged = recipe.merge(name, (model.get(name) for model in models), root).to(wanted.dtype)
        if merged.numel() and not all(bound.isfinite() for bound in merged.aminmax()):
            raise ModelError(f"{name}: what {method} makes of it is not finite in {wanted.dtype}")
        return merged

    write_model_directory(
        Path(out),
        reference.described,
        config=models[0].config | {"dtype": _dtype_name(reference)},
        source=models[0].directory,
        tokenizer=tokenizer,
        make=make,
    )
    return recipe


def _base_for(method: str, models: Sequence[ModelSource], base: str | None) -> ModelSource | None:
    """The base that updates are measured from; adapters name their own, and it must be the same."""
    if method not in ON_A_BASE:
        if base is not None:
            raise ConfigError(f"{method} has no base", hint=f"these have one: {', '.join(ON_A_BASE)}")
        return None
    for model in models:
        if model.base is not None and not same_model(model.base, base or models[0].base or model.base):
            other = base or models[0].base
            raise ModelError(
                f"{model.name} is an adapter of {model.base}, not of {other}",
                hint="merge it into its base first (whet merge), or give adapters of one base",
            )
    if base is None and any(model.base is None for model in models):
        raise ConfigError(
            f"{method} measures each model against their common base", hint="name it: --base MODEL"
        )
    found = base or models[0].base
    assert found is not None
    if not any(model.quantised for model in models):
        return open_source(found)
    if plain := [model.name for model in models if not model.quantised]:
        packed = next(model.name for model in models if model.quantised)
        raise ModelError(
            f"{packed} was trained on a base in 4 bits, and {plain[0]} was not: {method} has no common base",
            hint="merge the first into its base (whet merge), or take a method without a base",
        )
    return open_quantised(found)


def _common_tokenizer(names: Sequence[str]) -> Any:  # Any: a transformers tokenizer or None
    """The first model's tokenizer; in all of them a token must be the same piece of text."""
    first = tokenizer_of(names[0])
    for name in names[1:]:
        other = tokenizer_of(name)
        if first is None or other is None:
            continue
        ours, theirs = first.get_vocab(), other.get_vocab()
        odd = sorted(
            (text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text)),
            key=lambda text: ours.get(text, theirs.get(text)),
        )
        if odd:
            shown = ", ".join(repr(text) for text in odd[:4])
            raise ModelError(
                f"the tokenizers of {names[0]} and {name} differ in {len(odd)} tokens: {shown}",
                hint="the same row of the embedding would stand for different text",
            )
    return first


def _equal_everywhere(name: str, sources: Sequence[ModelSource]) -> torch.Tensor:
    first = sources[0].get(name)
    for other in islice(sources, 1, None):
        if not torch.equal(first, other.get(name)):
            raise ModelError(f"{name} holds {first.dtype} numbers that differ between the models")
    return first


def _dtype_name(source: ModelSource) -> str:
    dtypes = [tensor.dtype for tensor in source.described.values() if tensor.is_floating_point()]
    return str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
