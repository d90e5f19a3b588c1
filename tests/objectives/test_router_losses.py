"""Router losses and statistics, compared with transformers and formulas, for different micro-batches."""

import json
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import whet
from tiny import random_examples, run_config
from whet.config.load_config import validate_config
from whet.data.batches import make_batch
from whet.errors import DataError
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.models.moe import Routing, moe_layers
from whet.objectives.objective import FrozenForward, Loss, Objective
from whet.objectives.router_losses import RoutedObjective, load_balancing_loss, router_z_losses
from whet.objectives.sft import SFT
from whet.training.callbacks import ModelCallback
from whet.training.router_balancing import RouterMetrics
from whet.training.trainer import Trainer

EXPERTS, TOP_K, LAYERS = 5, 2, 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, pad_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    made = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(config).save_pretrained(made)
    return made


def routings(tokens=40):
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(tokens, EXPERTS, generator=generator, requires_grad=True) for _ in range(LAYERS)]
    return [Routing(each, each.topk(TOP_K).indices) for each in logits]


@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing_loss_matches_transformers(padded):
    layers = routings()
    mask = torch.rand(4, 10, generator=torch.Generator().manual_seed(1)) < 0.6 if padded else None
    actual = load_balancing_loss(layers, real=None if mask is None else mask.flatten())
    logits = tuple(each.logits for each in layers)
    expected = load_balancing_loss_func(logits, EXPERTS, TOP_K, None if mask is None else mask.long())
    torch.testing.assert_close(actual, expected)
    for a, b in zip(torch.autograd.grad(actual, logits), torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(a, b)


def test_even_load_gives_top_k_and_collapse_more():
    even = Routing(
        torch.zeros(EXPERTS, EXPERTS), torch.stack([torch.arange(EXPERTS), torch.arange(EXPERTS).roll(1)], 1)
    )
    assert load_balancing_loss([even]).item() == pytest.approx(TOP_K)
    one = Routing(torch.tensor([[50.0, 0, 0, 0, 0]] * 6), torch.tensor([[0, 1]] * 6))
    assert load_balancing_loss([one]).item() == pytest.approx(EXPERTS)


def test_z_loss_matches_its_formula():
    [routing, *_] = routings()
    expected = routing.logits.double().exp().sum(-1).log().square()
    torch.testing.assert_close(router_z_losses(routing).double(), expected, rtol=1e-5, atol=1e-6)


def settings(directory, **run):
    return validate_config(
        {
            "model": str(directory),
            "data": {"train": "unused"},
            "run": {"steps": 3, "batch_size": 6, "precision": "fp32", **run},
        }
    )


def stepped(directory, micro_batches, *, recompute=False, **weights):
    """Run one step; return its metrics, the gradients before the update, and the number of forward passes."""
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True).grad_checkpoint = recompute
    calls = []
    model.embed_tokens.register_forward_hook(lambda *_: calls.append(1))
    objective = RoutedObjective(SFT(), moe_layers(model), **weights)
    trainer = Trainer(model, objective, [], settings(directory))
    seen = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    metrics = trainer.step(micro_batches)
    RouterMetrics(moe_layers(model), range(LAYERS)).on_step_end(1, metrics)
    return metrics, seen, len(calls)


