"""Diagnosis of number formats: against gradients computed plainly, on models that are healthy and on ones that are not."""

import copy
import math

import pytest
import torch

from tiny import random_examples
from whet.adapters.attach import attach_lora
from whet.config.quality import Quality
from whet.data.batches import make_batch
from whet.data.sources.source import open_source
from whet.errors import DataError
from whet.models.from_scratch.init_weights import from_scratch
from whet.models.from_scratch.presets import preset_spec
from whet.objectives.objective import Loss, Objective
from whet.objectives.router_losses import RoutedObjective
from whet.objectives.sft import SFT
from whet.recipes.quality.regression import Regression
from whet.recipes.quality.row_batches import read_rows
from whet.recipes.quality.tabular_model import QualitySpec, new_quality_model
from whet.studies.diagnose import examine
from whet.studies.dtype_comparison import ComparisonRow, Examination, Path, PathResult


def tabular(arm="softmax", seed=0):
    return new_quality_model(QualitySpec.from_config(Quality(quality="nano", arm=arm)), seed=seed)


def rows(count=32):
    return read_rows(open_source(f"synth:quality:{count}"), inputs=96, outputs=20).batch(range(count))


def text_batch():
    return make_batch([[example] for example in random_examples(4, longest=24)])


def results(found):
    return {result.path.name: result for result in found.results}


def plain_gradients(model, loss):
    model.zero_grad()
    loss().backward()
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


def test_the_reference_is_the_plain_gradient_in_fp64_of_rows():
    model, batch = tabular(), rows()
    found = examine(model, Regression(), batch)
    wide = copy.deepcopy(model).double()
    expected = plain_gradients(
        wide,
        lambda: (wide(batch.column("features").double()) - batch.column("outcomes").double()).square().mean(),
    )
    assert found.reference == "fp64"
    for row in found.results[0].rows:
        assert row.reference == pytest.approx(expected[row.name], rel=1e-9)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_reference_is_the_plain_gradient_in_fp64_of_texts(tiny, adapters):
    """Tied embeddings get both parts, from below the cut and from above; frozen weights are not there."""
    model, _ = tiny
    if adapters:
        attach_lora(model, rank=4)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1)
    batch = text_batch()
    found = examine(model, SFT(), batch)
    wide = copy.deepcopy(model).double()

    def loss():
        logits = wide(batch.tokens).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100)

    expected = plain_gradients(wide, loss)
    named = [row.name for row in found.results[0].rows]
    assert named == [name for name, p in model.named_parameters() if p.requires_grad]
    for row in found.results[0].rows:
        # norms and the rotation are computed in fp32 at least, not wider
        assert row.reference == pytest.approx(expected[row.name], rel=1e-4)


class Guess(Objective):
    """An objective with a head of its own: the mean square of what it makes of the hidden states."""

    def __init__(self):
        self.coefficients = {"loss": 1.0}
        self.heads = torch.nn.Linear(32, 3)

    def weights(self, batch):
        return {"loss": float(batch.supervised)}

    def loss(self, model, batch):
        hidden = model.hidden(batch.tokens)
        return Loss({"loss": self.heads(hidden).square().sum()})


def test_what_an_objective_trains_beside_the_model_is_compared_too(tiny):
    model, objective, batch = tiny[0], Guess(), text_batch()
    found = examine(model, objective, batch)
    wide, head = copy.deepcopy(model).double(), copy.deepcopy(objective.heads).double()
    (head(wide.hidden(batch.tokens)).square().sum() / batch.supervised).backward()
    rows_found = {row.name: row for row in found.results[0].rows}
    assert rows_found["heads.weight"].reference == pytest.approx(float(head.weight.grad.norm()), rel=1e-4)
    slope = float(wide.layers[0].mlp.up_proj.weight.grad.norm())
    assert rows_found["layers.0.mlp.up_proj.weight"].reference == pytest.approx(slope, rel=1e-4)
    assert found.verdict == "fine"
    assert objective.heads.weight.grad is None


def test_every_path_starts_from_the_gradient_of_the_reference():
    """By hand: outputs of rounded weights and rows, and the reference's slope of the loss behind them."""
    model, batch = tabular("dense"), rows()
    found = results(examine(model, Regression(), batch))["fp32"]
    wide = copy.deepcopy(model).double()
    outputs = wide(batch.column("features").double())
    upstream = (2 * (outputs - batch.column("outcomes")) / outputs.numel()).detach().float()
    narrow = copy.deepcopy(model)
    narrow.zero_grad()
    narrow(batch.column("features")).backward(upstream)
    for row in found.rows:
        assert row.norm == pytest.approx(float(narrow.get_parameter(row.name).grad.norm()), rel=1e-5)


