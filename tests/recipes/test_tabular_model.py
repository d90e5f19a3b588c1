"""The quality models: parameter counts, outputs against a plain formula, arms, and saved files."""

import json

import numpy as np
import pytest
import torch

from whet.config.quality import Quality
from whet.errors import ModelError
from whet.recipes.quality.padic_router import Padic
from whet.recipes.quality.tabular_model import (
    DENSE_SHAPES,
    EXPERT_SHAPES,
    QualitySpec,
    TabularModel,
    architecture,
    canonical,
    disagreement,
    load_quality,
    new_quality_model,
    one_hot_pairs,
    quality_costs,
    read_spec,
    save_quality,
)

ARMS = ("softmax", "sheaf-padic", "dense")


def spec_of(size="nano", arm="softmax"):
    return QualitySpec.from_config(Quality(quality=size, arm=arm))


@pytest.mark.parametrize(
    ("size", "arm", "count", "tensors"),
    [
        ("nano", "softmax", 195_540, 58),
        ("nano", "sheaf-padic", 195_540, 58),
        ("nano", "dense", 195_378, 20),
        ("tiny", "softmax", 84_984_276, 106),
        ("tiny", "dense", 85_130_180, 28),
        ("medium", "softmax", 265_961_940, 138),
        ("medium", "dense", 265_930_580, 36),
        ("full", "softmax", 704_617_428, 170),
        ("full", "dense", 706_053_140, 676),
    ],
)
def test_parameter_counts_match_the_meta_model_and_the_formula(size, arm, count, tensors):
    spec = spec_of(size, arm)
    with torch.device("meta"):
        parameters = list(TabularModel(spec).parameters())
    assert sum(p.numel() for p in parameters) == spec.parameter_count() == count
    assert len(parameters) == spec.tensor_count() == tensors


def test_dense_twins_have_the_same_size_within_half_a_percent():
    for size in EXPERT_SHAPES:
        ratio = spec_of(size, "dense").parameter_count() / spec_of(size).parameter_count()
        assert abs(ratio - 1) < 0.0021
    assert DENSE_SHAPES["full"] == (1024, 84)


def test_parameters_are_ordered_router_first_then_experts():
    names = [name for name, _ in new_quality_model(spec_of(), seed=0).named_parameters()]
    assert names[:4] == ["router.weight", "router.bias", "experts.0.0.weight", "experts.0.0.bias"]
    assert [name.split(".")[1] for name in names[2:]] == [str(e) for e in range(4) for _ in range(14)]


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(__import__("math").erf)(x / np.sqrt(2)))


def reference_outputs(model, rows):
    """Compute router and experts in float64: softmax, the two largest weights, and a weighted sum."""
    p = {name: tensor.detach().double().numpy() for name, tensor in model.named_parameters()}
    x = rows.double().numpy()
    logits = x @ p["router.weight"].T + p["router.bias"]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    outputs = np.zeros((len(x), 20))
    for row, chances in enumerate(probabilities):
        for expert in np.argsort(-chances)[:2]:
            h = x[row]
            for layer in (0, 3, 6):
                prefix = f"experts.{expert}.{layer}"
                h = p[f"{prefix}.weight"] @ h + p[f"{prefix}.bias"]
                norm = f"experts.{expert}.{layer + 1}"
                h = (h - h.mean()) / np.sqrt(h.var() + 1e-5) * p[f"{norm}.weight"] + p[f"{norm}.bias"]
                h = gelu(h)
            last = f"experts.{expert}.9"
            outputs[row] += chances[expert] * (p[f"{last}.weight"] @ h + p[f"{last}.bias"])
    return outputs


def test_softmax_arm_matches_the_published_formula():
    model = new_quality_model(spec_of(), seed=3)
    rows = torch.rand(12, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        actual = model(rows)
    np.testing.assert_allclose(actual.numpy(), reference_outputs(model, rows), rtol=1e-4, atol=1e-6)


def test_the_three_arms_differ():
    """The two routers have the same weights; the dense twin has no router."""
    rows = torch.rand(64, 96, generator=torch.Generator().manual_seed(1))
    softmax, padic, dense = (new_quality_model(spec_of(arm=arm), seed=0) for arm in ARMS)
    assert all(
        torch.equal(a, b)
        for a, b in zip(softmax.state_dict().values(), padic.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        outputs = [model(rows) for model in (softmax, padic, dense)]
        routed = [model.decide(rows).routing for model in (softmax, padic, dense)]
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-2)
    assert routed[2] is None
    assert len({model.fingerprint for model in (softmax, padic, dense)}) == 3
    # a planted tie: the first expert is a hair below the second
    with torch.no_grad():
        for model in (softmax, padic):
            model.router.weight.zero_()
            model.router.bias.copy_(torch.tensor([1.0, 1.001, -1.0, -1.001]))
        assert softmax.decide(rows).routing.chosen[0].tolist() == [1, 0]
        assert padic.decide(rows).routing.chosen[0].tolist() == [0, 1]


def test_every_random_tensor_depends_on_the_seed():
    one, other, again = (new_quality_model(spec_of(), seed=seed).state_dict() for seed in (0, 1, 0))
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name])
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other[name])


