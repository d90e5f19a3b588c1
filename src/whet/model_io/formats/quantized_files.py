"""Read model directories with quantized weights: each weight is dequantized when it is read."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple  # Any: the values of a config.json

import torch

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.config_json import CONFIG, QUANTIZATION
from whet.model_io.formats import bitsandbytes_nf4 as bnb
from whet.model_io.formats import compressed_tensors as ct
from whet.model_io.safetensors import TensorFiles

log = logging.getLogger("whet")

_SHAPES = ("weight_shape", bnb.STATE)  # parts that contain the shape of the weight


class _Layout(NamedTuple):
    """How the weights of a directory are stored."""

    label: str
    marker: str  # the end of the name of a tensor that only quantized weights have
    parts: tuple[str, ...]
    dequantize: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    describe: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]  # the weight on the meta device


def open_quantized(directory: Path, quantization: Mapping[str, Any]) -> TensorFiles:
    """Open the tensors of a directory with this quantization_config, to be dequantized when they are read.

    Raises:
        ModelError: If whet cannot dequantize them.
    """
    try:
        with invalid_input_errors(f"{directory / CONFIG}: {QUANTIZATION} is invalid"):
            layout = _layout(quantization)
    except ModelError as error:
        raise ModelError(
            f"{directory}: {error.message}",
            hint="whet reads fp8, int8 and int4 of compressed-tensors, and nf4 of bitsandbytes; use the "
            "original model, or dequantize this one with transformers",
        ) from error
    log.info("model: dequantizing %s weights", layout.label)
    return QuantizedFiles(directory, layout)


def _layout(config: Mapping[str, Any]) -> _Layout:
    method = config.get("quant_method")
    if method == bnb.METHOD:
        bnb.check_nf4_config(config)
        return _Layout("nf4", f".{bnb.STATE}", bnb.PARTS, bnb.dequantize_nf4_weight, _describe_nf4)
    if method != ct.METHOD:
        raise ModelError(f"weights quantized by {method} are not supported")
    scheme = ct.read_scheme(config)
    parts = ("weight_packed", "weight_scale", "weight_shape") if scheme.packed else ("weight", "weight_scale")

    def dequantize(stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return ct.dequantize_weight(stored, scheme)

    def describe(stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        shape = stored["weight_shape"].tolist() if scheme.packed else stored["weight"].shape
        return torch.empty(shape, dtype=stored["weight_scale"].dtype, device="meta")

    label = f"{'fp' if scheme.kind == 'float' else 'int'}{scheme.bits}"
    return _Layout(label, ".weight_scale", parts, dequantize, describe)


def _describe_nf4(stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    state = bnb.read_state(stored[bnb.STATE])
    return torch.empty(state["shape"], dtype=bnb.state_dtype(state), device="meta")


class QuantizedFiles(TensorFiles):
    """The tensors of a model directory by their names in the model, dequantized one at a time."""

    def __init__(self, directory: Path, layout: _Layout) -> None:
        self.directory = directory
        self._layout = layout
        self._stored = stored = TensorFiles(directory)
        self._parts: dict[str, dict[str, str]] = {}  # stored names by weight and part
        for module in [name.removesuffix(layout.marker) for name in stored if name.endswith(layout.marker)]:
            parts = {part: f"{module}.{part}" for part in layout.parts}
            if missing := [name for name in parts.values() if name not in stored]:
                raise ModelError(f"{directory}: the quantized weight of {module} lacks {missing[0]}")
            self._parts[f"{module}.weight"] = parts
        hidden = {name for parts in self._parts.values() for name in parts.values()}
        plain = {name: stored.file_of(name) for name in stored if name not in hidden}
        first = {weight: stored.file_of(next(iter(parts.values()))) for weight, parts in self._parts.items()}
        self._files = plain | first

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape after dequantization."""
        return tuple(self.meta_tensor(name).shape)

    def meta_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the meta device with its shape and dtype before quantization."""
        if name not in self._parts:
            return self._stored.meta_tensor(name)
        with invalid_input_errors(f"{self.file_of(name)}: {name} is not a quantized weight"):
            parts = {
                part: self._stored.get(stored) if part in _SHAPES else self._stored.meta_tensor(stored)
                for part, stored in self._parts[name].items()
            }
            return self._layout.describe(parts)

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor. Dequantized weights are in float32."""
        if name not in self._parts:
            return self._stored.get(name)
        with invalid_input_errors(f"{self.file_of(name)}: {name} cannot be dequantized"):
            return self._layout.dequantize(
                {part: self._stored.get(stored) for part, stored in self._parts[name].items()}
            )

    def read(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the given names, one at a time."""
        for name in self._files:
            if name in names:
                yield name, self.get(name)
