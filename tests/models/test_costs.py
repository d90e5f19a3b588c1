"""Parameter counts and FLOPs of a spec match the modules and torch's FLOP counter."""

import pytest
import torch
from test_decoder import MODELS, model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from whet.models.costs import flops_per_token, forward_flops, parameter_counts, tokens_per_second
from whet.models.decoder import Decoder
from whet.models.from_scratch.presets import PRESETS, preset_spec

PARTS = {"embed_tokens": "embedding", "embed_positions": "positions", "lm_head": "head"}


def part_of(name):
    """Return the part that a parameter belongs to, by its name."""
    if "norm" in name:
        return "norms"
    return (
        "attention" if "self_attn" in name else "feedforward" if "mlp" in name else PARTS[name.split(".")[0]]
    )


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_match_the_modules(name):
    blocks, settings = MODELS[name]
    decoder = model(blocks, **settings)
    counted = dict.fromkeys(parameter_counts(decoder.spec), 0)
    for parameter_name, parameter in decoder.named_parameters():
        counted[part_of(parameter_name)] += parameter.numel()
    assert parameter_counts(decoder.spec) == counted


@pytest.mark.parametrize("name", MODELS)
def test_flops_match_torchs_counter(name, monkeypatch):
    # torch's counter does not support grouped_mm, but counts the loop
    monkeypatch.setattr("whet.ops.grouped_experts.grouped_mm_problem", lambda *_: "counted")
    blocks, settings = MODELS[name]
    decoder = model(blocks, **settings)
    tokens = torch.randint(0, 50, (1, 24))
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):  # the counter does not support fused CPU kernels
        decoder(tokens)
    assert sum(forward_flops(decoder.spec, 24, visible_only=False).values()) == counter.get_total_flops()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_counted_without_being_built(name):
    spec = preset_spec(name)
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in Decoder(spec).parameters())
    assert sum(parameter_counts(spec).values()) == total
    # rule of thumb: two FLOPs per parameter and token, with a tied embedding counted once (as the head)
    flops, active = flops_per_token(spec, 1), parameter_counts(spec, active=True)
    assert flops == pytest.approx(2 * (sum(active.values()) - active["positions"]), rel=0.03)
    assert (sum(active.values()) == total) == (not spec.expert_specs)


def test_only_visible_pairs_are_counted():
    for window in (None, 1, 3, 50):
        spec = preset_spec("nano", layers=1, attention="window" if window else "grouped", window=window)
        length, heads, size = 10, 4, 32
        pairs = sum(
            1 for q in range(length) for k in range(length) if k <= q and (not window or q - k < window)
        )
        assert forward_flops(spec, length)["scores"] == 2 * 2 * heads * size * pairs


def test_throughput_follows_from_flops():
    spec = preset_spec("llama-135m")
    speed = tokens_per_second(spec, 2048, flops_per_s=1e12, utilisation=0.5)
    assert speed == pytest.approx(0.5e12 / (3 * flops_per_token(spec, 2048)))
    assert tokens_per_second(spec, 2048, flops_per_s=1e12, utilisation=0.5, training=False) == pytest.approx(
        3 * speed
    )
