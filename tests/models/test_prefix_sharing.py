"""Prefix sharing is lossless, and is off if anything distinguishes equal positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

import tiny
import whet
from models.test_decoder import MODELS
from models.test_decoder import model as make_model
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.models.decoder import Decoder
from whet.models.prefix_sharing import MIN_SHARED_TOKENS, share_prefixes
from whet.objectives.sft import SFT
from whet.ops.attention import Layout
from whet.ops.dispatch import plan_for_device

PREFIX = list(range(100, 130))


def batch_of(documents):
    return make_batch([[Example([*tokens, 7], [True] * (len(tokens) + 1), "") for tokens in documents]])


def shared_of(batch):
    return share_prefixes(batch.tokens, batch.positions, batch.layout())


documents_with_shared_prefixes = st.lists(
    st.builds(
        lambda start, length, rest: [*start[:length], *rest] or [0],
        st.sampled_from([PREFIX, PREFIX[:20] + PREFIX, [1] * 40]),
        st.integers(0, 50),
        st.lists(st.integers(0, 3), max_size=40),
    ),
    min_size=1,
    max_size=8,
)


@given(documents_with_shared_prefixes)
def test_every_position_has_its_own_prefix(documents):
    batch = batch_of(documents)
    shared = shared_of(batch)
    if shared is None:
        return
    row, computed = batch.tokens[0], batch.tokens[0][shared.computed]
    assert torch.equal(computed[shared.sources], row)
    assert torch.equal(batch.positions[0][shared.computed][shared.sources], batch.positions[0])
    [lengths] = shared.layout.documents
    segments = computed.split(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    start = 0
    for tokens in documents:
        last = int(shared.sources[start + len(tokens) - 1])
        segment = int((starts <= last).sum()) - 1
        ancestors = [segments[index] for index in shared.layout.ancestors[segment]]
        prefix = torch.cat([*ancestors, segments[segment][: last - int(starts[segment]) + 1]])
        assert prefix.tolist() == tokens
        start += len(tokens)


def test_shared_prefix_is_stored_once():
    shared = shared_of(batch_of([[*PREFIX, 1, 2], [*PREFIX, 3], [5] * 20]))
    assert shared.layout.documents == ((30, 2, 1, 20),)
    assert shared.layout.ancestors == ((), (0,), (0,), ())


def test_nested_shared_prefixes():
    longer = [*PREFIX, *range(200, 220)]
    shared = shared_of(batch_of([[*longer, 1], [*longer, 2], [*PREFIX, 3]]))
    assert shared.layout.documents == ((30, 20, 1, 1, 1),)
    assert shared.layout.ancestors == ((), (0,), (0, 1), (0, 1), (0,))


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param([PREFIX], id="one document"),
        pytest.param(
            [[*PREFIX[: MIN_SHARED_TOKENS - 1], 1], [*PREFIX[: MIN_SHARED_TOKENS - 1], 2]], id="too short"
        ),
        pytest.param([PREFIX, PREFIX, *([n] * 100 for n in range(4))], id="too small a part of the row"),
        pytest.param([PREFIX, [0, *PREFIX]], id="at other positions"),
    ],
)
def test_unprofitable_or_different_prefixes_are_not_shared(documents):
    assert shared_of(batch_of(documents)) is None


def test_equal_tokens_at_different_positions_are_not_shared():
    tokens = torch.tensor([PREFIX * 2])
    assert share_prefixes(tokens, torch.arange(60)[None], Layout(documents=((30, 30),))) is None


@pytest.fixture
def counted(tiny_directory, monkeypatch):
    """Return a model, a batch of which a third is shared, and the positions computed per forward pass."""
    counts = []
    inner = Decoder._hidden
    monkeypatch.setattr(
        Decoder,
        "_hidden",
        lambda self, tokens, *rest: counts.append(tokens.shape[1]) or inner(self, tokens, *rest),
    )
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    return model, batch_of([[*PREFIX, 1, 2], [*PREFIX, 3], [5] * 20]), counts


def run(model, batch):
    return model.hidden(batch.tokens, batch.positions, batch.layout())


def test_model_computes_a_shared_prefix_once(counted):
    model, batch, counts = counted
    assert run(model, batch).shape[1] == 83
    assert counts == [53]


def test_forward_hook_disables_sharing(counted):
    model, batch, counts = counted
    seen = []
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    run(model, batch)
    assert counts == seen == [83]


def test_fsdp_hook_does_not_disable_sharing(counted):
    def gather(module, args):
        pass

    gather.__module__ = "torch.distributed.fsdp"
    model, batch, counts = counted
    model.layers[0].register_forward_pre_hook(gather)
    run(model, batch)
    assert counts == [53]


def test_dropout_disables_sharing(counted):
    model, batch, counts = counted
    whet.attach_lora(model, rank=2, dropout=0.5)
    run(model.train(), batch)
    run(model.eval(), batch)
    assert counts == [83, 53]


def test_experts_disable_sharing(counted):
    _, batch, counts = counted
    blocks, settings = MODELS["experts"]
    run(make_model(blocks, **{**settings, "vocab_size": 260, "max_positions": 128}), batch)
    assert counts == [83]


def test_planning_disables_sharing(counted):
    model, batch, counts = counted
    with plan_for_device("cpu"):
        run(model, batch)
    assert counts == [83]


def test_gradients_match_transformers_for_chats_with_a_shared_system_prompt(tiny_directory):
    prompt = [258, *range(97, 122), 256]
    chats = [prompt + tiny.random_examples(1, seed=seed)[0].tokens for seed in range(5)]
    batch = make_batch([[Example(tokens, [True] * len(tokens), "") for tokens in chats]])
    assert shared_of(batch) is not None
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    loss = SFT().loss(model, batch).sums["loss"]
    loss.backward()
    reference = AutoModelForCausalLM.from_pretrained(tiny_directory)
    total = sum(
        nn.functional.cross_entropy(
            reference(torch.tensor([tokens[:-1]])).logits[0], torch.tensor(tokens[1:]), reduction="sum"
        )
        for tokens in chats
    )
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-4)
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[model.hf_name(name)].grad, rtol=1e-4, atol=1e-4)
