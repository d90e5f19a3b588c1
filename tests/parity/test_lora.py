"""Adapters match PEFT, and each library reads the files of the other."""

import json

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

import whet
from tiny import write_tiny_model
from tiny_adapters import adapter_tensors
from whet.adapters.adapter import adapters_off, named_adapters
from whet.errors import CheckpointError, ConfigError, ModelError
from whet.ops.cross_entropy import linear_cross_entropy

TARGETS = {"all": "all-linear", "attention": ["q_proj", "v_proj"], "one": ["down_proj"]}


def tokens():
    return torch.randint(0, 260, (2, 12), generator=torch.Generator().manual_seed(3))


def randomize(model):
    """Randomize B as well, because a new adapter changes nothing."""
    generator = torch.Generator().manual_seed(4)
    for name, tensor in sorted(adapter_tensors(model).items()):
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.2
        assert "lora_" in name
    return model


def peft_twin(directory, model, **settings):
    """Return a PEFT model with the same adapter weights."""
    config = LoraConfig(task_type="CAUSAL_LM", **settings)
    twin = get_peft_model(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), config)
    names = {
        name.replace(".default", ""): parameter
        for name, parameter in twin.named_parameters()
        if "lora_" in name
    }
    ours = adapter_tensors(model)
    assert names.keys() == ours.keys()
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(ours[name])
    return twin, names


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_gradients_match_peft(tmp_path, targets, bias):
    write_tiny_model(tmp_path, attention_bias=bias)
    model, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    randomize(whet.attach_lora(model, rank=3, alpha=5, targets=TARGETS[targets]))
    twin, names = peft_twin(tmp_path, model, r=3, lora_alpha=5, target_modules=TARGETS[targets])
    inputs, labels = tokens()[:, :-1], tokens()[:, 1:].reshape(-1)

    logits = twin(input_ids=inputs).logits
    torch.testing.assert_close(model(inputs), logits, rtol=1e-4, atol=1e-5)
    F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").backward()
    linear_cross_entropy(model.hidden(inputs).flatten(0, 1), model.head(), labels).backward()
    for name, tensor in adapter_tensors(model).items():
        torch.testing.assert_close(tensor.grad, names[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"targets": ["q_proj"]}, {"layers": 1}, {"layers": [0]}])
def test_peft_loads_a_saved_adapter_with_equal_logits(tiny_directory, tmp_path, settings):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    randomize(whet.attach_lora(model, rank=4, alpha=8, **settings))
    whet.save_adapter(model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    active = {name for name, module in loaded.named_modules() if hasattr(module, "lora_A") and module.lora_A}
    assert len(active) == len(list(named_adapters(model)))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), loaded(input_ids=tokens()).logits, rtol=1e-4, atol=1e-5)
    reloaded, _ = whet.load(tmp_path / "adapter", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        assert torch.equal(reloaded(tokens()), model(tokens()))


@pytest.mark.parametrize("targets", TARGETS)
def test_whet_loads_peft_adapters(tiny_directory, tmp_path, targets):
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    theirs = get_peft_model(
        base, LoraConfig(r=2, lora_alpha=7, target_modules=TARGETS[targets], init_lora_weights=False)
    )
    theirs.save_pretrained(tmp_path)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.load_adapter(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), theirs(input_ids=tokens()).logits, rtol=1e-4, atol=1e-5)


def test_adapters_on_the_bridge_load_in_peft(tmp_path):
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=4.0, pad_token_id=None,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    model, _ = whet.load(tmp_path / "granite", dtype=torch.float32, device="cpu")
    randomize(whet.attach_lora(model, rank=4))
    whet.save_adapter(model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "granite", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), loaded(input_ids=tokens()).logits, rtol=1e-4, atol=1e-5)


def test_new_adapter_changes_nothing_and_initializes_like_peft(tiny):
    model, _ = tiny
    before = model(
        tokens()
    )  # with gradients: without them, few rows use another matmul with different rounding
    whet.attach_lora(model, rank=8)
    assert torch.equal(model(tokens()), before)
    for _, module in named_adapters(model):
        bound = (1 / module.base.in_features) ** 0.5  # kaiming_uniform with a = sqrt(5)
        assert module.lora_A.abs().max() <= bound
        assert module.lora_A.std() > bound / 3
        assert module.lora_B.abs().max() == 0


def test_merged_equals_adapted_and_off_equals_base(tiny, tmp_path):
    model, tokenizer = tiny
    with torch.no_grad():
        base = model(tokens())
        randomize(whet.attach_lora(model, rank=4))
        adapted_logits = model(tokens())
        with adapters_off(model):
            assert torch.equal(model(tokens()), base)
        assert not torch.allclose(adapted_logits, base, atol=1e-2)
        whet.save(model, tokenizer, tmp_path / "merged")
        assert torch.equal(model(tokens()), adapted_logits), "saving must not change the model"
        whet.merge(model)
        assert not list(named_adapters(model))
        torch.testing.assert_close(model(tokens()), adapted_logits, rtol=1e-4, atol=1e-4)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(plain(tokens()).logits, adapted_logits, rtol=1e-4, atol=1e-4)


