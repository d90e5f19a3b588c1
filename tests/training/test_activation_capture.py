"""Attention maps and captured activations match transformers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import whet
from tiny import write_tiny_model
from whet.errors import ConfigError, DataError, ModelError
from whet.evaluation.linear_probe import LinearProbe
from whet.model_io.load_transformers import load_bridge
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.training.observe.activation_capture import ActivationCapture
from whet.training.observe.attention_maps import attention_maps

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
CLOSE = 2e-6  # transformers turns and normalises in float32, whatever the weights are
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "attn_logit_softcapping": 1.5,
    },
    "qwen3": {"head_dim": 12},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}


def save_reference(directory, kind, **keys):
    torch.manual_seed(0)
    given = keys if kind == "gpt2" else {**COMMON, **keys}
    config = AutoConfig.for_model(kind, **{"vocab_size": 97, **given})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    model.save_pretrained(directory)
    return model


def rows(count=2, length=11):
    return torch.randint(3, 97, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", FAMILIES)
def test_attention_maps_match_transformers(tmp_path, kind):
    """Covers grouped heads, windows, capped scores, and norms of queries and keys."""
    reference = save_reference(tmp_path, kind, **FAMILIES[kind])
    model, _ = whet.load(tmp_path, dtype=torch.float64, device="cpu")
    tokens = rows()
    before = model(tokens)
    actual = attention_maps(model, tokens)
    expected = reference(tokens, output_attentions=True).attentions
    assert list(actual) == [0, 1, 2]
    for layer, weights in actual.items():
        assert weights.shape == (2, 4, 11, 11)
        torch.testing.assert_close(weights, expected[layer], rtol=1e-4, atol=CLOSE)
    assert torch.equal(model(tokens), before), "looking changes nothing"


def test_latent_attention_maps():
    """Compute queries and keys by DeepSeek's formula: a part from the latent, and a rotary part that heads share."""
    spec = preset_spec("nano", attention="latent", d_model=32, heads=2, layers=1)
    model = new_decoder(spec, seed=0).double().eval()
    tokens = rows(length=7)
    [(_, weights)] = attention_maps(model, tokens).items()
    attention, a = model.layers[0].self_attn, spec.blocks[0].attention
    with ActivationCapture(model, ["layers.0.self_attn"]) as captured:
        model(tokens)
    x = captured.inputs["layers.0.self_attn"]
    queries = attention._queries(x).unflatten(-1, (a.heads, -1)).transpose(1, 2)
    latent, shared = attention.kv_a_proj_with_mqa(x).split((a.kv_rank, a.rope_dim), -1)
    plain = attention.kv_b_proj(attention.kv_a_layernorm(latent)).unflatten(-1, (a.heads, -1))[
        ..., : a.plain_dim
    ]

    def turned(part):  # halves as the two coordinates of a plane, turned by position * frequency
        half = a.rope_dim // 2
        angles = torch.arange(7.0, dtype=torch.float64)[:, None] * a.rope.theta ** (
            -torch.arange(half).double() / half
        )
        left, right = part[..., :half], part[..., half:]
        return torch.cat(
            (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1
        )

    scores = queries[..., : a.plain_dim] @ plain.transpose(1, 2).transpose(-1, -2)
    scores = scores + turned(queries[..., a.plain_dim :]) @ turned(shared)[:, None].transpose(-1, -2)
    scores = scores / (a.plain_dim + a.rope_dim) ** 0.5
    expected = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_attention_maps_of_bridge_models(tmp_path):
    reference = save_reference(tmp_path, "gpt_neox", initializer_range=0.3)
    bridge = load_bridge(tmp_path, dtype=torch.float64, device=torch.device("cpu"))
    before = bridge.model.config._attn_implementation
    assert before == "sdpa"
    expected = reference(rows(), output_attentions=True).attentions
    for layer, weights in attention_maps(bridge, rows()).items():
        torch.testing.assert_close(weights, expected[layer], rtol=1e-4, atol=CLOSE)
    assert bridge.model.config._attn_implementation == before
    with ActivationCapture(bridge) as captured:
        bridge(rows())
    assert list(captured.outputs) == [f"model.gpt_neox.layers.{n}" for n in range(3)]


def test_models_without_attention_have_no_maps(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}
    config = AutoConfig.for_model("mamba", vocab_size=97, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    bridge = load_bridge(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ModelError, match="does not return attention weights"):
        attention_maps(bridge, rows())


def test_attention_maps_need_two_dimensions(tiny):
    with pytest.raises(DataError, match=r"tokens of shape \[B, T\]"):
        attention_maps(tiny[0], torch.tensor([1, 2]))


def test_captured_tensors_are_module_outputs(tmp_path):
    write_tiny_model(tmp_path, num_hidden_layers=12)
    model, _ = whet.load(tmp_path, dtype=torch.float64, device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = rows()
    with ActivationCapture(model) as captured:
        model(tokens)
    assert list(captured.outputs) == [f"layers.{n}" for n in range(12)], "in numeric order"
    states = reference(tokens, output_hidden_states=True).hidden_states
    for n in range(11):  # the last of these states is after the final norm
        torch.testing.assert_close(captured.inputs[f"layers.{n}"], states[n], rtol=1e-4, atol=CLOSE)
        torch.testing.assert_close(captured.outputs[f"layers.{n}"], states[n + 1], rtol=1e-4, atol=CLOSE)
    assert captured.norms()["layers.0"] == pytest.approx(states[1].square().mean().sqrt().item())
    with ActivationCapture(model, ["layers.1*.mlp", "norm"], keep=lambda x: x.mean(1)) as captured:
        model(tokens)
    assert list(captured.outputs) == ["layers.1.mlp", "layers.10.mlp", "layers.11.mlp", "norm"]
    assert captured.outputs["norm"].shape == (2, 32)
    assert not any(module._forward_hooks for module in model.modules()), "nothing is left behind"


def test_capture_ends_on_error(tiny):
    model, _ = tiny
    with pytest.raises(ZeroDivisionError), ActivationCapture(model):
        1 / 0  # noqa: B018
    assert not any(module._forward_hooks for module in model.modules())


def test_unknown_module_names_are_errors(tiny):
    with pytest.raises(ConfigError, match="did you mean 'layers.0.mlp'"):
        ActivationCapture(tiny[0], ["layers.0.mlpp"])
    with pytest.raises(ConfigError, match="has no layers to capture"):
        ActivationCapture(torch.nn.Linear(2, 2))


def test_linear_probe_on_captured_activations(tiny):
    """The first token, 5 or 6, can be read from the first position of every layer."""
    pytest.importorskip("sklearn")
    model, _ = tiny
    tokens = torch.randint(10, 200, (80, 6), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(80) % 2
    tokens[:, 0] = 5 + labels
    with torch.no_grad(), ActivationCapture(model, keep=lambda x: x[:, 0]) as captured:
        model(tokens)
    for features in captured.outputs.values():
        probe = LinearProbe().fit(features[:60].numpy(), labels[:60].numpy())
        assert probe.accuracy(features[60:].numpy(), labels[60:].numpy()) == 1.0
    shuffled = labels[torch.randperm(80, generator=torch.Generator().manual_seed(3))]
    assert (
        LinearProbe()
        .fit(features[:60].numpy(), shuffled[:60].numpy())
        .accuracy(features[60:].numpy(), shuffled[60:].numpy())
        < 0.9
    )
