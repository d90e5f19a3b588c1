"""Every kind of adapter matches PEFT with the same weights."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import whet
from tiny_adapters import adapter_tensors, load, load_theirs, shake, tokens, write_base
from whet.adapters.adapter import LoRASettings, adapters_off, named_adapters
from whet.adapters.attach import VARIANTS as CLASSES
from whet.errors import ConfigError, ModelError
from whet.lazy_import import load_object
from whet.ops.cross_entropy import linear_cross_entropy

PATTERNS = {"rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 5}, "alpha_pattern": {"k_proj": 3.0}}
# settings of whet, and the same settings of PEFT
VARIANTS = {
    "lora": ({}, {}),
    "rslora": ({"variant": "rslora"}, {"use_rslora": True}),
    "dora": ({"variant": "dora"}, {"use_dora": True}),
    "patterns": (PATTERNS, PATTERNS),
    "dora-patterns": ({"variant": "dora", **PATTERNS}, {"use_dora": True, **PATTERNS}),
    "embedding": (
        {"targets": ["embed_tokens", "q_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ),
    "head": ({"targets": ["lm_head", "v_proj"]}, {"target_modules": ["lm_head", "v_proj"]}),
    "saved": (
        {"targets": "qv", "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "saved-container": (
        {"targets": "qv", "modules_to_save": ["mlp"]},
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["mlp"]},
    ),
    "saved-norm": (
        {"targets": "mlp", "modules_to_save": ["model.norm"]},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "modules_to_save": ["model.norm"]},
    ),
}


@pytest.fixture(scope="module", params=["llama", "bridge"])
def base(request, tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / request.param, request.param)


def theirs_by_file_name(twin):
    """Return PEFT's trained parameters by their names in files."""
    return {
        name.replace(".default", "").replace(".modules_to_save", "").replace("vector.weight", "vector"): p
        for name, p in twin.named_parameters()
        if p.requires_grad
    }


def copy_weights(model, twin):
    ours, theirs = adapter_tensors(model), theirs_by_file_name(twin)
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    return theirs


def our_gradients(model):
    """Return the gradients by the names of PEFT."""
    twin = copy.deepcopy(model)
    for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
        if parameter.requires_grad:
            parameter.data = other.grad
    return adapter_tensors(twin)


def gradients_of(logits_model, twin):
    inputs, labels = tokens()[:, :-1], tokens()[:, 1:].reshape(-1)
    F.cross_entropy(twin(input_ids=inputs).logits.flatten(0, 1), labels, reduction="sum").backward()
    hidden = logits_model.hidden(inputs).flatten(0, 1)
    linear_cross_entropy(hidden, logits_model.head(), labels).backward()


