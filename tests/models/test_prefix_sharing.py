"""A row without what is in it twice: nothing is lost, and nothing that tells places apart is misled."""

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
from whet.models.prefix_sharing import LEAST, share_prefixes
from whet.objectives.sft import SFT
from whet.ops.attention import Layout
from whet.ops.dispatch import planned_for

BEGINNING = list(range(100, 130))


def batch_of(documents):
    return make_batch([[Example([*tokens, 7], [True] * (len(tokens) + 1), "") for tokens in documents]])


def shared_of(batch):
    return share_prefixes(batch.tokens, batch.positions, batch.layout())


documents_of_a_family = st.lists(
    st.builds(
        lambda begin, cut, rest: [*begin[:cut], *rest] or [0],
        st.sampled_from([BEGINNING, BEGINNING[:20] + BEGINNING, [1] * 40]),
        st.integers(0, 50),
        st.lists(st.integers(0, 3), max_size=40),
    ),
    min_size=1,
    max_size=8,
)


@given(documents_of_a_family)
def test_every_place_finds_its_own_past(documents):
    batch = batch_of(documents)
    shared = shared_of(batch)
    if shared is None:
        return
    row, kept = batch.tokens[0], batch.tokens[0][shared.kept]
    assert torch.equal(kept[shared.places], row)
    assert torch.equal(batch.positions[0][shared.kept][shared.places], batch.positions[0])
    [lengths] = shared.layout.documents
    pieces = kept.split(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    begin = 0
    for tokens in documents:
        last = int(shared.places[begin + len(tokens) - 1])
        piece = int((starts <= last).sum()) - 1
        above = [pieces[other] for other in shared.layout.above[piece]]
        past = torch.cat([*above, pieces[piece][: last - int(starts[piece]) + 1]])
        assert past.tolist() == tokens
        begin += len(tokens)


def test_what_is_shared_is_there_once():
    shared = shared_of(batch_of([[*BEGINNING, 1, 2], [*BEGINNING, 3], [5] * 20]))
    assert shared.layout.documents == ((30, 2, 1, 20),)
    assert shared.layout.above == ((), (0,), (0,), ())


def test_two_levels():
    longer = [*BEGINNING, *range(200, 220)]
    shared = shared_of(batch_of([[*longer, 1], [*longer, 2], [*BEGINNING, 3]]))
    assert shared.layout.documents == ((30, 20, 1, 1, 1),)
    assert shared.layout.above == ((), (0,), (0, 1), (0, 1), (0,))


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param([BEGINNING], id="one document"),
        pytest.param([[*BEGINNING[: LEAST - 1], 1], [*BEGINNING[: LEAST - 1], 2]], id="too short"),
        pytest.param([BEGINNING, BEGINNING, *([n] * 100 for n in range(4))], id="too little of the row"),
        pytest.param([BEGINNING, [0, *BEGINNING]], id="at other places"),
    ],
)
def test_what_is_not_worth_it_or_not_the_same(documents):
    assert shared_of(batch_of(documents)) is None


def test_the_same_tokens_at_other_positions_are_not_the_same():
    tokens = torch.tensor([BEGINNING * 2])
    assert share_prefixes(tokens, torch.arange(60)[None], Layout(documents=((30, 30),))) is None


@pytest.fixture
def counted(tiny_directory, monkeypatch):
    """A model, a batch of which a third is shared, and how many places each forward pass computes."""
    counts = []
    inner = Decoder._hidden
    monkeypatch.setattr(
        Decoder,
        "_hidden",
        lambda self, tokens, *rest: counts.append(tokens.shape[1]) or inner(self, tokens, *rest),
    )
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    return model, batch_of([[*BEGINNING, 1, 2], [*BEGINNING, 3], [5] * 20]), counts


def run(model, batch):
    return model.hidden(batch.tokens, batch.positions, batch.layout())


def test_a_model_computes_it_once(counted):
    model, batch, counts = counted
    assert run(model, batch).shape[1] == 83
    assert counts == [53]


def test_a_hook_sees_every_place(counted):
    model, batch, counts = counted
    seen = []
    model.layers[0].register_forward_hook(lambda module, given, output: seen.append(output.shape[1]))
    run(model, batch)
    assert counts == seen == [83]


def test_a_hook_that_gathers_weights_does_not_look(counted):
    def gather(module, given):
        pass

    gather.__module__ = "torch.distributed.fsdp"
    model, batch, counts = counted
    model.layers[0].register_forward_pre_hook(gather)
    run(model, batch)
    assert counts == [53]


def test_dropout_draws_for_every_place(counted):
    model, batch, counts = counted
    whet.attach_lora(model, rank=2, dropout=0.5)
    run(model.train(), batch)
    run(model.eval(), batch)
    assert counts == [83, 53]


def test_experts_count_every_place(counted):
    _, batch, counts = counted
    blocks, settings = MODELS["experts"]
    run(make_model(blocks, **{**settings, "vocab_size": 260, "max_positions": 128}), batch)
    assert counts == [83]


def test_a_plan_knows_no_tokens(counted):
    model, batch, counts = counted
    with planned_for("cpu"):
        run(model, batch)
    assert counts == [83]


def test_a_step_learns_the_same_as_transformers_on_chats_with_one_system_prompt(tiny_directory):
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
