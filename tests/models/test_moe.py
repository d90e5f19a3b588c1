"""Mixtures of experts match a float64 formula and DeepSeek-V3 of transformers, and routing is recorded."""

import copy
import json

import pytest
import torch
from test_decoder import EXPERTS, mixture
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

import whet
from whet.errors import ModelError
from whet.models.feedforward import ACTIVATIONS
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.models.moe import MixtureOfExperts, balance_biases, moe_layers, record_routing, route
from whet.models.spec import ExpertsSpec


def layer(spec, dtype=torch.float64):
    torch.manual_seed(0)
    mixture_layer = MixtureOfExperts(spec, d_model=32).to(dtype)
    for tensor in mixture_layer.state_dict().values():
        tensor.normal_(std=0.3)
    return mixture_layer


def definition(mixture_layer, x):
    """Compute the layer from its definition, token by token and expert by expert."""
    spec, act = mixture_layer.spec, ACTIVATIONS[mixture_layer.spec.activation]
    rows = []
    for row in x:
        logits = mixture_layer.gate.weight @ row
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        bias = getattr(mixture_layer, "expert_bias", torch.zeros_like(scores))
        chosen = (scores + bias).argsort(descending=True)[: spec.top_k]
        weights = scores[chosen] / scores[chosen].sum() if spec.renormalise else scores[chosen]
        y = torch.zeros_like(row)
        for expert, weight in zip(chosen, weights * spec.scale, strict=True):
            gate, up = (mixture_layer.experts.gate_up_proj[expert] @ row).chunk(2)
            y = y + weight * (mixture_layer.experts.down_proj[expert] @ (act(gate) * up))
        if spec.shared:
            shared = mixture_layer.shared_experts
            y = y + shared.down_proj.weight @ (
                act(shared.gate_proj.weight @ row) * (shared.up_proj.weight @ row)
            )
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("name", EXPERTS)
def test_mixture_matches_its_definition(name):
    mixture_layer = layer(mixture(name))
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    outputs, expected = mixture_layer(x), definition(mixture_layer, x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(outputs, expected)
    upstream = torch.randn_like(x)
    inputs = [x, *mixture_layer.parameters()]
    for a, b in zip(
        torch.autograd.grad(outputs, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_grouped_kernel_matches_float64():
    spec = ExpertsSpec(experts=6, top_k=2, width=24, shared=1)
    narrow, wide = layer(spec, torch.float32), layer(spec)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(50, 32)
    a, b = x.requires_grad_(), x.detach().double().requires_grad_()
    ya, yb = narrow(a), wide(b)
    torch.testing.assert_close(ya.double(), yb, rtol=1e-4, atol=1e-5)
    ya.square().sum().backward()
    yb.square().sum().backward()
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-3, atol=1e-4)
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoid_scores_shared_experts_and_bias_match_deepseek(renormalise):
    config = DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
        n_group=1, topk_group=1, norm_topk_prob=renormalise, routed_scaling_factor=2.5,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = DeepseekV3MoE(config)
    spec = ExpertsSpec(
        experts=6, top_k=2, width=16, scoring="sigmoid", renormalise=renormalise, scale=2.5, shared=2, balance_bias=True
    )  # fmt: skip
    ours = layer(spec, torch.float32)
    state = {
        name.replace("expert_bias", "gate.e_score_correction_bias"): t
        for name, t in ours.state_dict().items()
    }
    theirs.load_state_dict(state)
    x = torch.randn(2, 15, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    ours.expert_bias.zero_()
    assert not torch.allclose(ours(x), theirs(x), atol=1e-2), "the bias must change the choice"


def test_bias_affects_only_the_selection():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    spec = ExpertsSpec(experts=4, top_k=1, width=1, scoring="sigmoid", renormalise=False, balance_bias=True)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0], requires_grad=True)
    chosen, weights = route(logits, spec, bias)
    assert chosen.tolist() == [[3]]
    assert weights.tolist() == [[0.5]]
    assert not weights.requires_grad


def test_each_forward_with_gradients_is_recorded_once(monkeypatch):
    model = new_decoder(preset_spec("nano-moe", layers=2), seed=0).train()
    tokens = torch.randint(0, 100, (2, 12))
    model.grad_checkpoint = True
    with record_routing(moe_layers(model)) as records:
        hidden = model.hidden(tokens)
        with torch.no_grad():
            model.hidden(tokens)
    hidden.sum().backward()  # recomputes the layers
    assert [len(record) for record in records] == [1, 1]
    assert all(layer.routing_records is None for layer in moe_layers(model))
    with torch.no_grad():
        model.hidden(tokens)


def test_gradients_through_recorded_logits_work_with_checkpointing():
    """Auxiliary losses need this gradient. It equals the gradient without checkpointing."""
    gradients = []
    for recompute in (False, True):
        model = new_decoder(preset_spec("nano-moe", layers=2), seed=0).train()
        model.grad_checkpoint = recompute
        with record_routing(moe_layers(model)) as records:
            hidden = model.hidden(torch.arange(24).view(2, 12))
        (hidden.square().mean() + sum(r[0].logits.logsumexp(-1).square().mean() for r in records)).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_model_with_all_expert_features_is_saved_and_loaded(tmp_path):
    spec = preset_spec("nano-moe", layers=2, router="sigmoid", shared_experts=1, balance_bias=True)
    assert spec.family == "whet"
    model = new_decoder(spec, seed=0).eval()
    for moe_layer in moe_layers(model):
        moe_layer.expert_bias.normal_()
    whet.save(model, None, tmp_path / "saved")
    loaded, _ = whet.load(tmp_path / "saved", dtype=torch.float32, device="cpu")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))
        for moe_layer in moe_layers(loaded):
            moe_layer.expert_bias.zero_()
        assert not torch.equal(loaded(tokens), model(tokens)), "the bias must change the output"


