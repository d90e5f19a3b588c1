"""Several adapters on one base: switching, merging a weighted sum, unmerging; the error of merging."""

import json
import shutil

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

import whet
from tiny_adapters import adapter_tensors
from whet.adapters.adapter import named_adapters
from whet.errors import ConfigError, ModelError
from whet.model_io.export.logit_difference import compare_logits, merge_measured, sample_tokens
from whet.model_io.merging.adapter_set import AdapterSet, updates_of

TOKENS = torch.randint(0, 260, (2, 12), generator=torch.Generator().manual_seed(3))


def write_adapter(base, directory, *, seed, targets):
    model, _ = whet.load(base, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=3, targets=targets)
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter_tensors(model).values():
        tensor.data = 0.2 * torch.randn(tensor.shape, generator=generator)
    whet.save_adapter(model, directory)
    with torch.no_grad():
        return model(TOKENS)


@pytest.fixture
def adapter_set(tiny, tiny_directory, tmp_path):
    """A base with two adapters on overlapping layers, and the logits of each adapter."""
    expected_logits = {
        "red": write_adapter(tiny_directory, tmp_path / "red", seed=1, targets=["q_proj", "down_proj"]),
        "blue": write_adapter(tiny_directory, tmp_path / "blue", seed=2, targets=["q_proj", "up_proj"]),
    }
    adapters = AdapterSet(tiny[0])
    with torch.no_grad():
        expected_logits["base"] = tiny[0](TOKENS)
    for name in ("red", "blue"):
        adapters.add(name, tmp_path / name)
    return adapters, expected_logits


@torch.no_grad()
def test_switching_selects_each_adapter_and_the_base_exactly(adapter_set):
    adapters, expected_logits = adapter_set
    assert adapters.names == ["red", "blue"]
    assert torch.equal(adapters.model(TOKENS), expected_logits["blue"])  # the one added last
    for name in ("red", "blue", "red"):
        adapters.use(name)
        assert torch.equal(adapters.model(TOKENS), expected_logits[name])
    adapters.use(None)
    assert torch.equal(adapters.model(TOKENS), expected_logits["base"])
    assert not list(named_adapters(adapters.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_weighted_sum_is_merged_and_unmerged_bit_for_bit(tiny_directory, tmp_path, adapter_set, dtype):
    model, _ = whet.load(tiny_directory, dtype=dtype, device="cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters = AdapterSet(model)
    updates = {}
    for name in ("red", "blue"):
        adapters.add(name, tmp_path / name)
        updates[name] = {
            layer: module.lora_B.double() @ module.lora_A.double() * module.scale
            for layer, module in named_adapters(model)
        }
    adapters.merge({"red": 0.75, "blue": -0.5})
    num_updates = 0
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        expected = before[name].double()
        for adapter, weight in (("red", 0.75), ("blue", -0.5)):
            if layer in updates[adapter]:
                expected = expected + weight * updates[adapter][layer]
                num_updates += 1
        torch.testing.assert_close(tensor, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)  # fmt: skip
    assert num_updates == 8
    adapters.unmerge()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    adapters.use("red")


def test_merged_model_has_no_name(adapter_set, tmp_path):
    """Otherwise an adapter trained on it would be loaded on the original base."""
    adapters, _ = adapter_set
    name = adapters.model.name
    adapters.merge({"red": 0.7, "blue": 0.3})
    whet.save_adapter(whet.attach_lora(adapters.model), tmp_path / "third")
    config = json.loads((tmp_path / "third" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
    adapters.model = whet.merge(adapters.model)
    adapters.unmerge()
    assert adapters.model.name == name


@torch.no_grad()
def test_mismatched_adapter_keeps_the_active_one(adapter_set, tmp_path):
    adapters, expected_logits = adapter_set
    shutil.copytree(tmp_path / "red", tmp_path / "torn")
    (tmp_path / "torn" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError):
        adapters.add("torn", tmp_path / "torn")
    assert adapters.names == ["red", "blue"]
    assert torch.equal(adapters.model(TOKENS), expected_logits["blue"])


def test_misuse_is_rejected(adapter_set, tiny_directory, tmp_path):
    adapters, _ = adapter_set
    with pytest.raises(ConfigError, match="no adapter is called 'green'") as caught:
        adapters.use("green")
    assert "red, blue" in str(caught.value)
    with pytest.raises(ConfigError, match="already an adapter called 'red'"):
        adapters.add("red", tmp_path / "red")
    with pytest.raises(ConfigError, match="no adapters to merge: the weights are empty"):
        adapters.merge({})
    adapters.merge({"red": 1.0})
    for call in (lambda: adapters.use("red"), lambda: adapters.merge({"blue": 1.0})):
        with pytest.raises(ConfigError, match="merged into the weights"):
            call()
    with pytest.raises(ConfigError, match="already has an adapter"):
        AdapterSet(whet.load(tmp_path / "red", device="cpu")[0])


@torch.no_grad()
def test_updates_are_not_rounded_to_the_dtype_of_the_base(tiny_directory, tmp_path, adapter_set):
    model, _ = whet.load(tmp_path / "red", dtype=torch.bfloat16, device="cpu")
    for _, layer in named_adapters(model):
        expected = layer.lora_B.double() @ layer.lora_A.double() * layer.scale
        torch.testing.assert_close(updates_of(layer)["weight"].double(), expected, rtol=1e-4, atol=1e-6)
        assert layer.base.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "lower", "upper"), [(torch.float32, 0, 1e-4), (torch.bfloat16, 1e-3, 0.5)])
def test_measured_difference_is_that_of_the_rounded_merged_weights(
    tiny_directory, tmp_path, adapter_set, dtype, lower, upper
):
    model, tokenizer = whet.load(tmp_path / "red", dtype=torch.float32, device="cpu")
    tokens = sample_tokens(model, tokenizer)
    assert tokens.shape[1] > 100
    twin, _ = whet.load(tmp_path / "red", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        expected = twin(tokens)
        whet.merge(twin).to(dtype).float()
        difference = merge_measured(model, tokens, dtype=dtype)
        assert difference == compare_logits(expected, twin(tokens))
    assert lower <= difference.largest < upper
    with pytest.raises(ModelError, match="no adapter to merge"):
        merge_measured(model, tokens, dtype=dtype)


def test_compare_logits_counts_positions_with_the_same_argmax():
    first = torch.tensor([[[1.0, 2.0], [3.0, 0.0]]])
    second = torch.tensor([[[1.0, 2.5], [3.0, 3.5]]])
    difference = compare_logits(first, second)
    assert (difference.largest, difference.same_argmax) == (3.5, 0.5)
    assert str(difference) == "largest logit difference 3.5, same most likely token at 50.0% of positions"


def test_tied_weight_is_changed_once(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = GraniteConfig(
        vocab_size=260, **sizes, residual_multiplier=0.5, pad_token_id=None, tie_word_embeddings=True
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path / "base")

    def base():
        return whet.load(tmp_path / "base", dtype=torch.float32, device="cpu")[0]

    model = whet.attach_lora(base(), rank=2, targets="qv", modules_to_save=["embed_tokens"])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    whet.save_adapter(model, tmp_path / "adapter")
    adapter_set = AdapterSet(plain := base())
    adapter_set.add("one", tmp_path / "adapter")
    with torch.no_grad():
        adapter_set.merge({"one": 1.0})
        torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)
        adapter_set.unmerge()
        assert torch.equal(plain(TOKENS), base()(TOKENS))
