"""Presets: sizes, layer patterns, weight initialization, and loading of saved models."""

import json
import math

import pytest
import torch

import whet
from whet.errors import ModelError
from whet.models.costs import parameter_counts
from whet.models.decoder import Decoder
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import (
    ATTENTIONS,
    FEEDFORWARDS,
    LETTERS,
    POSITIONS,
    PRESETS,
    preset_spec,
)
from whet.models.spec import LatentAttentionSpec

SIZES = {
    "nano": 935_040,
    "micro": 10_059_840,
    "nano-moe": 2_561_152,  # 939,136 active per token
    "gpt2-small": 124_439_808,  # OpenAI's
    "llama-135m": 134_515_008,  # SmolLM2-135M
    "llama-360m": 361_821_120,  # SmolLM2-360M
    "llama-1b": 1_235_814_400,  # Llama-3.2-1B
}


def test_parameter_count_of_every_preset():
    assert SIZES.keys() == PRESETS.keys()
    for name, size in SIZES.items():
        with torch.device("meta"):
            decoder = Decoder(preset_spec(name))
        assert sum(parameter.numel() for parameter in decoder.parameters()) == size, name


def test_nano_moe_has_as_many_active_parameters_as_nano():
    active = sum(parameter_counts(preset_spec("nano-moe"), active=True).values())
    routers = 4 * 8 * 128
    assert active == SIZES["nano"] + routers == 939_136


def test_pattern_repeats_over_the_layers():
    spec = preset_spec("nano", layers=8, pattern="wgnlaf*", window=7)
    kinds = [
        "latent" if isinstance(a := block.attention, LatentAttentionSpec)
        else None if a is None else (a.window, a.rope is not None)
        for block in spec.blocks
    ]  # fmt: skip
    full = (None, True)
    assert kinds == [(7, True), full, (None, False), "latent", full, None, full, (7, True)]
    assert [block.feedforward is None for block in spec.blocks] == [False] * 4 + [True] + [False] * 3


VARIANTS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "windows": {"attention": "window", "window": 5},
    "some-windows": {"pattern": "wg", "window": 5},
    "some-without-rope": {"pattern": "gn"},
    "wide-heads": {"head_dim": 16},
    "untied-geglu": {"tied_head": False, "feedforward": "geglu"},
    "bias": {"bias": True},
    "gpt": {"positions": "learned", "feedforward": "gelu_tanh", "norm": "layer", "bias": True, "fused": True},
    "latent": {"attention": "latent"},
    "alibi": {"positions": "alibi", "norm": "layer"},
    "sinusoidal-relu2": {"positions": "sinusoidal", "feedforward": "relu2"},
    "post": {"placement": "post"},
    "sandwich": {"placement": "sandwich"},
    "parts-missing": {"pattern": "af"},
    "no-norm": {"norm": "none"},
    "experts": {"experts": 4, "top_k": 3},
    "experts-shared": {"experts": 4, "shared_experts": 1},
    "experts-sigmoid-bias": {"experts": 4, "router": "sigmoid", "balance_bias": True},
}
WHET_ONLY = (
    "latent",
    "alibi",
    "sinusoidal-relu2",
    "post",
    "sandwich",
    "parts-missing",
    "no-norm",
    "experts-shared",
    "experts-sigmoid-bias",
)
SMALL = {"d_model": 32, "layers": 2, "heads": 4, "width": 48, "vocab_size": 60, "max_positions": 64}


@pytest.mark.parametrize("name", VARIANTS)
def test_new_model_is_saved_and_loaded(name, tmp_path):
    """whet can always load it, and transformers if one of its families can describe it."""
    from transformers import AutoModelForCausalLM

    spec = preset_spec("nano", **SMALL, **VARIANTS[name])
    ours = new_decoder(spec, seed=3).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whet.save(ours, None, tmp_path / "saved")
    tokens = torch.randint(0, 60, (2, 20))
    loaded, _ = whet.load(tmp_path / "saved", dtype=torch.float32, device="cpu")
    assert loaded.spec == spec
    assert all(map(torch.equal, loaded.state_dict().values(), ours.state_dict().values()))
    # weights in a file are not aligned as torch aligns memory, so that kernels may sum in another order
    torch.testing.assert_close(loaded(tokens), ours(tokens), rtol=0, atol=1e-6)
    model_type = json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"]
    assert (model_type == "whet") == (name in WHET_ONLY)
    if model_type != "whet":
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=2e-4)


