"""Weights in the layout of compressed-tensors, which vLLM and transformers read, in plain torch.

A quantized matrix [out, in] is stored as integer or float8 codes and scales: weight = codes * scale. Scales
are stored in the dtype of the model, because readers convert them to it, and the codes are rounded with the
stored scales. Only symmetric weights are written and read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal  # Any: the values of a config.json

import torch

from whet.errors import ModelError

METHOD = "compressed-tensors"
FLOAT8 = torch.float8_e4m3fn
_CHUNK = 2**22  # thresholds that `best_scales` sorts at once


@dataclass(frozen=True)
class Scheme:
    """How the linear weights of a model are quantized."""

    kind: Literal["float", "int"]
    bits: int
    strategy: Literal["tensor", "channel", "group"]
    group_size: int | None = None
    has_dynamic_activations: bool = False  # the inputs of the layers are rounded to float8, per token

    @property
    def packed(self) -> bool:
        """Whether codes are packed into int32.

        vLLM reads integer weights without quantized activations only in this layout, for 4 and for 8 bits:
        `int-quantized` selects its int8 matmuls, which need quantized activations.
        """
        return self.kind == "int" and not self.has_dynamic_activations

    @property
    def format(self) -> str:
        """The name of the layout in config.json."""
        return "pack-quantized" if self.packed else f"{self.kind}-quantized"

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        if self.kind == "float":
            largest = torch.finfo(FLOAT8).max
            return -largest, largest
        return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config of a model whose linear layers are all quantized except `ignore`."""
        weights = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": True,
            "strategy": self.strategy,
            "group_size": self.group_size,
            "dynamic": False,
        }
        activations = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations if self.has_dynamic_activations else None,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": METHOD,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a quantization_config.

    Raises:
        ModelError: If whet cannot dequantize its weights.
    """
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ModelError(f"{len(groups)} groups of quantized layers are not supported, only one")
    weights = groups[0]["weights"]
    scheme = Scheme(
        weights["type"],
        weights["num_bits"],
        weights["strategy"],
        weights.get("group_size"),
        has_dynamic_activations=bool(groups[0].get("input_activations")),
    )
    stored = groups[0].get("format") or config.get("format")
    supported = (
        weights.get("symmetric", True)
        and scheme.strategy in ("tensor", "channel", "group")
        and ((scheme.kind, scheme.bits) in (("float", 8), ("int", 8), ("int", 4)))
        and not weights.get("actorder")
    )
    if not supported or stored != scheme.format:
        raise ModelError(
            f"{scheme.bits}-bit {scheme.kind} weights with strategy {scheme.strategy} in the layout "
            f"{stored} are not supported"
        )
    return scheme


def quantize_weight(weight: torch.Tensor, scheme: Scheme, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight [out, in], by the end of their names.

    Scales follow from the largest magnitude. Those of int4 minimize the squared error instead.
    """
    groups = _grouped(weight.float(), scheme)  # [..., values with one scale]
    smallest, largest = scheme.limits
    if (scheme.kind, scheme.bits) == ("int", 4):
        exact = best_scales(groups.flatten(0, -2), bits=scheme.bits).view(groups.shape[:-1])
    else:
        exact = groups.abs().amax(-1) / largest
    scales = exact.to(dtype)
    scales = torch.where(scales == 0, 1, scales)  # all values are 0, or too small for the dtype
    codes = (groups / scales[..., None].float()).clamp(smallest, largest)
    stored_scales = scales.view(-1 if scheme.strategy == "tensor" else len(weight), *scales.shape[1:])
    if scheme.kind == "float":
        return {"weight": codes.to(FLOAT8).view(weight.shape), "weight_scale": stored_scales}
    integers = codes.round().to(torch.int32).view(weight.shape)
    return {
        "weight_packed": pack(integers, bits=scheme.bits),
        "weight_scale": stored_scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def dequantize_weight(stored: Mapping[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """Return the weight [out, in] in float32 from its stored tensors."""
    if scheme.packed:
        codes = unpack(stored["weight_packed"], bits=scheme.bits, columns=int(stored["weight_shape"][1]))
    else:
        codes = stored["weight"]
    groups = _grouped(codes.float(), scheme)
    return (groups * stored["weight_scale"].float().view(*groups.shape[:-1], 1)).view(codes.shape)


def _grouped(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the values of a weight [out, in], with those that share a scale in the last dimension."""
    if scheme.strategy == "tensor":
        return weight.reshape(1, -1)
    size = scheme.group_size if scheme.strategy == "group" else weight.shape[1]
    return weight.reshape(len(weight), -1, size or weight.shape[1])


def pack(codes: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return signed codes [out, in] as int32 [out, in * bits / 32], the first code in the lowest bits."""
    per_word = 32 // bits
    unsigned = (codes + 2 ** (bits - 1)).view(len(codes), -1, per_word).long()
    words = (unsigned << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: torch.Tensor, *, bits: int, columns: int) -> torch.Tensor:
    """Return the signed codes [out, columns] of the words that `pack` returns."""
    shifted = words[..., None] >> (bits * torch.arange(32 // bits, dtype=torch.int32))
    return ((shifted & (2**bits - 1)) - 2 ** (bits - 1)).view(len(words), -1)[:, :columns]


def best_scales(groups: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return the scale of each row of values [rows, n] with the least squared error after rounding.

    The result is exact. As the scale falls, the codes change one at a time: a value v gets the magnitude
    k + 1 below the threshold |v| / (k + 1/2). For given codes q, the best scale is <v, q> / <q, q>, with an
    error of <v, v> - <v, q>² / <q, q>. Sums over the sorted thresholds give the error for all possible codes.
    """
    levels = 2 ** (bits - 1)  # codes are in -levels ... levels - 1
    rows = max(1, _CHUNK // (groups.shape[1] * levels))
    return torch.cat([_best_scales(chunk, levels) for chunk in groups.split(rows)])


def _best_scales(groups: torch.Tensor, levels: int) -> torch.Tensor:
    magnitudes = groups.abs()[..., None]  # [rows, n, 1]
    steps = torch.arange(levels, device=groups.device)
    thresholds = (magnitudes / (steps + 0.5)).flatten(1)
    # only negative values have a code of magnitude `levels`: the last step of positive ones changes nothing
    counts = (steps < levels - 1) | (groups < 0)[..., None]
    order = thresholds.argsort(dim=1, descending=True)
    products = (magnitudes * counts).flatten(1).gather(1, order).cumsum(1)  # <v, q> after each change
    squares = ((2 * steps + 1) * counts).float().flatten(1).gather(1, order).cumsum(1)  # <q, q>
    best = (products.square() / squares.clamp(min=1)).argmax(1, keepdim=True)
    return (products.gather(1, best) / squares.gather(1, best).clamp(min=1)).squeeze(1)
