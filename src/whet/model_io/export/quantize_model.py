"""Write a model with quantized linear weights as a Hugging Face directory for transformers and vLLM."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args  # Any: the values of a config.json

import torch
from torch import nn

from whet.errors import ConfigError, ModelError
from whet.model_io.config_json import QUANTIZATION
from whet.model_io.export.export_model import LoadedModel, dtype_name
from whet.model_io.formats import bitsandbytes_nf4 as bnb
from whet.model_io.formats import compressed_tensors as ct
from whet.model_io.safetensors import write_model_directory
from whet.models.language_model import LanguageModel
from whet.models.moe import Experts, Router
from whet.models.transformers_bridge import Bridge, config_field

Quantization = Literal["fp8", "int8", "int4", "nf4"]
Scales = Literal["channel", "tensor"]
GROUP_SIZES = (128, 64, 32)  # of int4, the first that divides the columns of all layers; vLLM has all three
_MULTIPLES = {"int8": 4, "int4": GROUP_SIZES[-1], "nf4": 64}  # of the number of columns


@dataclass(frozen=True)
class LinearWeights:
    """The tensors of a model that are quantized, and the linear layers that stay as they are."""

    quantized: Mapping[str, torch.Tensor]  # by their name in files
    ignored: tuple[str, ...]  # modules: the head and routers

    @property
    def has_experts(self) -> bool:
        """Whether the weights of experts are among them."""
        return any(".experts." in name for name in self.quantized)


def check_quantization(kind: str, scales: str | None) -> None:
    """Raise ConfigError for an unknown kind of quantization, or scales that it does not have."""
    if kind not in get_args(Quantization):
        raise ConfigError(
            f"unknown quantization {kind!r}", hint=f"use one of {', '.join(get_args(Quantization))}"
        )
    if scales not in (None, *get_args(Scales)):
        raise ConfigError(f"unknown scales {scales!r}", hint=f"use one of {', '.join(get_args(Scales))}")
    if scales is not None and kind != "fp8":
        raise ConfigError(
            f"--scales only applies to --quantize fp8, not to --quantize {kind}",
            hint="in Python it is called scales",
        )


def find_linear_weights(model: LanguageModel, name: str) -> LinearWeights:
    """Return the weights of a model's linear layers. The head, embeddings, norms and routers stay float.

    Raises:
        ModelError: If transformers would not read them as quantized linear layers.
    """
    if model.stores_transposed:
        raise ModelError(
            f"{name} cannot be quantized: transformers has no linear layers in this architecture, but Conv1D",
            hint="export it without --quantize, or to gguf",
        )
    if model.hf_config().get("model_type") == "whet":
        raise ModelError(
            f"{name} cannot be quantized: neither transformers nor vLLM can load whet's own architecture",
            hint="export it without --quantize, and load it with whet",
        )
    if isinstance(model, Bridge):
        return _bridged_linear_weights(model, name)
    quantized: dict[str, torch.Tensor] = {}
    ignored = [model.hf_name("lm_head")]
    for path, module in model.named_modules():
        if isinstance(module, Router):
            [stored] = model.to_hf_tensors(f"{path}.weight", module.weight)
            ignored.append(stored.removesuffix(".weight"))
        elif isinstance(module, Experts):
            for key, parameter in module.named_parameters():
                quantized |= model.to_hf_tensors(f"{path}.{key}", parameter)
        elif isinstance(module, nn.Linear) and path != "lm_head":
            quantized |= model.to_hf_tensors(f"{path}.weight", module.weight)
    return LinearWeights(quantized, tuple(ignored))


def _bridged_linear_weights(model: Bridge, name: str) -> LinearWeights:
    if config_field(model.model.config, "num_experts", "num_local_experts", "n_routed_experts"):
        raise ModelError(
            f"{name} cannot be quantized: whet has no native {model.model.config.model_type}, so its experts "
            "are not known",
            hint="export it without --quantize",
        )
    head = model.model.get_output_embeddings()
    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantized = {
        model.hf_name(f"{path}.weight"): module.weight
        for path, module in linear.items()
        if module is not head
    }
    stored = model.to_hf_state_dict(model.state_dict())
    if renamed := [each for each in quantized if each not in stored]:
        raise ModelError(
            f"{name} cannot be quantized: transformers stores {renamed[0]} in another form",
            hint="export it without --quantize",
        )
    return LinearWeights(
        quantized, tuple(model.hf_name(path) for path, module in linear.items() if module is head)
    )


def _check_layers(weights: LinearWeights, kind: str, name: str) -> None:
    """Raise ModelError for layers that this quantization cannot store."""
    multiple = _MULTIPLES.get(kind, 1)
    for stored, weight in weights.quantized.items():
        if weight.shape[1] % multiple:
            raise ModelError(
                f"{name} cannot be quantized to {kind}: {stored} has {weight.shape[1]} columns, which is not "
                f"a multiple of {multiple}",
                hint="use fp8, which fits any shape" if kind != "int4" else "use int8 or fp8",
            )
    if kind == "nf4" and weights.has_experts:
        raise ModelError(
            f"{name} cannot be quantized to nf4: bitsandbytes leaves experts unquantized in transformers 5",
            hint="use fp8, int8 or int4, which quantize them",
        )


def _scheme(weights: LinearWeights, kind: str, scales: str | None) -> ct.Scheme:
    """Return the scheme of fp8 (W8A8, dynamic per token), int8 (W8A16) or int4 (W4A16)."""
    if kind == "fp8":
        strategy: Scales = "tensor" if scales == "tensor" else "channel"
        return ct.Scheme("float", 8, strategy, has_dynamic_activations=True)
    if kind == "int8":
        return ct.Scheme("int", 8, "channel")
    columns = [weight.shape[1] for weight in weights.quantized.values()]
    size = next(size for size in GROUP_SIZES if not any(count % size for count in columns))
    return ct.Scheme("int", 4, "group", size)


@dataclass(frozen=True)
class QuantizedModel:
    """A model to write with quantized weights."""

    loaded: LoadedModel
    kind: str
    weights: LinearWeights
    config: Mapping[str, Any]  # quantization_config
    quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]]  # returns the parts of a weight
    description: str
    dtype: torch.dtype  # of the other tensors and of the scales

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the files."""
        model = self.loaded.model
        seen: set[tuple[int, torch.Size]] = set()
        for name, tensor in model.to_hf_state_dict(model.state_dict()).items():
            if (tensor.data_ptr(), tensor.shape) in seen:  # tied, which config.json states
                continue
            seen.add((tensor.data_ptr(), tensor.shape))
            if name not in self.weights.quantized:
                yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                continue
            for part, stored in self.quantize(tensor).items():
                yield f"{name.removesuffix('weight')}{part}", stored

    @property
    def float_bytes(self) -> int:
        """The size of the weights without quantization."""
        model = self.loaded.model
        unique = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
        return sum(unique.values()) * self.dtype.itemsize

    def write(self, directory: Path, *, verify: Callable[[Path], None] | None = None) -> None:
        """Write the directory. See `write_model_directory` for `verify`."""
        model = self.loaded.model
        write_model_directory(
            directory,
            dict(self.tensors()),
            config={**model.hf_config(), "dtype": dtype_name(self.dtype), QUANTIZATION: self.config},
            source=model.source,
            tokenizer=self.loaded.tokenizer,
            verify=verify,
        )


def quantize_model(
    loaded: LoadedModel, kind: str, *, dtype: torch.dtype, scales: str | None = None
) -> QuantizedModel:
    """Prepare a model without adapters for writing with quantized weights.

    Raises:
        ModelError: If its architecture or the shape of a layer does not fit.
    """
    weights = find_linear_weights(loaded.model, loaded.name)
    _check_layers(weights, kind, loaded.name)
    if kind == "nf4":
        config = bnb.nf4_config(weights.ignored, dtype=dtype)
        quantize_nf4 = partial(bnb.quantize_nf4_weight, dtype=dtype)
        return QuantizedModel(loaded, kind, weights, config, quantize_nf4, kind, dtype)
    scheme = _scheme(weights, kind, scales)
    size = f", group size {scheme.group_size}" if scheme.group_size else f", scales per {scheme.strategy}"
    quantize = partial(ct.quantize_weight, scheme=scheme, dtype=dtype)
    config = scheme.config(weights.ignored)
    return QuantizedModel(loaded, kind, weights, config, quantize, f"{kind}{size}", dtype)
