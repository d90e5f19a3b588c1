"""Full fine-tuning against transformers where the pad token occurs in the text, and what decays."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

import whet
from tiny import random_examples, run_config, write_tiny_model
from whet.adapters.modules_to_save import retrain
from whet.config.load_config import make_config
from whet.config.optim import Optim
from whet.data.batches import BatchStream
from whet.data.packing import StepSettings
from whet.errors import ConfigError
from whet.model_io.load_transformers import load_bridge
from whet.models.pad_row import freeze_pad_row
from whet.objectives.sft import SFT
from whet.training.optim.param_groups import parameter_groups
from whet.training.trainer import Trainer as WhetTrainer

PAD = 7
STEPS, RATE, DECAY = 4, 1e-2, 0.1
SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=64, pack=False)


def stream():
    """Every token is often an input, the pad token, too, and it is a target."""
    examples = random_examples(20, longest=30, vocab=16)
    inputs = {token for example in examples for token in example.tokens[:-1]}
    targets = {t for e in examples for t, on in zip(e.tokens, e.supervised, strict=True) if on}
    assert PAD in inputs & targets
    return BatchStream(examples, SETTINGS, seed=0)


def of_transformers(directory, *, padding=True):
    """The loop that people write; `padding` off is the derivative of the loss itself."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert model.get_input_embeddings().padding_idx == PAD
    if not padding:
        model.get_input_embeddings().padding_idx = None
    decays = set(Trainer.get_decay_parameter_names(None, model))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name in decays], "weight_decay": DECAY},
        {"params": [p for name, p in named.items() if name not in decays], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    batches = stream()
    for _ in range(STEPS):
        step = next(batches)
        count = sum(batch.supervised for batch in step)
        for batch in step:
            logits = model(batch.tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in named.items()}


def of_whet(directory, tmp_path, *, bridge=False, **optim):
    if bridge:
        model = load_bridge(directory, dtype=torch.float32, device=torch.device("cpu"))
    else:
        model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    settings = {"lr": RATE, "weight_decay": DECAY, "schedule": "constant", "warmup": 0, "clip": None}
    config = run_config(directory, tmp_path, method={"kind": "full"}, optim={**settings, **optim})
    WhetTrainer(model, SFT(), stream(), make_config(config), total_steps=STEPS).fit()
    return {model.hf_name(name): p.detach() for name, p in model.named_parameters()}


def apart(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request, tmp_path_factory):
    found = tmp_path_factory.mktemp("padded")
    write_tiny_model(found, pad_token_id=PAD, tie_word_embeddings=request.param)
    return found


@pytest.mark.parametrize("bridge", [False, True], ids=["native", "bridge"])
def test_a_full_fine_tune_is_that_of_transformers_when_asked_for(directory, tmp_path, bridge):
    ours = of_whet(directory, tmp_path, bridge=bridge, freeze_pad_row=True, decay_embeddings=True)
    assert apart(ours, of_transformers(directory)) < 2e-5


def test_by_default_every_row_has_the_gradient_of_the_loss(directory, tmp_path):
    ours = of_whet(directory, tmp_path, decay_embeddings=True)
    assert apart(ours, of_transformers(directory, padding=False)) < 2e-5
    assert apart(ours, of_transformers(directory)) > 1e-3


def test_only_the_gradient_from_inputs_is_dropped(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    freeze_pad_row(model)
    SFT().loss(model, next(stream())[0]).sums["loss"].backward()
    row = model.embed_tokens.weight.grad[PAD]
    assert bool(row.any()) == model.spec.tied_head
    assert model.head().weight.grad[PAD].any()


def test_a_table_that_is_trained_beside_adapters_has_it_too(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    if model.spec.tied_head:
        pytest.skip("its head would be trained as well")
    retrain(model, ["embed_tokens"])
    freeze_pad_row(model)
    SFT().loss(model, next(stream())[0]).sums["loss"].backward()
    gradient = model.embed_tokens.trained.weight.grad
    assert gradient.any()
    assert not gradient[PAD].any()


def test_a_model_without_a_pad_token_has_no_such_row(tmp_path):
    write_tiny_model(tmp_path)
    model, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="no pad token whose row transformers would freeze"):
        freeze_pad_row(model)


def test_which_families_have_such_a_row_in_transformers():
    """Of those that are whet's own: all but gpt2; the default of a config class counts."""
    from whet.models.families import FAMILIES
    from whet.models.pad_row import _WITHOUT

    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 64, "num_experts": 2, "num_local_experts": 2,
             "n_layer": 1, "n_embd": 32, "n_head": 4}  # fmt: skip
    for name in FAMILIES.keys() - {"whet"}:
        config = AutoConfig.for_model(name, pad_token_id=PAD, **small)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        expected = None if name in _WITHOUT else PAD
        assert model.get_input_embeddings().padding_idx == expected, name


def test_embeddings_decay_only_when_asked_for(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)

    def decaying(section):
        groups = parameter_groups(section, model)
        return {id(p) for group in groups if group.weight_decay for p in group.parameters}

    usual, theirs = (decaying(Optim(weight_decay=DECAY, decay_embeddings=on)) for on in (False, True))
    assert theirs - usual == {id(model.embed_tokens.weight)}
    reference = AutoModelForCausalLM.from_pretrained(directory)
    tensors = dict(reference.named_parameters())  # without the second name of a tied one
    names = tensors.keys() & set(Trainer.get_decay_parameter_names(None, reference))
    assert {model.hf_name(name) for name, p in model.named_parameters() if id(p) in theirs} == names
