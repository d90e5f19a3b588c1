"""Settings that must not change a run: micro-batches, packing, recomputation and compilation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import whet
from tiny import random_examples
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream, make_batch
from whet.data.packing import StepSettings
from whet.objectives.sft import SFT
from whet.ops.dispatch import REFERENCE, current_paths
from whet.training.trainer import Trainer

# the order of float32 sums differs between cuts: relative L2 over all gradients
TOLERANCE = 2e-6


@pytest.fixture(autouse=True, params=["fast paths", "reference"])
def paths(request, monkeypatch):
    """Run every test with the fast paths, and with plain PyTorch."""
    if request.param == "reference":
        monkeypatch.setenv("WHET_REFERENCE", "1")
    assert (current_paths() == REFERENCE) == (request.param == "reference")


def config(tiny_directory):
    return validate_config(
        {
            "model": str(tiny_directory),
            "data": {"train": "unused"},
            "run": {"steps": 3, "batch_size": 6, "precision": "fp32"},
        }
    )


def micro_batch_splits(examples):
    """Return the same step as different micro-batches: packed, padded, one by one, and of uneven size."""
    yield "packed", [make_batch([examples])]
    yield "padded", [make_batch([[example] for example in examples])]
    yield "one by one", [make_batch([[example]]) for example in examples]
    yield (
        "uneven",
        [make_batch([examples[:1]]), make_batch([examples[1:4]]), make_batch([[e] for e in examples[4:]])],
    )
    yield "two packed rows", [make_batch([examples[:3], examples[3:]])]


def gradients(model, examples, micro_batches, tiny_directory):
    """Return the gradients of Trainer.step before its update."""
    trainer = Trainer(model, SFT(), [], config(tiny_directory))
    seen = {}

    def capture(optimizer, *args):
        seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        for p in model.parameters():
            p.grad = None

    trainer.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: capture(optimizer))
    metrics = trainer.step(micro_batches)
    return metrics, seen


def relative_difference(a, b):
    assert a.keys() == b.keys()
    return (
        sum((a[name] - b[name]).double().square().sum() for name in a)
        / sum(b[name].double().square().sum() for name in b)
    ).sqrt()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_gradient_does_not_depend_on_the_micro_batches(tiny_directory, method):
    examples = random_examples(6)
    results = {}
    for name, micro_batches in micro_batch_splits(examples):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
        if method == "lora":
            torch.manual_seed(0)
            whet.attach_lora(model, rank=4)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data += 0.05
        else:
            model.requires_grad_(True)
        results[name] = gradients(model, examples, micro_batches, tiny_directory)
    reference_metrics, reference = results["padded"]
    for name, (metrics, actual) in results.items():
        assert relative_difference(actual, reference) < TOLERANCE, name
        assert metrics["loss"] == pytest.approx(reference_metrics["loss"], rel=1e-5), name
        assert metrics["tokens"] == reference_metrics["tokens"]
        assert metrics["supervised_tokens"] == reference_metrics["supervised_tokens"]


def test_loss_is_the_mean_over_all_supervised_tokens_of_the_step(tiny_directory):
    """The mean of micro-batch means, which some trainers report, is a different, wrong value."""
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)
    examples = random_examples(5, seed=2)
    total, count, means = 0.0, 0, []
    for example in examples:
        ids = torch.tensor([example.tokens])
        with torch.no_grad():
            logprobs = reference(ids).logits.double().log_softmax(-1)[0, :-1]
        chosen = torch.tensor(example.supervised[1:])
        losses = -logprobs[torch.arange(len(chosen)), ids[0, 1:]][chosen]
        total, count = total + losses.sum().item(), count + len(losses)
        means.append(losses.mean().item())
    metrics, _ = gradients(model, examples, [make_batch([[e]]) for e in examples], tiny_directory)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["loss"] != pytest.approx(sum(means) / len(means), rel=1e-4)


def bridge_directory(tmp_path):
    torch.manual_seed(0)
    settings = MistralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=None, pad_token_id=None,
    )  # fmt: skip
    MistralForCausalLM(settings).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["native", "bridge"])
def test_packed_logits_equal_solo_logits(tiny_directory, tmp_path, kind):
    directory = tiny_directory if kind == "native" else bridge_directory(tmp_path)
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    examples = random_examples(5, seed=1)
    batch = make_batch([examples[:2], examples[2:]])  # the shorter row ends in padding
    with torch.no_grad():
        packed = model.hidden(batch.tokens, batch.positions, batch.layout())
        for row, group in enumerate((examples[:2], examples[2:])):
            start = 0
            for example in group:
                solo = model.hidden(torch.tensor([example.tokens[:-1]]))
                torch.testing.assert_close(
                    packed[row, start : start + example.length], solo[0], rtol=1e-5, atol=1e-5
                )
                start += example.length


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_checkpointing_does_not_change_gradients(tiny_directory, packed):
    examples = random_examples(4, seed=3)
    batch = make_batch([examples]) if packed else make_batch([[example] for example in examples])
    actual = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
        whet.attach_lora(model, rank=4, dropout=0.2).grad_checkpoint = recompute
        for parameter in model.parameters():
            parameter.data += 0.05 * parameter.requires_grad  # B leaves zero, so that A has a gradient
        actual.append(gradients(model, examples, [batch], tiny_directory)[1])
    for name, gradient in actual[0].items():
        assert torch.equal(gradient, actual[1][name]), name


def test_gradient_checkpointing_recomputes_each_block(tiny_directory):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=4).grad_checkpoint = True
    calls = []
    model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.hidden(torch.arange(6)[None]).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("pack", [True, False])
def test_micro_batch_size_does_not_change_the_examples_of_a_step(pack):
    examples = random_examples(50, seed=5)
    actual = []
    for micro in (64, 200):
        stream = BatchStream(examples, StepSettings(None, 200, micro, pack=pack), seed=7)
        actual.append([sorted(o for batch in next(stream) for o in batch.origins) for _ in range(12)])
    assert all(steps == actual[0] for steps in actual)


def test_training_updates_every_adapter_parameter_and_no_frozen_one(tiny_directory):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, SFT(), [], config(tiny_directory))
    for seed in range(2):  # A moves once B has left zero
        trainer.step([make_batch([random_examples(6, seed=seed)])])
    for name, p in model.named_parameters():
        moved = not torch.equal(p, before[name])
        assert moved == ("lora_" in name), name
