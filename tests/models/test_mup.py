"""muP matches the table of the paper, and a transformer in plain PyTorch."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import whet
from whet.config.optim import MuP, Optim
from whet.errors import ConfigError
from whet.models.decoder import Decoder
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.mup import check_mup_multipliers, with_mup_multipliers
from whet.models.from_scratch.presets import preset_spec
from whet.training.optim.optimizers import create_optimizer, masked_step
from whet.training.optim.param_groups import hidden_matrices

RATIO = 4
BASE = MuP(base_width=16)
WIDE = {"layers": 1, "d_model": 64, "heads": 4, "width": 96, "vocab_size": 31, "max_positions": 32}

# Tensor Programs V, table 8, for a width 4 times the base: factors on the initial standard deviation and on the
# learning rates of Adam and SGD. The factors of Muon and of routers are derived in docs/mup.md.
INPUT = {"std": 1, "adam": 1, "sgd": 4, "muon": 1}
HIDDEN = {"std": 1 / 2, "adam": 1 / 4, "sgd": 1, "muon": 1 / 2}
OUTPUT = {"std": 1, "adam": 1, "sgd": 4, "muon": 1}
ROUTER = {"std": 1 / 4, "adam": 1 / 4, "sgd": 1 / 4, "muon": 1 / 4}
STACKED = {**HIDDEN, "muon": 1 / 4}  # experts are stacks of matrices, which AdamW updates

TABLE = {
    "embed_tokens.weight": INPUT,
    "embed_positions.weight": INPUT,
    "lm_head.weight": OUTPUT,
    "norm.weight": INPUT,
    "norm.bias": INPUT,
    "layers.0.input_layernorm.weight": INPUT,
    "layers.0.input_layernorm.bias": INPUT,
    "layers.0.post_attention_layernorm.weight": INPUT,
    "layers.0.post_attention_layernorm.bias": INPUT,
    **{f"layers.0.self_attn.{part}_proj.weight": HIDDEN for part in ("q", "k", "v", "qkv", "o")},
    **{f"layers.0.self_attn.{part}_proj.bias": INPUT for part in ("q", "k", "v", "qkv", "o")},
    **{f"layers.0.mlp.{part}_proj.weight": HIDDEN for part in ("gate", "up", "down")},
    **{f"layers.0.mlp.{part}_proj.bias": INPUT for part in ("gate", "up", "down")},
    "layers.0.mlp.gate.weight": ROUTER,
    "layers.0.mlp.experts.gate_up_proj": STACKED,
    "layers.0.mlp.experts.down_proj": STACKED,
    **{f"layers.0.mlp.shared_experts.{part}_proj.weight": HIDDEN for part in ("gate", "up", "down")},
}

SHAPES = {
    "llama-tied": {},
    "llama-untied": {"tied_head": False, "kv_heads": 2},
    "gpt2": {"norm": "layer", "bias": True, "positions": "learned", "feedforward": "gelu", "fused": True},
    "experts": {"experts": 4, "shared_experts": 1},
}


def wide(shape, **mup):
    spec = preset_spec("nano", mup=MuP(base_width=16, **mup), **WIDE, **SHAPES[shape])
    return new_decoder(spec, seed=0, width_ratio=RATIO)


@pytest.mark.parametrize("shape", SHAPES)
def test_initial_weights_follow_the_table(shape):
    """Weights equal those without muP times the factors of the table, because both use the same generator."""
    without_mup = new_decoder(preset_spec("nano", **WIDE, **SHAPES[shape]), seed=0).state_dict()
    for name, p in wide(shape).named_parameters():
        factor = TABLE[name]["std"] if p.dim() > 1 else 1
        torch.testing.assert_close(p.detach(), without_mup[name] * factor, rtol=1e-6, atol=0)


def lr_factors(model, section):
    """Return each parameter's learning rate factor, and its weight decay per step at a learning rate of 1."""
    by_id = {id(p): name for name, p in model.named_parameters()}
    groups = create_optimizer(section, model).param_groups
    scales = {by_id[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    losses = {
        by_id[id(p)]: group["lr_scale"] * group["weight_decay"] for group in groups for p in group["params"]
    }
    return scales, losses


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "muon", "lion"])
def test_learning_rates_follow_the_table(shape, name):
    model = wide(shape)
    scales, _ = lr_factors(model, Optim(name=name, mup=BASE))
    column = {"sgd": "sgd", "muon": "muon"}.get(name, "adam")
    assert scales == {parameter: TABLE[parameter][column] for parameter, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion"])
def test_weight_decay_is_the_same_at_every_width(name):
    """A step decays by lr * weight_decay, which muP's factor on the learning rate must not change."""
    model = wide("llama-untied")
    section = Optim(name=name, weight_decay=0.2, groups={"o_proj": {"lr_scale": 0.5, "weight_decay": 0.3}})
    _, without_mup = lr_factors(model, section)
    _, mup = lr_factors(model, section.model_copy(update={"mup": BASE}))
    assert mup == pytest.approx(without_mup)
    assert sum(value > 0 for value in mup.values()) == 8  # the matrices of the layer, and the head


def test_custom_group_multiplies_the_mup_factor():
    scales, _ = lr_factors(
        wide("llama-tied"), Optim(mup=BASE, groups={"mlp": {"lr_scale": 0.5}, "embed": {"lr_scale": 3}})
    )
    assert scales["layers.0.mlp.up_proj.weight"] == 0.5 / 4
    assert scales["embed_tokens.weight"] == 3
    assert scales["layers.0.self_attn.q_proj.weight"] == 1 / 4


def test_scores_and_logits_are_scaled():
    spec = wide("llama-tied").spec
    assert spec.logit_scale == 1 / 4
    assert spec.blocks[0].attention.scale == 4**0.5 / 16  # heads of 16 channels, of 4 at the base
    assert wide("llama-tied", base_head_dim=16).spec.blocks[0].attention.scale is None
    assert wide("llama-tied", base_head_dim=1).spec.blocks[0].attention.scale == 1 / 16


def test_at_the_base_width_nothing_changes():
    without_mup = preset_spec("nano", **WIDE)
    assert preset_spec("nano", mup=MuP(base_width=64), **WIDE) == without_mup
    model = new_decoder(without_mup, seed=0)
    section = Optim(name="adamw", weight_decay=0.1)
    groups = create_optimizer(section, model).param_groups
    mup = create_optimizer(section.model_copy(update={"mup": MuP(base_width=64)}), model).param_groups
    for plain_group, mup_group in zip(groups, mup, strict=True):
        assert {**plain_group, "params": list(map(id, plain_group["params"]))} == {
            **mup_group,
            "params": list(map(id, mup_group["params"])),
        }


def reference_logits(w, tokens):
    """Compute a one-layer llama with muP's factors in plain PyTorch."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rotate(x):  # [B, heads, T, 16]
        angles = torch.arange(x.shape[2])[:, None] * 10_000.0 ** (-torch.arange(8) / 8)
        a, b = x[..., :8], x[..., 8:]
        cos, sin = angles.cos().double(), angles.sin().double()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x = w["embed_tokens.weight"][tokens]
    h = norm(x, w["layers.0.input_layernorm.weight"])
    q, k, v = (
        (h @ w[f"layers.0.self_attn.{n}_proj.weight"].T).unflatten(-1, (4, 16)).transpose(1, 2) for n in "qkv"
    )
    scores = rotate(q) @ rotate(k).mT / 16 * math.sqrt(4)  # 1/d, equal to 1/sqrt(d) at the base width
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = x + attended @ w["layers.0.self_attn.o_proj.weight"].T
    h = norm(x, w["layers.0.post_attention_layernorm.weight"])
    gate, up = (h @ w[f"layers.0.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    x = x + (F.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["embed_tokens.weight"].T / 4


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_match_a_plain_pytorch_reference(name, masked):
    """Logits, and weights after four updates, in float64."""
    model = wide("llama-tied").double()
    section = Optim(name=name, lr=0.02, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, momentum=0.8, mup=BASE)
    optimizer = create_optimizer(section, model)
    w = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    state = {key: [torch.zeros_like(p), torch.zeros_like(p)] for key, p in w.items()}
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))
    for t in range(1, 5):
        ours, theirs = model(tokens), reference_logits(w, tokens)
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
        for logits in (ours, theirs):
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if masked:
            masked_step(optimizer, lr=0.02, skip=torch.tensor(0.0))
        else:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for key, p in w.items():
                lr = 0.02 * TABLE[key]["sgd" if name == "sgd" else "adam"]
                decays = p.dim() > 1 and key != "embed_tokens.weight"
                first, second = state[key]
                if name == "sgd":
                    p.grad += 0.1 * decays * p
                    first.mul_(0.8).add_(p.grad)
                    p.sub_(lr * first)
                else:
                    p.mul_(1 - 0.02 * 0.1 * decays)  # decay uses the scheduled learning rate
                    first.lerp_(p.grad, 0.1)
                    second.lerp_(p.grad.square(), 0.05)
                    size = (second / (1 - 0.95**t)).sqrt() + 1e-4 / 4  # epsilon scales with the gradients
                    p.sub_(lr * (first / (1 - 0.9**t)) / size)
                p.grad = None
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), w[key].detach(), rtol=1e-7, atol=1e-9)


def test_muon_step_changes_outputs_equally_at_every_width():
    """The spectral norm of an update scales with sqrt(outputs / inputs)."""
    update_norms = {}
    for width in (32, 128):
        spec = preset_spec("nano", **{**WIDE, "d_model": width, "width": 2 * width})
        model = new_decoder(spec, seed=0, width_ratio=width / 16)
        optimizer = create_optimizer(Optim(name="muon", lr=0.1, mup=BASE), model)
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        torch.manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        masked_step(optimizer, lr=0.1, skip=torch.tensor(0.0))
        matrices = hidden_matrices(model)
        update_norms[width] = {
            key: float(torch.linalg.matrix_norm(p.detach() - before[key], 2) / (len(p) / p.shape[1]) ** 0.5)
            for key, p in model.named_parameters()
            if id(p) in matrices
        }
    assert len(update_norms[32]) == 7
    for key, size in update_norms[32].items():
        assert update_norms[128][key] == pytest.approx(size, rel=0.25), (
            key
        )  # Newton-Schulz reaches 1 only approximately


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "granite"),
        ({"tied_head": False, "bias": False, "kv_heads": 2}, "granite"),
        ({"base_head_dim": 16}, "granite"),
        (SHAPES["gpt2"], "whet"),
        (SHAPES["experts"], "whet"),
    ],
)
def test_saved_model_is_loaded_by_whet_and_by_transformers_if_supported(tmp_path, changes, family):
    changes = dict(changes)
    mup = MuP(base_width=16, base_head_dim=changes.pop("base_head_dim", None))
    model = new_decoder(preset_spec("nano", mup=mup, **WIDE, **changes), seed=0, width_ratio=RATIO).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)  # make scores and logits matter
    assert model.spec.family == family
    whet.save(model, None, tmp_path / "model")
    tokens = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(0))
    loaded, _ = whet.load(tmp_path / "model", dtype=torch.float32, device="cpu")
    assert isinstance(loaded, Decoder)
    assert loaded.fingerprint == model.fingerprint
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0)
    if family != "whet":
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(model(tokens), theirs, rtol=0, atol=2e-4)
        without_mup = dataclasses.replace(model.spec, logit_scale=1.0)
        assert not torch.allclose(Decoder(without_mup).eval()(tokens), theirs, atol=1e-2)


def test_fingerprints_and_files_from_before_mup_stay_valid(tmp_path):
    """The description of a spec without a logit factor has not changed."""
    assert preset_spec("nano").fingerprint() == (
        "08f828374e98a6a3a2dcbc1016de92991e4ad8cce85162f28ea911b00c5dd80e"
    )
    spec = preset_spec("nano", **WIDE, positions="alibi")
    assert spec.family == "whet"
    assert "logit_scale" not in spec.describe()
    whet.save(new_decoder(spec, seed=0), None, tmp_path)
    assert whet.load(tmp_path, device="cpu")[0].spec == spec


def test_multipliers_of_a_loaded_model_are_checked():
    spec = wide("llama-tied").spec
    check_mup_multipliers(spec, BASE, name="it")
    for other_mup in (MuP(base_width=32), MuP(base_width=16, base_head_dim=16)):
        with pytest.raises(ConfigError, match="it was not built with muP at optim.mup.base_width"):
            check_mup_multipliers(spec, other_mup, name="it")
    with pytest.raises(ConfigError, match="was not built with muP"):
        check_mup_multipliers(None, BASE, name="it")


@pytest.mark.parametrize(
    ("changes", "mup", "message"),
    [
        (
            {"heads": 5, "d_model": 80},
            {"base_width": 16},
            r"base_width=16 is not a multiple of the number of heads \(5\)",
        ),
        ({"attention": "latent"}, {"base_width": 16}, "optim.mup does not support latent attention"),
    ],
)
def test_unsupported_shapes_raise_errors(changes, mup, message):
    with pytest.raises(ConfigError, match=message):
        with_mup_multipliers(preset_spec("nano", **{**WIDE, **changes}), MuP(**mup))