def test_gradient_of_unselected_experts_is_zero():
    model = new_quality_model(spec_of(), seed=0)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([9.0, 5.0, -9.0, -9.0]))
    model(torch.rand(4, 96)).sum().backward()
    for expert in (2, 3):
        assert all(not p.grad.any() for p in model.experts[expert].parameters())
    assert all(p.grad.any() for p in model.experts[0].parameters())


def test_disagreement_and_one_hot_pairs():
    sections = torch.tensor([[[1.0, 0], [1, 0]], [[1, 0], [0, 1]], [[1, 0], [-1, 0]]])
    torch.testing.assert_close(disagreement(sections), torch.tensor([0.0, 1.0, 2.0]))
    routing = new_quality_model(spec_of(), seed=0).router.route(torch.rand(32, 96))
    shared = one_hot_pairs(routing)
    assert shared.sum(1).tolist() == [1.0] * 32
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert [pairs[place] for place in shared.argmax(1)] == [
        tuple(sorted(row)) for row in routing.chosen.tolist()
    ]


def test_fingerprint_is_stable_and_independent_of_key_order():
    described = spec_of().describe()
    turned = dict(reversed(described.items()))
    assert canonical(described) == canonical(turned)
    # SHA-256 of the canonical JSON, computed once and written down
    assert spec_of().fingerprint() == ("1d37e7c2a7bc789897cd2b239bc55a575018acc71b86cfaa248d867d8e8d6d2c")


@pytest.mark.parametrize("arm", ARMS)
def test_saved_model_gives_bit_identical_outputs(arm, tmp_path):
    model = new_quality_model(spec_of(arm=arm), seed=5)
    rows = torch.rand(17, 96)
    save_quality(model, tmp_path)
    again = load_quality(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(rows), again(rows))
    assert again.spec == model.spec
    assert json.loads((tmp_path / "arch.json").read_text()) == architecture(model.spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arch: arch["architecture"].update(hidden=64), "fingerprint"),
        (lambda arch: arch.update(fingerprint="0" * 64), "fingerprint"),
        (lambda arch: arch["architecture"].update(size="huge"), "does not describe"),
        (lambda arch: arch["architecture"].update(padic={"base": 5, "digits": 10**9}), "does not describe"),
        (lambda arch: arch.pop("architecture"), "does not describe"),
    ],
)
def test_changed_architecture_is_rejected(change, message, tmp_path):
    save_quality(new_quality_model(spec_of(arm="sheaf-padic"), seed=0), tmp_path)
    stored = json.loads((tmp_path / "arch.json").read_text())
    change(stored)
    (tmp_path / "arch.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path / "arch.json")


def test_tensors_of_another_size_are_rejected(tmp_path):
    save_quality(new_quality_model(spec_of(arm="dense"), seed=0), tmp_path)
    (tmp_path / "arch.json").write_text(json.dumps(architecture(spec_of())))
    with pytest.raises(ModelError, match="do not match its config.json"):
        load_quality(tmp_path)


def test_costs_follow_from_the_shape():
    actual = quality_costs(spec_of(), rows=128, optimizer="adamw", momentum=0.9)
    assert actual["bytes"]["weights"] == 4 * 195_540
    assert actual["bytes"]["moments"] == 8 * 195_540
    assert actual["flops_per_row"]["forward"] == 2 * (96 * 4 + 4 * (96 * 128 + 2 * 128 * 128 + 128 * 20))
    plain = quality_costs(spec_of(), rows=1, optimizer="sgd", momentum=0.0)
    assert plain["bytes"]["moments"] == 0


def test_tie_width_follows_from_the_digits():
    assert Padic(5, 6, 4).tie == 25
    assert Padic(5, 6, 6).tie == 1
    assert Padic(2, 4, 1).largest == 15