def test_saving_never_overwrites(tiny, tmp_path):
    model, tokenizer = tiny
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="never overwrites existing files"):
        whet.save(model, tokenizer, tmp_path)
    with pytest.raises(CheckpointError, match="never overwrites existing files"):
        whet.save_adapter(whet.attach_lora(model), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_dropout_is_active_only_in_training_and_preserves_the_mean(tiny):
    model, _ = tiny
    randomize(whet.attach_lora(model, rank=4, dropout=0.5))
    name, layer = next(iter(named_adapters(model)))
    x = torch.randn(4, layer.base.in_features)
    with torch.no_grad():
        layer.eval()
        quiet = layer(x)
        torch.testing.assert_close(quiet, F.linear(x, layer.merged_weight()), rtol=1e-4, atol=1e-4)
        layer.train()
        draws = torch.stack([layer(x) for _ in range(4000)])
    assert draws[0].ne(draws[1]).any(), name
    torch.testing.assert_close(draws.mean(0), quiet, rtol=0.1, atol=0.1)


def test_layers_is_a_count_from_the_end_or_a_list(tiny_directory):
    for layers, expected in ((1, {1}), ([0], {0}), (2, {0, 1})):
        model, _ = whet.load(tiny_directory, device="cpu")
        whet.attach_lora(model, layers=layers)
        assert {int(name.split(".")[1]) for name, _ in named_adapters(model)} == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank 0 is too small: an adapter needs a rank of at least 1"),
        ({"alpha": 0}, "alpha 0 must be greater than 0"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha -1 must be greater than 0"),
        ({"targets": ["q_prj"]}, "did you mean q_proj"),
        (
            {"targets": "experts"},
            "'experts': this model has no such layers\n  hint: its linear layers are down",
        ),
        (
            {"targets": ["qv", "routers"]},
            "'routers': this model has no such layers\n  hint: its linear",
        ),
        ({"variant": "bora"}, "unknown adapter variant 'bora'"),
        ({"layers": 9}, "layers 9 is out of range: the model has 2 layers"),
        ({"dropout": 1.0}, "dropout 1.0"),
    ],
)
def test_invalid_settings_raise_errors(tiny, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        whet.attach_lora(tiny[0], **settings)
    assert caught.value.exit_code == 2


def test_attaching_twice_raises_an_error(tiny):
    whet.attach_lora(tiny[0])
    with pytest.raises(ConfigError, match="already has adapters"):
        whet.attach_lora(tiny[0])


def test_mismatched_adapter_error_names_the_difference(tiny, tmp_path):
    write_tiny_model(tmp_path / "wide", hidden_size=48)
    wide, _ = whet.load(tmp_path / "wide", device="cpu")
    whet.save_adapter(whet.attach_lora(wide, rank=4), tmp_path / "adapter")
    with pytest.raises(
        ModelError, match=r"does not match this model: .*q_proj.lora_A is \[4, 48\], expected \[4, 32\]"
    ):
        whet.load_adapter(tiny[0], tmp_path / "adapter")
    assert not list(named_adapters(tiny[0])), "a refused adapter leaves nothing behind"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("use_dora", True, r"the adapter of .* is incomplete"), ("use_qalora", True, "use_qalora"),
     ("init_lora_weights", "pissa", "init_lora_weights"), ("init_lora_weights", "olora", "init_lora_weights"),
     ("rank_pattern", {"q_proj": 2}, r"q_proj.lora_A is \[8, 32\], expected \[2, 32\]"),
     ("modules_to_save", ["lm_head"], "does not contain lm_head"), ("peft_type", "IA3", "peft_type 'IA3' is not LORA"),
     ("target_parameters", ["experts.down_proj"], "target_parameters"), ("bias", "all", "bias"),
     ("r", "eight", "is invalid"), ("rank_pattern", {"(": 2}, "is invalid"),
     ("r", 0, "rank is 0"), ("lora_alpha", None, "is invalid")],
)  # fmt: skip
def test_unsupported_adapter_settings_raise_errors(tiny, tmp_path, key, value, message):
    whet.save_adapter(whet.attach_lora(tiny[0]), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=message):
        whet.load_adapter(whet.merge(tiny[0]), tmp_path / "adapter")


def test_ranks_above_the_smaller_dimension_load_as_in_peft(tiny_directory, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    theirs = get_peft_model(base, LoraConfig(r=24, target_modules=["k_proj"], init_lora_weights=False))
    theirs.save_pretrained(tmp_path)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.load_adapter(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), theirs(input_ids=tokens()).logits, rtol=1e-4, atol=1e-5)