def test_fused_expert_tensors_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    model = new_decoder(preset_spec("nano-moe", layers=2), seed=0).eval()
    whet.save(model, None, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.layers.1.block_sparse_moe.experts.7.w2.weight" in names
    assert not any("gate_up" in name for name in names)
    fused = {model.hf_name(name): tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(torch.arange(9)[None]), model(torch.arange(9)[None]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop("model.layers.0.block_sparse_moe.experts.3.w1.weight"), "missing: .*experts.3.w1"),
        (lambda t, c: t.update({"model.layers.0.block_sparse_moe.experts.8.w1.weight": torch.zeros(1)}), "unexpected"),
        (lambda t, c: t.update({"model.layers.0.block_sparse_moe.experts.3.w1.weight": torch.zeros(4, 4)}), "wrong shape"),
        (lambda t, c: c.update(num_local_experts=10**9), "missing"),
        (lambda t, c: c.update(num_experts_per_tok=9), "top_k=9 is larger than the number of experts"),
        (lambda t, c: c.update(num_local_experts="many"), "num_local_experts='many' is not an integer"),
    ],
)  # fmt: skip
def test_mismatched_files_raise_errors(tmp_path, change, message):
    from safetensors.torch import load_file, save_file

    whet.save(new_decoder(preset_spec("nano-moe", layers=1), seed=0), None, tmp_path)
    tensors, config = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    change(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        whet.load(tmp_path, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"top_k": 5}, "top_k=5 is larger"), ({"experts": 0}, "experts=0"), ({"scoring": "tanh"}, "unknown expert scoring"),
     ({"shared": -1}, "must not be negative")],
)  # fmt: skip
def test_invalid_mixture_is_explained(settings, message):
    with pytest.raises(ModelError, match=message):
        ExpertsSpec(**{"experts": 4, "top_k": 2, "width": 8, **settings})


def test_expert_bias_stays_in_float32():
    spec = preset_spec("nano-moe", balance_bias=True)
    model = new_decoder(spec, seed=0)
    for bias in balance_biases(model).values():
        bias.fill_(0.501)
    for moved in (model.to(torch.bfloat16), copy.deepcopy(model).to("cpu", torch.bfloat16)):
        biases = balance_biases(moved)
        assert len(biases) > 0
        for bias in biases.values():
            assert bias.dtype == torch.float32
            assert torch.equal(bias, torch.full_like(bias, 0.501))
        assert moved(torch.arange(8)[None]).dtype == torch.bfloat16
