"""FLOPs of a training step, compared with torch's counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from whet.adapters.attach import attach_lora
from whet.adapters.qlora import quantize_base
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.models.costs import flops_per_token
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.objectives.distill import Distillation
from whet.objectives.mtp import MultiTokenPrediction
from whet.objectives.preference import Preference
from whet.objectives.sft import SFT
from whet.training.observe.step_flops import step_flops, training_flops_per_token

LENGTH, ROWS = 48, 2
SHAPE = {"d_model": 64, "layers": 3, "heads": 4, "kv_heads": 2, "width": 96, "vocab_size": 128}


def build(method, **shape):
    model = new_decoder(preset_spec("nano", **{**SHAPE, **shape}), seed=0)
    if method == "full":
        return model.requires_grad_(True)
    if method == "qlora":
        quantize_base(model, device=torch.device("cpu"), dtype=torch.float32)
    attach_lora(model, **({"rank": 4} if method in ("lora", "qlora") else {"rank": 4, **method}))
    return model


def counted(model, objective):
    """Return the FLOPs of one step per token, with causal scores counted as half a square."""
    rows = [
        [Example(list(range(LENGTH + 1)), [True] * (LENGTH + 1), str(i), values=(0.0,))] for i in range(ROWS)
    ]
    batch = make_batch(rows)
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        sum(objective.loss(model, batch).sums.values()).backward()
    return counter.get_total_flops() / (ROWS * LENGTH)


def squared_scores(monkeypatch):
    """Count the full square of attention scores, as torch's counter does."""
    from whet.models import costs

    def every_pair(attention, length):
        return costs.score_flops(attention, length, visible_only=False)

    monkeypatch.setattr("whet.training.observe.step_flops.score_flops", every_pair)
    # and it knows no grouped product, but those of the loop
    monkeypatch.setattr("whet.ops.grouped_experts.grouped_mm_problem", lambda *_: "counted")


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("full", {}),
        ("full", {"tied_head": False}),
        ("full", {"experts": 4, "top_k": 2, "shared_experts": 1}),
        ("full", {"attention": "latent"}),
        ("lora", {}),
        ("qlora", {}),
        ({"layers": 1}, {}),
        ({"targets": "mlp"}, {}),
        ({"targets": "attention", "layers": [1]}, {}),
    ],
    ids=str,
)
def test_step_flops_match_torch(method, shape, monkeypatch):
    squared_scores(monkeypatch)
    model = build(method, **shape)
    ours = step_flops(model, SFT(), length=LENGTH)
    assert ours.computed == pytest.approx(counted(model, SFT()), rel=0.01)


def test_recomputation_is_not_counted_as_model_flops(monkeypatch):
    squared_scores(monkeypatch)
    model = build("full")
    plain = step_flops(model, SFT(), length=LENGTH)
    model.grad_checkpoint = True
    again = step_flops(model, SFT(), length=LENGTH)
    assert again.model == plain.model
    assert again.computed == pytest.approx(counted(model, SFT()), rel=0.01)


@pytest.mark.parametrize("kind", ["dpo-offline", "dpo-model", "dpo-adapters", "distill", "mtp"])
def test_flops_of_frozen_models_and_heads(kind, monkeypatch):
    squared_scores(monkeypatch)
    model = build("lora" if kind == "dpo-adapters" else "full")
    objective = {
        "dpo-offline": lambda: Preference("dpo", beta=0.1),
        "dpo-model": lambda: Preference("dpo", beta=0.1, reference=build("full").requires_grad_(False)),
        "dpo-adapters": lambda: Preference("dpo", beta=0.1, reference="adapters-off"),
        "distill": lambda: Distillation([(build("full", layers=5), 1.0)], alpha=1.0),
        "mtp": lambda: MultiTokenPrediction(model, 2),
    }[kind]()
    ours = step_flops(model, objective, length=LENGTH)
    assert ours.computed == pytest.approx(counted(model, objective), rel=0.01)


def test_full_training_takes_three_forward_passes():
    model = build("full")
    assert training_flops_per_token(model, length=100) == pytest.approx(3 * flops_per_token(model.spec, 100))


def test_frozen_weights_save_their_weight_gradient():
    full, lora = build("full", layers=12), build({"rank": 1}, layers=12)
    share = training_flops_per_token(lora, length=64) / training_flops_per_token(full, length=64)
    assert 0.66 < share < 0.75