def test_initial_weights_follow_the_rule_and_the_seed():
    spec = preset_spec("nano", positions="learned", norm="layer", bias=True)
    decoder = new_decoder(spec, seed=1)
    state = decoder.state_dict()
    residual = 0.02 / math.sqrt(8)  # four layers, two additions each
    for name, std in (
        ("embed_tokens.weight", 0.02),
        ("embed_positions.weight", 0.01),
        ("layers.0.self_attn.q_proj.weight", 0.02),
        ("layers.3.self_attn.o_proj.weight", residual),
        ("layers.2.mlp.down_proj.weight", residual),
        ("layers.2.mlp.up_proj.weight", 0.02),
    ):
        assert state[name].std().item() == pytest.approx(std, rel=0.03), name
        assert abs(state[name].mean().item()) < std / 20, name
    assert (state["layers.0.input_layernorm.weight"] == 1).all()
    assert (state["layers.0.self_attn.q_proj.bias"] == 0).all()
    same_seed, other_seed = new_decoder(spec, seed=1).state_dict(), new_decoder(spec, seed=2).state_dict()
    assert all(torch.equal(tensor, same_seed[name]) for name, tensor in state.items())
    assert not torch.equal(state["embed_tokens.weight"], other_seed["embed_tokens.weight"])
    # the loss of an untrained model is that of a uniform guess
    logits = decoder(torch.randint(0, 1024, (1, 64)))
    assert torch.nn.functional.cross_entropy(
        logits[0], torch.randint(0, 1024, (64,))
    ).item() == pytest.approx(math.log(1024), abs=0.2)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("pico", {}, "unknown preset 'pico'\n  hint: known: nano, micro"),
        ("nano", {"depth": 3}, "unknown model key 'depth'"),
        ("nano", {"pattern": "gx"}, f"unknown pattern letter 'x'\n  hint: known: {', '.join(LETTERS)}"),
        ("nano", {"attention": "linear"}, f"unknown attention 'linear'\n  hint: known: {', '.join(ATTENTIONS)}"),
        ("nano", {"feedforward": "moe"}, f"unknown feedforward 'moe'\n  hint: known: {', '.join(FEEDFORWARDS)}"),
        ("nano", {"positions": "gps"}, f"unknown positions 'gps'\n  hint: known: {', '.join(POSITIONS)}"),
        ("nano", {"heads": 5}, "d_model=128 is not a multiple of heads=5"),
        ("nano", {"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ("nano", {"pattern": "w"}, "windowed attention needs a window size"),
        ("nano", {"window": 16}, "window requires layers with attention: window"),
        ("nano", {"window": 16, "pattern": "gw", "layers": 1}, "window requires layers with attention: window"),
        ("nano", {"attention": "window", "window": 16, "kv_rank": 8}, "kv_rank requires layers with attention: latent"),
        ("nano", {"balance_bias": True}, "balance_bias requires a model with experts"),
        ("nano-moe", {"top_k": 9}, "top_k=9 is larger than the number of experts (8)"),
        ("nano-moe", {"feedforward": "gelu"}, "experts must be gated and have no bias"),
        ("nano-moe", {"router": "tanh"}, "unknown expert scoring 'tanh'"),
        ("nano", {"layers": 0}, "layers=0 must be positive"),
    ],
)  # fmt: skip
def test_invalid_shape_is_explained(name, changes, message):
    with pytest.raises(ModelError) as caught:
        preset_spec(name, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda spec: spec.pop("d_model"), "spec has the fields"),
        (lambda spec: spec.update(vocab_size="many"), "spec.vocab_size='many'"),
        (lambda spec: spec.update(blocks=3), "spec.blocks must be a list"),
        (
            lambda spec: spec["blocks"][0]["attention"].update(kv_rank=1.5),
            "spec.blocks[0].attention.kv_rank=1.5",
        ),
    ],
)
def test_invalid_spec_error_names_the_field(corrupt, message, tmp_path):
    whet.save(new_decoder(preset_spec("nano", **SMALL, attention="latent"), seed=0), None, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    corrupt(config["spec"])
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        whet.load(tmp_path / "m")
    assert message in str(caught.value)