def alone(directory, examples):
    """Return the router logits of each single example, from transformers: [layers][tokens, experts]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        each = [
            model(torch.tensor([e.tokens[:-1]]), output_router_logits=True).router_logits for e in examples
        ]
    return [torch.cat(parts) for parts in zip(*each, strict=True)]


def micro_batch_splits(examples):
    yield "padded", [make_batch([[example] for example in examples], width=64)]
    yield "packed", [make_batch([examples[:2], examples[2:]])]
    yield "uneven", [make_batch([examples[:1]]), make_batch([[e] for e in examples[1:]])]


@pytest.mark.parametrize("recompute", [False, True])
def test_metrics_cover_real_tokens_for_all_micro_batches(directory, recompute):
    examples = random_examples(5)
    expected = alone(directory, examples)
    for name, micro_batches in micro_batch_splits(examples):
        metrics, _, calls = stepped(directory, micro_batches, recompute=recompute)
        assert calls == len(micro_batches), "no second pass"
        for layer, logits in enumerate(expected):
            probabilities = logits.double().softmax(-1)
            chosen = probabilities.topk(TOP_K).indices
            share = chosen.flatten().bincount(minlength=EXPERTS) / chosen.numel()
            top1 = chosen[:, 0].bincount(minlength=EXPERTS) / len(chosen)
            entropy = -(probabilities * probabilities.log()).sum(-1).mean()
            assert metrics["router_share"][layer] == pytest.approx(share.tolist(), abs=2e-6), name
            assert metrics["router_top1_share"][layer] == pytest.approx(top1.tolist(), abs=2e-6)
            assert metrics["router_entropy"][layer] == pytest.approx(entropy.item(), abs=1e-5)
            confidence = probabilities.amax(-1).mean().item()
            assert metrics["router_confidence"][layer] == pytest.approx(confidence, abs=1e-5)
            violation = share.max() * EXPERTS - 1
            assert metrics["router_max_violation"][layer] == pytest.approx(violation.item(), abs=1e-5)
            assert metrics["router_dead_experts"][layer] == (share == 0).sum()
        assert metrics["router_entropy_mean"] == pytest.approx(
            sum(metrics["router_entropy"]) / LAYERS, abs=1e-6
        )
        mean = torch.tensor(metrics["router_share"]).mean(0).tolist()
        assert metrics["per_expert_share"] == pytest.approx(mean, abs=1e-6)
        assert metrics["router_dropped_tokens"] == 0


def relative(a, b):
    return (
        sum((a[n] - b[n]).double().square().sum() for n in a) / sum(b[n].double().square().sum() for n in b)
    ).sqrt()


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradient_with_load_balancing_match_transformers(directory, recompute):
    examples = random_examples(4, seed=3, shortest=20, longest=20)
    batch = make_batch([[e] for e in examples])
    metrics, actual, _ = stepped(directory, [batch], load_balancing=0.7, recompute=recompute)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model(batch.tokens, output_router_logits=True)
    hard = F.cross_entropy(out.logits.flatten(0, 1), batch.targets.flatten())
    loss = hard + 0.7 * load_balancing_loss_func(out.router_logits, EXPERTS, TOP_K)
    loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["load_balancing_loss"] == pytest.approx((loss - hard).item() / 0.7, rel=1e-4)
    # the trainer clips: compare directions and the ratio of all norms
    ours = {f"model.{n}" if n != "lm_head.weight" else n: g for n, g in actual.items()}
    scale = metrics["grad_norm"] / torch.stack([g.norm() for g in ours.values()]).norm()
    assert relative({n: g * scale for n, g in ours.items()}, theirs) < 1e-4


def test_load_balancing_depends_on_the_micro_batches_but_z_loss_does_not(directory):
    examples = random_examples(5)
    results = {
        term: {name: stepped(directory, cut, **{term: 5.0})[:2] for name, cut in micro_batch_splits(examples)}
        for term in ("z_loss", "load_balancing")
    }
    plain, reference = results["z_loss"]["padded"]
    for name in ("packed", "uneven"):
        metrics, actual = results["z_loss"][name]
        assert relative(actual, reference) < 1e-5, name
        assert metrics["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert metrics["router_z_loss"] == pytest.approx(plain["router_z_loss"], rel=1e-4)
    balanced = results["load_balancing"]
    assert balanced["packed"][0]["loss"] == pytest.approx(balanced["padded"][0]["loss"], rel=1e-5)
    assert relative(balanced["uneven"][1], balanced["padded"][1]) > 1e-3, "else it need not be declared"


def test_router_terms_are_auxiliary_and_not_evaluated(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    objective = RoutedObjective(SFT(), moe_layers(model), load_balancing=1.0, z_loss=1.0)
    assert objective.per_micro_batch == {"load_balancing_loss"}
    assert objective.auxiliary == {"load_balancing_loss", "router_z_loss"}
    batches = [make_batch([[e] for e in random_examples(3)])]
    with_terms = Trainer(model, objective, [], settings(directory)).evaluate(batches)
    without = Trainer(model, SFT(), [], settings(directory)).evaluate(batches)
    for key in ("eval_loss", "eval_perplexity"):
        assert with_terms[key] == without[key]
    assert with_terms.keys() == without.keys()


def test_step_without_supervised_tokens_is_an_error(directory):
    from dataclasses import replace

    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    objective = RoutedObjective(SFT(), moe_layers(model), z_loss=1.0)
    [example] = random_examples(1)
    batch = make_batch([[replace(example, supervised=[False] * len(example.tokens))]])
    with pytest.raises(DataError, match="no supervised tokens"):
        Trainer(model, objective, [], settings(directory)).step([batch])


def test_bf16_forward_has_finite_metrics(directory):
    from whet.hardware import Precision

    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    objective = RoutedObjective(SFT(), moe_layers(model), load_balancing=0.1, z_loss=0.1)
    mixed = Precision(torch.bfloat16, torch.float32, torch.bfloat16, "test")
    trainer = Trainer(model, objective, [], settings(directory), precision=mixed)
    batches = [make_batch([[e] for e in random_examples(5)])]
    exact = stepped(directory, batches, load_balancing=0.1, z_loss=0.1)[0]
    assert trainer.step(batches)["loss"] == pytest.approx(exact["loss"], rel=0.05)


def test_objective_with_two_forward_passes_has_the_same_terms(directory):
    class Twice(SFT):
        def loss(self, model, batch):
            model.hidden(batch.tokens, batch.positions, batch.layout())
            return super().loss(model, batch)

    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    batch = make_batch([[e] for e in random_examples(5)])
    actual = []
    for inner in (SFT(), Twice()):
        objective = RoutedObjective(inner, moe_layers(model), load_balancing=1.0, z_loss=1.0)
        actual.append({name: value.item() for name, value in objective.loss(model, batch).sums.items()})
    assert actual[0] == pytest.approx(actual[1], rel=1e-5)


def lean_to_one_expert(gate, inputs, logits):
    """Set the first expert's row to the mean of the hidden states, once."""
    if not hasattr(gate, "leant"):
        mean = inputs[0].detach().mean(0)
        gate.weight.data[0] = 8 * mean / mean.norm() ** 2
        gate.leant = True
    return torch.nn.functional.linear(inputs[0], gate.weight)


