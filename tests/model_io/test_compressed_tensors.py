"""Quantized weights: rounding and scales against plain formulas, packing against the compressed-tensors library."""

import pytest
import torch

from whet.errors import ModelError
from whet.model_io.formats.compressed_tensors import (
    Scheme,
    best_scales,
    dequantize_weight,
    pack,
    quantize_weight,
    read_scheme,
    unpack,
)

FP8 = Scheme("float", 8, "channel", has_dynamic_activations=True)
SCHEMES = {
    "fp8": FP8,
    "fp8-tensor": Scheme("float", 8, "tensor", has_dynamic_activations=True),
    "int8": Scheme("int", 8, "channel"),
    "int4": Scheme("int", 4, "group", 32),
}


def heavy_tailed(*shape):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, generator=generator)
    return values * torch.where(torch.rand(*shape, generator=generator) < 0.02, 8.0, 1.0)


def squared_error(groups, scales):
    codes = (groups / scales[:, None]).round().clamp(-8, 7)
    return (codes * scales[:, None] - groups).square().sum(1)


def test_scales_of_int4_have_the_least_squared_error():
    groups = heavy_tailed(64, 32).double()
    groups[0] = 0
    groups[1, 1:] = 0
    groups[2] = groups[2].abs()  # no negative values, which have one more code
    ours = squared_error(groups, best_scales(groups, bits=4).clamp(min=1e-30))
    largest = groups.abs().amax(1).clamp(min=1e-30)
    tried = torch.stack([squared_error(groups, largest / f) for f in torch.linspace(0.9, 40, 8000)])
    best = tried.min(0).values
    assert (ours <= best + 1e-9).all()
    assert (ours[3:] < tried[1344][3:]).all()  # and less than with the largest magnitude / 7.5
    assert ours[0] == 0
    assert ours[1] < 1e-12


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_the_nearest_code(name, dtype):
    scheme, weight = SCHEMES[name], heavy_tailed(16, 64)
    weight[3] = 0
    weight[4] *= 1e-9  # scales that float16 cannot represent
    stored = quantize_weight(weight, scheme, dtype=dtype)
    again = dequantize_weight(stored, scheme)
    scale = stored["weight_scale"].float()
    assert stored["weight_scale"].dtype == dtype
    shape = {"fp8-tensor": (1,), "int4": (16, 2)}.get(name, (16, 1))
    assert tuple(stored["weight_scale"].shape) == shape
    steps = scale.repeat_interleave(64 // shape[-1], 1) if len(shape) > 1 else scale
    smallest, largest = scheme.limits
    limited = weight.clamp(smallest * steps, largest * steps)  # int4 may clip
    error = (again - limited).abs()
    if scheme.kind == "int":
        assert (error <= steps / 2 * 1.0001).all()
    else:  # 3 bits of mantissa, and subnormals with steps of 2^-9
        assert (error <= (limited.abs() / 16).maximum(steps * 2**-10) * 1.0001).all()
    assert again.isfinite().all()
    if name != "int4":
        assert ((weight - limited).abs() <= weight.abs() * 2**-8).all()  # only by the rounding of the scale


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_that_of_compressed_tensors(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 64))
    words = pack(codes, bits=bits)
    assert torch.equal(words, helpers.pack_to_int32(codes.to(torch.int8), bits))
    assert torch.equal(unpack(words, bits=bits, columns=64), codes)
    assert torch.equal(unpack(words, bits=bits, columns=60), codes[:, :60])


@pytest.mark.parametrize("name", SCHEMES)
def test_config_is_valid_for_compressed_tensors_and_is_read_again(name):
    config = SCHEMES[name].config(["lm_head"])
    assert read_scheme(config) == SCHEMES[name]
    library = pytest.importorskip("compressed_tensors.quantization")
    parsed = library.QuantizationConfig.model_validate(config)
    assert parsed.ignore == ["lm_head"]
    scheme = parsed.config_groups["group_0"]
    assert scheme.weights.strategy == SCHEMES[name].strategy
    assert (scheme.input_activations is not None) == name.startswith("fp8")


def with_weights(**fields):
    config = SCHEMES["int4"].config([])
    config["config_groups"]["group_0"]["weights"].update(fields)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_weights(symmetric=False), "4-bit int weights with strategy group"),
        (with_weights(num_bits=3), "3-bit int weights"),
        (with_weights(strategy="block"), "strategy block"),
        (with_weights(actorder="group"), "not supported"),
        ({**SCHEMES["int4"].config([]), "config_groups": {"a": {}, "b": {}}}, "2 groups of quantized layers"),
        (
            {"config_groups": {"a": {**FP8.config([])["config_groups"]["group_0"], "format": "mxfp4"}}},
            "mxfp4",
        ),
    ],
)
def test_unsupported_schemes_are_refused(config, message):
    with pytest.raises(ModelError, match=message):
        read_scheme(config)
