"""Full fine-tuning matches transformers if the pad token occurs in the text, and weight decay of embeddings."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

import whet
from tiny import random_examples, run_config, write_tiny_model
from whet.adapters.modules_to_save import wrap_modules_to_save
from whet.config.load_config import validate_config
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
STEPS, LR, DECAY = 4, 1e-2, 0.1
SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=64, pack=False)


def stream():
    """Return batches in which the pad token is both an input and a target."""
    examples = random_examples(20, longest=30, vocab=16)
    inputs = {token for example in examples for token in example.tokens[:-1]}
    targets = {t for e in examples for t, on in zip(e.tokens, e.supervised, strict=True) if on}
    assert PAD in inputs & targets
    return BatchStream(examples, SETTINGS, seed=0)


def train_transformers(directory, *, padding=True):
    """Train with a plain transformers loop. Without `padding`, gradients are those of the loss itself."""
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
    optimizer = torch.optim.AdamW(groups, lr=LR)
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


def train_whet(directory, tmp_path, *, bridge=False, **optim):
    if bridge:
        model = load_bridge(directory, dtype=torch.float32, device=torch.device("cpu"))
    else:
        model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    settings = {"lr": LR, "weight_decay": DECAY, "schedule": "constant", "warmup": 0, "clip": None}
    config = run_config(directory, tmp_path, method={"kind": "full"}, optim={**settings, **optim})
    WhetTrainer(model, SFT(), stream(), validate_config(config), total_steps=STEPS).fit()
    return {model.hf_name(name): p.detach() for name, p in model.named_parameters()}


def max_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("padded")
    write_tiny_model(path, pad_token_id=PAD, tie_word_embeddings=request.param)
    return path


@pytest.mark.parametrize("bridge", [False, True], ids=["native", "bridge"])
def test_full_fine_tuning_matches_transformers_with_both_options(directory, tmp_path, bridge):
    ours = train_whet(directory, tmp_path, bridge=bridge, freeze_pad_row=True, decay_embeddings=True)
    assert max_difference(ours, train_transformers(directory)) < 2e-5


def test_every_row_has_the_gradient_of_the_loss_by_default(directory, tmp_path):
    ours = train_whet(directory, tmp_path, decay_embeddings=True)
    assert max_difference(ours, train_transformers(directory, padding=False)) < 2e-5
    assert max_difference(ours, train_transformers(directory)) > 1e-3


def test_only_the_gradient_from_inputs_is_dropped(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    freeze_pad_row(model)
    SFT().loss(model, next(stream())[0]).sums["loss"].backward()
    row = model.embed_tokens.weight.grad[PAD]
    assert bool(row.any()) == model.spec.tied_head
    assert model.head().weight.grad[PAD].any()


def test_embedding_trained_with_adapters_is_covered(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    if model.spec.tied_head:
        pytest.skip("its head would be trained as well")
    wrap_modules_to_save(model, ["embed_tokens"])
    freeze_pad_row(model)
    SFT().loss(model, next(stream())[0]).sums["loss"].backward()
    gradient = model.embed_tokens.trained.weight.grad
    assert gradient.any()
    assert not gradient[PAD].any()


def test_model_without_a_pad_token_is_rejected(tmp_path):
    write_tiny_model(tmp_path)
    model, _ = whet.load(tmp_path, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="no pad token whose row transformers would freeze"):
        freeze_pad_row(model)


def test_families_with_padding_idx_in_transformers():
    """All native families except gpt2 have one, including by the default of their config class."""
    from whet.models.families import FAMILIES
    from whet.models.pad_row import _WITHOUT_PADDING_IDX

    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 64, "num_experts": 2, "num_local_experts": 2,
             "n_layer": 1, "n_embd": 32, "n_head": 4}  # fmt: skip
    for name in FAMILIES.keys() - {"whet"}:
        config = AutoConfig.for_model(name, pad_token_id=PAD, **small)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        expected = None if name in _WITHOUT_PADDING_IDX else PAD
        assert model.get_input_embeddings().padding_idx == expected, name


def test_embeddings_decay_only_with_decay_embeddings(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    model.requires_grad_(True)

    def decayed_parameters(section):
        groups = parameter_groups(section, model)
        return {id(p) for group in groups if group.weight_decay for p in group.parameters}

    default, theirs = (
        decayed_parameters(Optim(weight_decay=DECAY, decay_embeddings=on)) for on in (False, True)
    )
    assert theirs - default == {id(model.embed_tokens.weight)}
    reference = AutoModelForCausalLM.from_pretrained(directory)
    tensors = dict(reference.named_parameters())  # tied weights once
    names = tensors.keys() & set(Trainer.get_decay_parameter_names(None, reference))
    assert {model.hf_name(name) for name, p in model.named_parameters() if id(p) in theirs} == names