def test_load_balancing_spreads_the_load(directory):
    """Only routers that prefer one expert are trained; only the loss makes them use other experts."""
    actual = {}
    for weight in (0.0, 20.0):
        model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
        model.requires_grad_(False)
        batch = make_batch([random_examples(12)])
        for layer in moe_layers(model):
            layer.gate.requires_grad_(True)
            layer.gate.register_forward_hook(lean_to_one_expert, prepend=True)
        objective = RoutedObjective(SFT(), moe_layers(model), load_balancing=weight)
        made = validate_config(
            {**settings(directory).model_dump(by_alias=True), "optim": {"lr": 5e-2, "schedule": "constant"}}
        )
        trainer = Trainer(model, objective, [], made)
        reader = RouterMetrics(moe_layers(model), range(LAYERS))
        violations = []
        for step in range(40):
            metrics = trainer.step([batch])
            reader.on_step_end(step + 1, metrics)
            violations.append(sum(metrics["router_max_violation"]) / LAYERS)
        actual[weight] = violations[0], violations[-1]
    assert actual[0.0][0] == actual[20.0][0] > 0.7
    assert actual[20.0][1] < 0.5 * actual[0.0][1], actual


class Inner(Objective):
    """An objective whose attributes all differ from the defaults."""

    coefficients: ClassVar = {"own": 2.0}
    heads = torch.nn.Linear(2, 2)
    likelihood = "part"
    uses_token_weights = True
    auxiliary = frozenset({"own"})
    per_micro_batch = frozenset({"own"})
    reports: ClassVar = {"part": {"own": 1.0}}
    unit = "rows"
    progress: ClassVar = {"own": "own"}
    reads_lm_head = False
    recomputes_logits = True
    prediction_heads = torch.nn.Linear(2, 2)
    parts: ClassVar = {"a": SFT()}

    def weights(self, batch):
        return {"own": 1.0}

    def loss(self, model, batch):
        return Loss({"own": torch.zeros(())})

    def summarise(self, outputs, batches):
        return {"seen": len(batches)}

    def frozen_forwards(self, model):
        return [FrozenForward(model, adapters=False)]


def test_attributes_of_the_inner_objective_are_forwarded():
    inner = Inner()
    routed = RoutedObjective(inner, moe_layers(new_decoder(preset_spec("nano-moe"), seed=0)))
    attributes = {name for name in vars(Objective) if not name.startswith("_")} - {"weights", "loss"}
    values = attributes - {"summarise", "frozen_forwards"}
    for name in values:
        assert getattr(inner, name) != getattr(Objective, name), f"the test says nothing about {name}"
        assert getattr(routed, name) == getattr(inner, name), name
    assert routed.summarise([], [1, 2]) == {"seen": 2}
    assert routed.frozen_forwards("model") == [("model", False)]


@pytest.mark.parametrize(
    "objective", [{"kind": "mtp", "n_predict": 2}, {"kind": "classify", "classes": ["a", "b"]}]
)
def test_heads_of_moe_models_are_trained_and_counted(objective, tiny_directory, tmp_path):
    """Recipes with heads on an MoE model: parameters, gradients, FLOPs and the saved model."""
    seen = {}

    class Look(ModelCallback):
        def on_train_begin(self, run):
            heads = list(self.trainer.objective.heads.parameters())
            assert {id(p) for p in heads} <= {id(p) for p in self.trainer.trained}
            seen.update(heads=heads, before=[p.detach().clone() for p in heads])

    config = run_config(
        tiny_directory, tmp_path, objective=objective, method={"kind": "full"}, run={"steps": 2}
    )
    config["model"] = {
        "preset": "nano-moe",
        "d_model": 32,
        "heads": 2,
        "width": 16,
        "layers": 2,
        "experts": 4,
    }
    config["model"] |= {"tokenizer": str(tiny_directory), "vocab_size": 260}
    config["experts"] = {"load_balancing": 0.01}
    if objective["kind"] == "classify":
        rows = [{"text": f"{'yes ' * (n % 5)}{n}", "label": "ab"[n % 2]} for n in range(24)]
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config["data"] = {"train": str(tmp_path / "texts.jsonl"), "max_length": 64}
        config["objective"] = {**objective, "probe": False}
    whet.train(config, [Look()])
    assert seen["heads"]
    for before, after in zip(seen["before"], seen["heads"], strict=True):
        assert not torch.equal(before, after) or before.ndim == 1  # a bias or norm may stay