def test_the_simulated_path_rounds_weights_and_activations():
    model, batch = tabular("dense"), rows(8)
    found = results(examine(model, Regression(), batch))["sim-fp16"]

    def half(x):
        return x.half().float()

    def stage(x):
        for layer in model.dense:
            if isinstance(layer, torch.nn.Linear):
                x = half(x @ half(layer.weight).T + half(layer.bias))
            elif isinstance(layer, torch.nn.LayerNorm):
                x = half(torch.nn.functional.layer_norm(x, x.shape[1:], half(layer.weight), half(layer.bias)))
            else:
                x = half(torch.nn.functional.gelu(x))
        return x

    with torch.no_grad():
        exact = copy.deepcopy(model).double()(batch.column("features").double())
        expected = float((stage(half(batch.column("features"))).double() - exact).abs().max())
    assert found.largest_difference == pytest.approx(expected, rel=1e-2)
    assert expected > 1e-4


@pytest.mark.parametrize("arm", ["softmax", "sheaf-padic", "dense"])
def test_a_healthy_model_of_rows_is_fine(arm):
    """All of it; but a row that goes to other experts in bf16 is a gradient elsewhere, and is said to be."""
    found = examine(tabular(arm), Regression(), rows(64))
    if arm != "sheaf-padic":
        assert found.verdict == "fine"
    assert [result.path.name for result in found.results] == ["fp32", "bf16", "fp16", "sim-bf16", "sim-fp16"]
    for result in found.results:
        assert result.verdict == ("moderate" if result.divergent else "fine")
        assert len(result.divergent) <= 1
        assert any(row.norm > 0 for row in result.rows)
        assert 0 < result.largest_difference < 1


def test_a_healthy_language_model_is_fine(tiny):
    found = examine(tiny[0], SFT(), text_batch())
    assert found.verdict == "fine"
    assert found.choices == []


def test_a_language_model_with_experts_shows_its_routing_and_its_routers_own_loss_counts():
    """The load-balancing loss reaches the routers below the cut; its gradient is in the reference."""
    spec = preset_spec("nano-moe", d_model=32, heads=2, width=16, layers=2, experts=4, vocab_size=300)
    model, batch = from_scratch(spec, seed=0), text_batch()
    layers = [layer.mlp for layer in model.layers]
    objective = RoutedObjective(SFT(), layers, load_balancing=0.5, z_loss=0.1)
    found = examine(model, objective, batch)
    wide = copy.deepcopy(model).double()
    same = RoutedObjective(SFT(), [layer.mlp for layer in wide.layers], load_balancing=0.5, z_loss=0.1)
    weights = same.weights(batch)
    expected = plain_gradients(
        wide,
        lambda: sum(
            same.coefficients[term] / weights[term] * value
            for term, value in same.loss(wide, batch).sums.items()
        ),
    )
    assert found.reference == "fp64"
    for row in found.results[0].rows:
        assert row.reference == pytest.approx(expected[row.name], rel=1e-9), row.name
    assert [len(choices) for choices in found.choices] == 2 * [batch.tokens.numel()]
    assert all(len(row) == spec.blocks[0].feedforward.top_k for row in found.choices[0])
    assert all(layer.record is None for layer in layers)


def test_a_model_that_overflows_fp16_is_major_and_its_parameters_are_named():
    model = tabular()
    with torch.no_grad():
        for expert in model.experts:
            expert[0].weight.mul_(1e6)  # the norm behind it makes it harmless in any wider format
    found = examine(model, Regression(), rows())
    by_name = results(found)
    assert found.verdict == by_name["fp16"].verdict == by_name["sim-fp16"].verdict == "major"
    assert by_name["fp32"].verdict == by_name["sim-bf16"].verdict == "fine"
    assert "experts.0.3.weight" in by_name["sim-fp16"].named("major")
    assert by_name["sim-fp16"].worst.ratio == math.inf
    assert by_name["sim-fp16"].largest_difference == math.inf


def test_a_language_model_that_overflows_fp16_is_major(tiny):
    model, _ = tiny
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight.mul_(2e3)
        model.layers[0].mlp.gate_proj.weight.mul_(2e3)
        model.layers[0].mlp.down_proj.weight.mul_(1e-6)
    by_name = results(examine(model, SFT(), text_batch()))
    assert by_name["sim-fp16"].verdict == by_name["fp16"].verdict == "major"
    assert by_name["fp32"].verdict == by_name["sim-bf16"].verdict == "fine"