def close(output, expected):
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def close_gradient(output, expected):
    """Compare relative to the largest gradient, because sums over tokens run in another order."""
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_match_peft(base, variant):
    ours, theirs = VARIANTS[variant]
    model = shake(whet.attach_lora(load(base), rank=3, alpha=5, **ours))
    config = LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=5, **({"target_modules": "all-linear"} | theirs)
    )
    twin = get_peft_model(load_theirs(base), config)
    their_parameters = copy_weights(model, twin)
    with torch.no_grad():
        close(model(tokens()), twin(input_ids=tokens()).logits)
        with twin.disable_adapter(), adapters_off(model):
            close(model(tokens()), twin(input_ids=tokens()).logits)
    gradients_of(model, twin)
    for name, gradient in our_gradients(model).items():
        close_gradient(gradient, their_parameters[name].grad)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_adapters_load_in_peft_and_in_whet(base, tmp_path, variant):
    model = shake(whet.attach_lora(load(base), rank=3, alpha=5, **VARIANTS[variant][0]))
    whet.save_adapter(model, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(load_theirs(base), tmp_path / "adapter")
    reloaded = load(tmp_path / "adapter")
    with torch.no_grad():
        close(model(tokens()), loaded(input_ids=tokens()).logits)
        assert torch.equal(reloaded(tokens()), model(tokens()))
        with adapters_off(reloaded):
            assert torch.equal(reloaded(tokens()), load(base)(tokens()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_whet_loads_peft_adapters(base, tmp_path, variant):
    theirs = {"target_modules": "all-linear"} | VARIANTS[variant][1]
    twin = get_peft_model(load_theirs(base), LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, **theirs))
    shake(twin).save_pretrained(tmp_path)
    with torch.no_grad():
        close(load(tmp_path)(tokens()), twin(input_ids=tokens()).logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_and_saved_model_matches_the_adapted_model(base, tmp_path, variant):
    model = shake(whet.attach_lora(load(base), rank=3, alpha=5, **VARIANTS[variant][0]))
    with torch.no_grad():
        before = model(tokens())
        whet.save(model, None, tmp_path / "merged")
        assert torch.equal(model(tokens()), before), "saving must not change the model"
        plain = load_theirs(tmp_path / "merged")
        torch.testing.assert_close(plain(input_ids=tokens()).logits, before, rtol=1e-4, atol=1e-4)
        whet.merge(model)
        assert not list(named_adapters(model))
        torch.testing.assert_close(model(tokens()), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alpha", [3, 12])
def test_pissa_initializes_and_trains_like_peft_and_converts_to_lora(base, tmp_path, alpha):
    model = whet.attach_lora(load(base), rank=3, alpha=alpha, variant="pissa")
    with torch.no_grad():
        close(model(tokens()), load(base)(tokens()))
    config = LoraConfig(r=3, lora_alpha=alpha, target_modules="all-linear", init_lora_weights="pissa")
    twin = get_peft_model(load_theirs(base), config)
    theirs = theirs_by_file_name(twin)
    for name, module in named_adapters(model):
        path = f"base_model.model.{model.hf_name(name)}"
        a, b = theirs[f"{path}.lora_A.weight"], theirs[f"{path}.lora_B.weight"]
        close(module.lora_A.abs(), a.abs())  # up to the signs of the singular vectors
        close(module.lora_B.abs(), b.abs())
        close(module.lora_B @ module.lora_A, b @ a)
    shake(model)
    with torch.no_grad():
        for name, module in named_adapters(model):
            path = f"base_model.model.{model.hf_name(name)}"
            theirs[f"{path}.lora_A.weight"].copy_(module.lora_A)
            theirs[f"{path}.lora_B.weight"].copy_(module.lora_B)
        close(model(tokens()), twin(input_ids=tokens()).logits)
    gradients_of(model, twin)
    for name, module in named_adapters(model):
        path = f"base_model.model.{model.hf_name(name)}"
        for part in ("lora_A", "lora_B"):
            close_gradient(getattr(module, part).grad, theirs[f"{path}.{part}.weight"].grad)

    whet.save_adapter(model, tmp_path / "plain")
    loaded = PeftModel.from_pretrained(load_theirs(base), tmp_path / "plain")
    with torch.no_grad():
        close(loaded(input_ids=tokens()).logits, model(tokens()))
        reloaded = load(tmp_path / "plain")
        close(reloaded(tokens()), model(tokens()))
        assert {module.settings.rank for _, module in named_adapters(reloaded)} == {6}
        with adapters_off(model):
            assert torch.equal(model(tokens()), load(base)(tokens())), "the base stays as it was"
        whet.merge(model)
        torch.testing.assert_close(model(tokens()), reloaded(tokens()), rtol=1e-4, atol=1e-4)


def test_dora_dropout_matches_peft(tmp_path):
    write_base(tmp_path / "base", "llama")
    model = shake(
        whet.attach_lora(load(tmp_path / "base"), rank=3, variant="dora", dropout=0.3, targets="q_proj")
    )
    config = LoraConfig(r=3, lora_alpha=16, target_modules=["q_proj"], use_dora=True, lora_dropout=0.3)
    twin = get_peft_model(load_theirs(tmp_path / "base"), config)
    copy_weights(model, twin)
    _, layer = next(named_adapters(model))
    other = twin.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, 32)
    with torch.no_grad():
        torch.manual_seed(1)
        output = layer.train()(x)
        torch.manual_seed(1)
        close(output, other.train()(x))


def test_tied_weights_are_trained_once_and_stay_tied(tiny_directory, tmp_path):
    for modules in (["embed_tokens"], ["lm_head"]):
        model = whet.attach_lora(load(tiny_directory), rank=3, targets="qv", modules_to_save=modules)
        shake(model)
        directory = tmp_path / modules[0]
        whet.save_adapter(model, directory)
        loaded = PeftModel.from_pretrained(load_theirs(tiny_directory), directory)
        with torch.no_grad():
            close(loaded(input_ids=tokens()).logits, model(tokens()))
            assert torch.equal(load(directory)(tokens()), model(tokens()))
            whet.save(model, None, directory / "merged")
            close(load_theirs(directory / "merged")(input_ids=tokens()).logits, model(tokens()))


def test_tied_embedding_trained_separately_from_its_head_is_rejected(tiny_directory, tmp_path):
    config = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    shake(get_peft_model(load_theirs(tiny_directory), config)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="are tied in this model, but not in the adapter"):
        load(tmp_path)


def test_lora_on_a_tied_embedding_is_rejected(tiny):
    with pytest.raises(ConfigError, match="embed_tokens is tied"):
        whet.attach_lora(tiny[0], targets=["embed_tokens"])


@pytest.mark.parametrize(
    ("targets", "leaves"),
    [
        ("qv", {"q_proj", "v_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mlp", {"gate_proj", "up_proj", "down_proj"}),
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (r".*\.1\..*[qk]_proj", {"q_proj", "k_proj"}),
        (["o_proj", "(gate|up)_proj"], {"o_proj", "gate_proj", "up_proj"}),
        (["attention", "up_proj"], {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}),
    ],
)
def test_targets_by_shorthand_regular_expression_or_list(base, targets, leaves):
    model = whet.attach_lora(load(base), rank=2, targets=targets)
    assert {name.rpartition(".")[2] for name, _ in named_adapters(model)} == leaves
    assert len(list(named_adapters(model))) == (
        len(leaves) if ".1." in str(targets) or r"\.1" in str(targets) else 2 * len(leaves)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 33}, r"rank 33 is too large for layers.0.self_attn.q_proj, which maps 32 values to 32"),
        ({"rank_pattern": {"k_proj": 17}}, "rank 17 is too large for layers.0.self_attn.k_proj, which maps"),
        ({"rank_pattern": {"q_prj": 2}}, "pattern 'q_prj' matches no adapted layer"),
        ({"alpha_pattern": {"(": 2}}, r"'\(' is not a regular expression"),
        ({"targets": "["}, r"'\[' is not a regular expression"),
        ({"targets": "atention"}, "did you mean attention"),
        ({"modules_to_save": ["lm_haed"]}, "did you mean lm_head"),
        ({"modules_to_save": ["mlp"]}, "mlp.down_proj cannot both have an adapter and be trained in full"),
        ({"targets": ["lm_head"], "modules_to_save": ["lm_head"]}, "lm_head cannot both have an adapter and be trained in full"),
        ({"targets": ["embed_tokens"], "variant": "dora"}, "dora supports linear layers, not embeddings"),
    ],
)  # fmt: skip
def test_invalid_settings_raise_errors_and_do_not_change_the_model(tmp_path, settings, message):
    model = load(write_base(tmp_path, "llama"))
    with pytest.raises(ConfigError, match=message):
        whet.attach_lora(model, **settings)
    assert not list(named_adapters(model))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_fused_layers_with_a_shared_input_match_separate_layers(base):
    model = shake(whet.attach_lora(load(base), rank=3, rank_pattern={"v_proj": 2}, layers=1))
    attention = next(m for n, m in model.named_modules() if n.endswith("layers.1.self_attn"))
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(2, 5, 32, requires_grad=True)
    separate = [layer(x) for layer in layers]
    fused = layers[0].forward_siblings(x, layers)
    for output, expected in zip(fused, separate, strict=True):
        close(output, expected)
    inputs = [x, *(p for layer in layers for p in (layer.lora_A, layer.lora_B))]
    weights = [torch.randn_like(y) for y in separate]
    close_all = torch.autograd.grad(sum((y * w).sum() for y, w in zip(fused, weights, strict=True)), inputs)
    expected = torch.autograd.grad(sum((y * w).sum() for y, w in zip(separate, weights, strict=True)), inputs)
    for output, expected_grad in zip(close_all, expected, strict=True):
        close(output, expected_grad)
    called = []
    layers[1].register_forward_hook(lambda *_: called.append(1))
    assert layers[0].forward_siblings(x, layers) is None, "a hook wants its layer called"


def test_dora_is_accurate_with_a_bf16_base(base):
    model = whet.load(base, dtype=torch.bfloat16, device="cpu")[0]
    shake(whet.attach_lora(model, rank=3, variant="dora"))
    _, layer = next(named_adapters(model))
    exact = layer.base.weight.double() + layer.scale * (layer.lora_B.double() @ layer.lora_A.double())
    gain = layer.lora_magnitude_vector.double() / exact.norm(dim=1)
    torch.testing.assert_close(layer._gain().double(), gain, rtol=3e-3, atol=0)
    assert math.isfinite(model(tokens()).sum().item())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", ["lora", "rslora", "pissa"])
def test_small_update_is_not_lost_in_16_bits(variant, bias, dropout):
    """A change of a thousandth is complete in the mean, as in float64."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(192, 256, bias=bias).bfloat16().requires_grad_(False)
    layer = load_object(CLASSES[variant])(linear, LoRASettings(8, 16.0, dropout, variant))
    size = 1e-3 * linear.weight.float().std()
    layer.lora_A.data += 0.3 * size * torch.randn(layer.lora_A.shape)
    layer.lora_B.data += size * torch.randn(layer.lora_B.shape)
    x = torch.randn(1024, 192).bfloat16()
    torch.manual_seed(1)
    output = layer(x).double()
    torch.manual_seed(1)
    change = F.dropout(x, dropout).double() @ layer.delta_weight().double().T
    base = F.linear(x.double(), *(p.double() for p in linear.parameters()))
    fraction = ((output - base) * change).sum() / change.square().sum()
    assert change.std() / base.std() < 3e-3
    assert fraction.item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "settings",
    [{}, {"variant": "rslora"}, {"variant": "dora"}, {"variant": "pissa"}, {"modules_to_save": ["wte", "c_proj"], "targets": "c_attn"}],
    ids=str,
)  # fmt: skip
def test_transposed_weights_round_trip_through_peft(tmp_path, settings):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=260, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    model = shake(whet.attach_lora(load(tmp_path / "base"), rank=3, **settings))
    whet.save_adapter(model, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(load_theirs(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        close(loaded(input_ids=tokens()).logits, model(tokens()))
        close(load(tmp_path / "adapter")(tokens()), model(tokens()))
        whet.save(model, None, tmp_path / "merged")
        torch.testing.assert_close(
            load_theirs(tmp_path / "merged").eval()(tokens()).logits, model(tokens()), rtol=1e-4, atol=1e-4
        )


EXPERT_TARGETS = {
    "experts": ("experts", ["experts.gate_up_proj", "experts.down_proj"], []),
    "down-only": (["experts.down_proj", "q_proj"], ["experts.down_proj"], ["q_proj"]),
    "routers": (["routers", "experts", "o_proj"], ["gate.weight", "experts.gate_up_proj", "experts.down_proj"], ["o_proj"]),
    "router-alone": ("routers", ["mlp.gate.weight"], []),
}  # fmt: skip


def write_experts(directory, family):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2,
        "pad_token_id": None, "initializer_range": 0.2, "num_experts": 3,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["mixtral", "olmoe", "qwen2_moe"])
def experts_directory(request, tmp_path_factory):
    """Models with fused expert tensors. The last one uses the bridge."""
    return write_experts(tmp_path_factory.mktemp("base") / request.param, request.param)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", EXPERT_TARGETS)
def test_adapters_of_fused_experts_match_peft(experts_directory, tmp_path, targets, rslora):
    ours, parameters, modules = EXPERT_TARGETS[targets]
    if "router" in targets and experts_directory.name == "qwen2_moe":
        pytest.skip("routers of transformers' classes are nothing that whet adapts")
    variant = "rslora" if rslora else "lora"
    model = shake(whet.attach_lora(load(experts_directory), rank=2, alpha=6, targets=ours, variant=variant))
    config = LoraConfig(
        r=2, lora_alpha=6, target_modules=modules, target_parameters=parameters, use_rslora=rslora
    )  # fmt: skip
    twin = get_peft_model(load_theirs(experts_directory), config)
    their_parameters = copy_weights(model, twin)
    with torch.no_grad():
        close(model(tokens()), twin(input_ids=tokens()).logits)
        with adapters_off(model):
            assert torch.equal(model(tokens()), load(experts_directory)(tokens()))
    gradients_of(model, twin)
    for name, gradient in our_gradients(model).items():
        close_gradient(gradient, their_parameters[name].grad)

    whet.save_adapter(model, tmp_path / "ours")
    twin.save_pretrained(tmp_path / "theirs")
    loaded = PeftModel.from_pretrained(load_theirs(experts_directory), tmp_path / "ours")
    with torch.no_grad():
        close(loaded(input_ids=tokens()).logits, model(tokens()))
        assert torch.equal(load(tmp_path / "ours")(tokens()), model(tokens()))
        close(load(tmp_path / "theirs")(tokens()), model(tokens()))
        with pytest.raises(ModelError, match="the mlx layout does not support adapters of fused experts"):
            whet.save_adapter(model, tmp_path / "mlx", layout="mlx")
        before = model(tokens())
        whet.save(model, None, tmp_path / "merged")
        close(load(tmp_path / "merged")(tokens()), before)
        close(whet.merge(model)(tokens()), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dropout": 0.1}, "fused experts and routers cannot have dropout"), ({"variant": "dora"}, "not fused experts or routers"),
     ({"rank": 33}, "gate_up_proj, which maps 32 values to")],
)  # fmt: skip
def test_unsupported_settings_for_fused_experts_raise_errors(experts_directory, settings, message):
    model = load(experts_directory)
    with pytest.raises(ConfigError, match=message):
        whet.attach_lora(model, targets="experts", **settings)
    assert not list(named_adapters(model))


def test_native_experts_never_build_the_full_update(tmp_path, monkeypatch):
    """For experts of any size, LoRA multiplies rows by A and B, and never builds B A."""
    model = shake(whet.attach_lora(load(write_experts(tmp_path, "mixtral")), rank=2, targets="experts"))
    monkeypatch.setattr(
        "whet.adapters.layers.lora_experts.LoRAExperts._updated", lambda _: pytest.fail("a dense update")
    )
    model(tokens()).sum().backward()
    for _, layer in named_adapters(model):
        assert all(parameter.grad.abs().sum() > 0 for parameter in layer.lora_B.parameters())


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_unaligned_ranks_are_zero_padded_for_grouped_matmuls(tmp_path, rank):
    model = shake(whet.attach_lora(load(write_experts(tmp_path, "mixtral")), rank=rank, targets="experts"))
    with torch.no_grad():
        before = model(tokens())
        close(whet.merge(model)(tokens()), before)


def test_rank_and_alpha_patterns_of_experts_and_routers_match_peft(tmp_path):
    patterns = {
        "rank_pattern": {"gate.weight": 2, "experts.down_proj": 3},
        "alpha_pattern": {"gate.weight": 9.0},
    }
    base = write_experts(tmp_path / "base", "olmoe")
    model = shake(whet.attach_lora(load(base), rank=4, targets=["routers", "experts"], **patterns))
    whet.save_adapter(model, tmp_path / "ours")
    loaded = PeftModel.from_pretrained(load_theirs(base), tmp_path / "ours")
    with torch.no_grad():
        close(loaded(input_ids=tokens()).logits, model(tokens()))
        assert torch.equal(load(tmp_path / "ours")(tokens()), model(tokens()))


@pytest.mark.parametrize("kind", ["xglm", "gemma3_text"])
def test_scaled_embeddings_scale_the_update(kind, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "max_position_embeddings": 128, "tie_word_embeddings": False}
    if kind == "xglm":
        sizes |= {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    else:  # with an activation that the native decoder does not support
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_activation": "relu"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / "base")
    ours = whet.attach_lora(load(tmp_path / "base"), rank=2, targets=["embed_tokens"])
    shake(ours)
    whet.save_adapter(ours, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(load_theirs(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        adapted_logits = ours(tokens())
        torch.testing.assert_close(adapted_logits, theirs(tokens()).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whet.merge(ours)(tokens()), adapted_logits, rtol=1e-4, atol=1e-4)


def test_zero_rows_stay_zero_when_dora_is_merged(tmp_path):
    model = load(write_base(tmp_path / "base", "llama"))
    model.layers[0].self_attn.o_proj.weight.data[3:] = 0
    whet.attach_lora(model, rank=2, variant="dora")
    with torch.no_grad():
        before = model(tokens())
        torch.testing.assert_close(whet.merge(model)(tokens()), before, rtol=1e-4, atol=1e-4)


def test_16_bit_pissa_is_saved_exactly(tmp_path):
    write_base(tmp_path / "base", "llama")
    model, _ = whet.load(tmp_path / "base", dtype=torch.bfloat16, device="cpu")
    whet.attach_lora(model, rank=4, variant="pissa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        whet.save_adapter(model, tmp_path / "adapter")
        loaded, _ = whet.load(tmp_path / "adapter", dtype=torch.bfloat16, device="cpu")
        assert torch.equal(loaded(tokens()), model(tokens()))
