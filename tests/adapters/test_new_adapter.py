"""A custom kind of adapter is saved, loaded and merged through its `stored` and `merged` methods alone."""

import pytest
import torch
from peft import PeftModel
from torch import nn

import whet
from tiny_adapters import load, load_theirs, shake, tokens, write_base
from whet.adapters.adapter import (
    Adapter,
    LoRASettings,
    StoredLayer,
    StoredModule,
    named_adapters,
    replace_module,
)
from whet.adapters.nf4 import NF4Linear


class OutputScale(Adapter):
    """y = v * (x W' + bias), stored as a weight and a bias trained in full."""

    def __init__(self, base):
        super().__init__(base)
        self.gain = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x):
        return self.base(x) * self.gain if self.enabled else self.base(x)

    def merged(self):
        merged = {"weight": self.gain[:, None] * self.base.weight}
        return merged if self.base.bias is None else {**merged, "bias": self.gain * self.base.bias}

    def stored(self):
        return StoredModule(parameters={name: tensor.detach() for name, tensor in self.merged().items()})


class OutputScaleAsDoRA(OutputScale):
    """The same without a bias, stored as a DoRA adapter that changes only the magnitudes."""

    def stored(self):
        weight = self.base.weight
        a, b = torch.zeros(4, weight.shape[1]), torch.zeros(weight.shape[0], 4)
        layer = StoredLayer(LoRASettings(4, variant="dora"), a, b, self.gain.detach() * weight.norm(dim=1))
        return StoredModule.from_layer(layer)


@pytest.fixture(scope="module", params=["llama", "bridge"])
def base(request, tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / request.param, request.param)


def attach_scales(model, kind, leaf):
    """Attach adapters of the custom kind, with gains from 0.5 to 1.5, to every layer called `leaf`."""
    torch.manual_seed(1)
    for name, module in list(model.named_modules()):
        if name.endswith(f".{leaf}"):
            replace_module(model, name, kind(module))
            nn.init.uniform_(model.get_submodule(name).gain, 0.5, 1.5)
    assert any(isinstance(module, kind) for _, module in named_adapters(model))
    return model


def logits_by_formula(directory, model):
    """Return the logits of the transformers model with its weights multiplied in float64."""
    theirs = load_theirs(directory)
    for name, module in named_adapters(model):
        linear = theirs.get_submodule(model.hf_name(name))
        gain = module.gain.detach().double()
        linear.weight.data = (gain[:, None] * linear.weight.data.double()).float()
        if linear.bias is not None:
            linear.bias.data = (gain * linear.bias.data.double()).float()
    return theirs(input_ids=tokens()).logits.detach()


def assert_same_logits(model, expected):
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "variant"), [(OutputScale, "lora"), (OutputScaleAsDoRA, "dora")])
def test_peft_loads_it_next_to_builtin_adapters(base, tmp_path, kind, variant):
    model = shake(whet.attach_lora(load(base), rank=4, targets="qv", variant=variant))
    attach_scales(model, kind, "down_proj")
    whet.save_adapter(model, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(load_theirs(base), tmp_path / "adapter").eval()
    expected = theirs(input_ids=tokens()).logits.detach()
    assert (expected - load_theirs(base)(input_ids=tokens()).logits).abs().max() > 0.01
    assert_same_logits(model, expected)
    assert_same_logits(whet.load_adapter(load(base), tmp_path / "adapter"), expected)


@pytest.mark.parametrize("layout", ["peft", "mlx"])
def test_stored_layers_round_trip_in_both_layouts(base, tmp_path, layout):
    model = attach_scales(load(base), OutputScaleAsDoRA, "down_proj")
    whet.save_adapter(model, tmp_path / "adapter", layout)
    loaded = whet.load_adapter(load(base), tmp_path / "adapter")
    assert_same_logits(loaded, logits_by_formula(base, model))


@pytest.mark.parametrize("leaf", ["q_proj", "down_proj"])
def test_merged_and_saved_models_match_the_formula(base, tmp_path, leaf):
    model = attach_scales(load(base), OutputScale, leaf)
    expected = logits_by_formula(base, model)
    assert_same_logits(model, expected)
    whet.save(model, None, tmp_path / "model")
    written = load_theirs(tmp_path / "model")(input_ids=tokens()).logits.detach()
    torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-4)
    whet.merge(model)
    assert not list(named_adapters(model))
    assert_same_logits(model, expected)


def test_merging_dequantizes_the_base():
    torch.manual_seed(0)
    base = NF4Linear(nn.Linear(64, 8), device=torch.device("cpu"), dtype=torch.float32)
    layer = OutputScale(base)
    gain = nn.init.uniform_(layer.gain, 0.5, 1.5).detach().double()
    weight, bias = gain[:, None] * base.weight.double(), gain * base.bias.double()
    with torch.no_grad():
        plain = layer.merged_module()
    assert type(plain) is nn.Linear
    torch.testing.assert_close(plain.weight.double(), weight)
    torch.testing.assert_close(plain.bias.double(), bias)


def test_merged_and_stored_are_required():
    class Incomplete(Adapter):
        pass

    with pytest.raises(TypeError, match=r"merged.*stored"):
        Incomplete(nn.Linear(2, 2))