def test_the_rules_of_a_row():
    assert ComparisonRow("a", 2.0, 4.0, 1.0).ratio == 2.0
    assert ComparisonRow("a", 0.0, 0.0, 1.0).ratio == 1.0
    assert ComparisonRow("a", 0.0, 1e-9, 0.0).ratio == math.inf
    assert ComparisonRow("a", 1.0, math.nan, math.nan).ratio == math.inf
    assert ComparisonRow("a", 2.0, 3.0, 1.0).relative == 0.5
    assert [ComparisonRow("a", 1.0, norm, 1.0).verdict for norm in (1, 2, 2.1, 5, 5.1, math.inf)] == [
        "fine", "fine", "moderate", "moderate", "major", "major",
    ]  # fmt: skip
    # too small is as wrong as too large, and a direction that is lost is not fine at any length
    assert [ComparisonRow("a", 1.0, norm, 1.0).verdict for norm in (0.5, 0.3, 0.1, 0.0)] == [
        "fine", "moderate", "major", "major",
    ]  # fmt: skip
    assert ComparisonRow("a", 1.0, 1.0, 0.98).verdict == "moderate"
    assert ComparisonRow("a", 1.0, 1.0, math.nan).verdict == "moderate"


def test_an_infinite_ratio_is_never_forgotten():
    bad, good = ComparisonRow("bad", 0.0, 1.0, 0.0), ComparisonRow("good", 1.0, 1.0, 1.0)
    for order in ([bad, good], [good, bad], [good, bad, good]):
        result = PathResult(Path("p", torch.float16), order, 0.0, [], [])
        assert (result.verdict, result.worst.name, result.worst.ratio) == ("major", "bad", math.inf)


def test_experts_that_get_no_row_have_zero_gradients_on_every_path_and_are_fine():
    model = tabular()
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([9.0, 5.0, -9.0, -9.0]))
    found = examine(model, Regression(), rows())
    for result in found.results:
        unused = [row for row in result.rows if row.name.startswith("experts.3.")]
        assert {(row.reference, row.norm, row.ratio, row.cosine) for row in unused} == {(0, 0, 1, 1)}
    assert found.verdict == "fine"


def divergences(arm):
    """Rows that go elsewhere where one expert always wins and the second place is a near-tie of two others."""
    batch, counts = rows(256), {}
    for seed in range(2):
        model = tabular(arm, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.router.bias.copy_(torch.tensor([-5.0, 0.0, 0.0, 5.0]))
            model.router.weight[2] = model.router.weight[1] + 2e-4 * torch.randn(96, generator=generator)
        for result in examine(model, Regression(), batch).results:
            counts[result.path.name] = counts.get(result.path.name, 0) + len(result.divergent)
    return counts


def test_planted_ties_diverge_and_do_not_with_the_sheaf_padic_router():
    """Measured: 70 of 512 rows in bf16 and 15 in fp16, and none."""
    plain, padic = divergences("softmax"), divergences("sheaf-padic")
    for path in ("bf16", "sim-bf16", "sim-fp16"):
        assert plain[path] > 10
        assert padic[path] == 0
    assert plain["fp32"] == padic["fp32"] == 0


def test_the_model_itself_is_left_as_it_was():
    model = tabular()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    examine(model, Regression(), rows(8))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.router.record is None
    assert "decide" not in vars(model)


def test_a_model_without_fp64_is_compared_with_fp32():
    class Narrow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(96, 20))

        def decide(self, features):
            if features.dtype == torch.float64:
                raise RuntimeError("no such kernel")
            return features @ self.weight

    batch = rows(4)
    found = Examination(
        Narrow(),
        batch,
        lambda model, b: model.decide(b.column("features")).sum(),
        cut="decide",
        readout=lambda _, x: x,
    ).diagnose()
    assert found.reference == "fp32"
    assert [result.path.name for result in found.results] == ["bf16", "fp16", "sim-bf16", "sim-fp16"]


def test_a_batch_without_a_gradient_is_refused(tiny):
    class Nothing(SFT):
        def loss(self, model, batch):
            found = super().loss(model, batch)
            return Loss({term: 0 * value for term, value in found.sums.items()})

    with pytest.raises(DataError, match="every gradient of this batch is zero"):
        examine(tiny[0], Nothing(), text_batch())
