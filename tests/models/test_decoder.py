"""Layers match plain references, and decoding with a cache matches decoding without, also for hybrids."""

import math

import pytest
import torch

from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.errors import ModelError
from whet.generation.engine import generate_tokens
from whet.models.decoder import Decoder
from whet.models.feedforward import FeedForward
from whet.models.norms import make_norm
from whet.models.rope import alibi_slopes, apply_rope, inverse_frequencies, rope_cos_sin, sinusoids
from whet.models.spec import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LinearRopeScaling,
    ModelSpec,
    NormSpec,
    RopeSpec,
)

ROPE = RopeSpec()
ATTENTIONS = {
    "multi-head": {"kv_heads": 4, "rope": ROPE},
    "grouped": {"rope": ROPE},
    "window": {"rope": ROPE, "window": 5},
    "no-rope": {},
    "capped": {"rope": ROPE, "softcap": 2.0, "window": 6},
    "head-norm": {"rope": RopeSpec(theta=100.0, scaling=LinearRopeScaling(2.0)), "qk_norm": "head"},
    "whole-norm-fused": {"rope": ROPE, "qk_norm": "all", "fused": True, "bias": True, "scale": 0.3},
}
FEEDFORWARDS = {
    "gelu": {"activation": "gelu", "gated": False},
    "swiglu": {"activation": "silu"},
    "geglu": {"activation": "gelu_tanh", "fused": True},
    "relu2": {"activation": "relu2", "gated": False, "bias": True},
}


LATENTS = {
    "latent": {},
    "latent-queries": {"q_rank": 10, "rope": RopeSpec(theta=100.0)},
    "latent-window": {"window": 5, "value_dim": 4},
}


def attention(name, **overrides):
    if name in LATENTS:
        sizes = {"heads": 4, "kv_rank": 12, "plain_dim": 8, "rope_dim": 6, "value_dim": 8}
        return LatentAttentionSpec(**{**sizes, **LATENTS[name], **overrides})
    return AttentionSpec(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **ATTENTIONS[name], **overrides})


def model(blocks, **settings):
    torch.manual_seed(0)
    spec = ModelSpec(
        **{
            "family": "llama", "vocab_size": 50, "d_model": 32, "blocks": tuple(blocks), "norm": NormSpec(),
            "tied_head": True, "max_positions": 64, **settings,
        }
    )  # fmt: skip
    decoder = Decoder(spec).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.4) if parameter.dim() > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.2
            )
    return decoder


EXPERTS = {
    "experts": {},
    "experts-of-one": {"top_k": 1, "renormalise": False},
    "experts-odd": {"width": 9, "activation": "gelu_tanh"},
    "experts-sigmoid-shared": {"scoring": "sigmoid", "shared": 2, "scale": 2.5, "balance_bias": True},
}


def mixture(name):
    return ExpertsSpec(**{"experts": 5, "top_k": 2, "width": 16, **EXPERTS[name]})


def hybrid(*names, placement="pre", feedforward="swiglu"):
    mlp = FeedForwardSpec(width=40, **FEEDFORWARDS[feedforward])
    return [BlockSpec(attention(name), mlp, placement) for name in names]


MODELS = {
    **{f"all-{name}": (hybrid(name, name), {}) for name in (*ATTENTIONS, *LATENTS)},
    **{f"mlp-{name}": (hybrid("grouped", feedforward=name), {}) for name in FEEDFORWARDS},
    **{f"norms-{placement}": (hybrid("grouped", "window", placement=placement), {}) for placement in ("pre", "post", "sandwich")},
    "learned": (hybrid("no-rope", "window"), {"positions": "learned"}),
    "sinusoidal": (hybrid("no-rope", "capped"), {"positions": "sinusoidal"}),
    "alibi": (hybrid("no-rope", "no-rope"), {"positions": "alibi"}),
    "layer-norm-untied": (hybrid("grouped"), {"norm": NormSpec("layer", 1e-5), "tied_head": False}),
    "heads-of-two-sizes": ([*hybrid("grouped"), BlockSpec(attention("grouped", head_dim=16), FeedForwardSpec(8))], {}),
    "no-feedforward": ([BlockSpec(attention("grouped"), None), *hybrid("window")], {}),
    "no-attention": ([*hybrid("grouped"), BlockSpec(None, FeedForwardSpec(8))], {"positions": "learned"}),
    "no-norm": (hybrid("grouped", placement="sandwich"), {"norm": NormSpec("none")}),
    "alibi-heads": ([*hybrid("no-rope"), BlockSpec(attention("no-rope", heads=2), None)], {"positions": "alibi"}),
    **{name: ([BlockSpec(attention("grouped"), mixture(name)), *hybrid("window")], {}) for name in EXPERTS},
    "latent-hybrid": (hybrid("latent", "window", "latent-queries"), {}),
    "mixed": (hybrid("window", "no-rope", "capped", "whole-norm-fused"), {"norm": NormSpec(offset=True), "logit_softcap": 3.0, "embedding_scale": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("steps", ["growing", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_decoding_with_a_cache_matches_decoding_without(name, steps, request):
    if steps == "static":
        request.getfixturevalue("static_steps")
    blocks, settings = MODELS[name]
    decoder = model(blocks, **settings)
    tokens = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(2)).tolist()
    for shared in (0, 9):
        prompts = [tokens[:shared] + tokens[length:] for length in (1, 9, 13)]
        completions = generate_tokens(decoder, prompts, max_tokens=10, stop_tokens=set())
        for prompt, generated in zip(prompts, completions, strict=True):
            row = list(prompt)
            with torch.no_grad():
                for _ in range(10):
                    row.append(decoder(torch.tensor([row]))[0, -1].argmax().item())
            assert generated == row[len(prompt) :]


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]  # packing differs by device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_attention_is_causal_and_packed_documents_are_independent(name, device):
    from tiny import random_examples

    blocks, settings = MODELS[name]
    decoder = model(blocks, **settings).to(device, torch.float64)  # float64, so only rounding differs
    embedded = {}
    decoder.embed_tokens.register_forward_hook(
        lambda m, a, out: embedded.update(x=out.requires_grad_()) or out
    )
    output = decoder.hidden(torch.randint(0, 50, (1, 14), device=device))
    for position in (0, 6, 13):
        [gradient] = torch.autograd.grad(output[0, position].sum(), embedded["x"], retain_graph=True)
        assert gradient[0, position + 1 :].abs().max() == 0 if position < 13 else True
        assert gradient[0, position].abs().max() > 0
    examples = random_examples(3, seed=4, vocab=50, longest=20)
    batch = make_batch([examples]).to(torch.device(device))
    with torch.no_grad():
        packed = decoder.hidden(batch.tokens, batch.positions, batch.layout())[0]
        alone = [decoder.hidden(torch.tensor([e.tokens[:-1]], device=device))[0] for e in examples]
        separate = torch.cat(alone)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_documents_with_shared_prefixes_match_separate_documents(name):
    blocks, settings = MODELS[name]
    decoder = model(blocks, **settings).double()
    tokens = torch.randint(0, 50, (6, 30), generator=torch.Generator().manual_seed(3))
    tokens[:4, :17] = tokens[0, :17]  # four documents share a prefix,
    tokens[1, :26] = tokens[0, :26]  # two of them a longer one,
    tokens[2, :] = tokens[3, :]  # and two are equal
    documents = [tokens[0], tokens[1, :28], tokens[2], tokens[3], tokens[4, :9], tokens[5]]
    upstream = torch.randn(sum(map(len, documents)), 32, dtype=torch.float64)

    def with_gradients(states):
        names, parameters = zip(*decoder.named_parameters(), strict=True)
        gradients = torch.autograd.grad(states, parameters, upstream, allow_unused=True)
        return states.detach(), dict(zip(names, gradients, strict=True))

    batch = make_batch([[Example([*d.tolist(), 0], [True] * (len(d) + 1), "") for d in documents]])
    packed = with_gradients(decoder.hidden(batch.tokens, batch.positions, batch.layout())[0])
    alone = with_gradients(torch.cat([decoder.hidden(document[None])[0] for document in documents]))
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [1, 3, 50])
def test_sliding_window_covers_exactly_its_positions(window):
    decoder = model([BlockSpec(attention("window", window=window), FeedForwardSpec(8))])
    embedded = {}
    decoder.embed_tokens.register_forward_hook(
        lambda m, a, out: embedded.update(x=out.requires_grad_()) or out
    )
    output = decoder.hidden(torch.randint(0, 50, (1, 12)))
    [gradient] = torch.autograd.grad(output[0, 9].sum(), embedded["x"])
    seen = gradient[0].abs().sum(-1) > 0
    assert seen.tolist() == [9 - window < position <= 9 for position in range(12)]


@pytest.mark.parametrize("name", FEEDFORWARDS)
def test_feedforward_matches_its_formula(name):
    torch.manual_seed(1)
    spec = FeedForwardSpec(width=12, **FEEDFORWARDS[name])
    layer, x = FeedForward(spec, d_model=6).double(), torch.randn(5, 6, dtype=torch.float64)
    erf = torch.special.erf
    formulas = {
        "silu": lambda v: v / (1 + torch.exp(-v)),
        "gelu": lambda v: v * (1 + erf(v / math.sqrt(2))) / 2,
        "gelu_tanh": lambda v: v / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "relu2": lambda v: torch.where(v > 0, v * v, 0),
    }
    act = formulas[spec.activation]

    def linear(layer, x):
        return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)

    if not spec.gated:
        inner = act(linear(layer.up_proj, x))
    elif spec.fused:
        both = linear(layer.gate_up_proj, x)
        inner = act(both[:, :12]) * both[:, 12:]
    else:
        inner = act(linear(layer.gate_proj, x)) * linear(layer.up_proj, x)
    torch.testing.assert_close(layer(x), linear(layer.down_proj, inner))


def test_norms_match_their_formulas():
    x = torch.randn(4, 6, dtype=torch.float64) * 3 + 1
    w, b = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    standard = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
    for spec, expected in (
        (NormSpec("rms", 1e-3), rms * w),
        (NormSpec("rms", 1e-3, offset=True), rms * (1 + w)),
        (NormSpec("layer", 1e-3), standard * w + b),
    ):
        norm = make_norm(spec, 6).double()
        with torch.no_grad():
            norm.weight.copy_(w)
            if hasattr(norm, "bias"):
                norm.bias.copy_(b)
            torch.testing.assert_close(norm(x), expected)


def test_rope_rotates_pairs_by_position_times_frequency():
    frequencies = inverse_frequencies(RopeSpec(theta=50.0), 6)
    torch.testing.assert_close(frequencies, torch.tensor([50.0 ** (-2 * i / 6) for i in range(3)]))
    x, position = torch.randn(1, 1, 1, 6), torch.tensor([[7]])
    rotated = apply_rope(x, *rope_cos_sin(position, frequencies))[0, 0, 0]
    for i, frequency in enumerate(frequencies.tolist()):
        a, b = x[0, 0, 0, i], x[0, 0, 0, i + 3]
        cos, sin = math.cos(7 * frequency), math.sin(7 * frequency)
        torch.testing.assert_close(rotated[[i, i + 3]], torch.stack((a * cos - b * sin, a * sin + b * cos)))


def test_sinusoids_and_alibi_slopes_follow_their_papers():
    table = sinusoids(torch.tensor([[0, 3]]), 4)[0]
    torch.testing.assert_close(table[0], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    expected = [math.sin(3), math.cos(3), math.sin(3 / 100), math.cos(3 / 100)]
    torch.testing.assert_close(table[1], torch.tensor(expected))
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    assert len(alibi_slopes(6)) == 6
    torch.testing.assert_close(alibi_slopes(6)[:4], torch.tensor([2.0 ** (-2 * i) for i in range(1, 5)]))


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_missing_parts_leave_the_residual_stream_unchanged(placement):
    """No norm is applied either, so the blocks are exactly the identity."""
    decoder = model([BlockSpec(None, None, placement)] * 2, norm=NormSpec("none"))
    tokens = torch.randint(0, 50, (2, 9))
    assert torch.equal(decoder.hidden(tokens), decoder.embed_tokens(tokens))
    assert [name for name, _ in decoder.named_parameters()] == ["embed_tokens.weight"]
    only_mlp = model([BlockSpec(None, FeedForwardSpec(8), placement)], norm=NormSpec())
    assert not any("attn" in name or "attention" in name for name, _ in only_mlp.named_parameters()) or (
        placement != "post"  # otherwise the norm before the feed-forward has "attention" in its name
    )


@pytest.mark.parametrize("q_rank", [None, 24])
def test_latent_attention_matches_transformers(q_rank):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=q_rank, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10,
        intermediate_size=40, first_k_dense_replace=2, max_position_embeddings=64, rope_interleave=False,
        rms_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    spec = LatentAttentionSpec(heads=4, kv_rank=12, plain_dim=8, rope_dim=6, value_dim=10, q_rank=q_rank)
    ours = model([BlockSpec(spec, FeedForwardSpec(40))] * 2, tied_head=False)
    names = {name: name if name.startswith("lm_head") else f"model.{name}" for name in ours.state_dict()}
    stored = theirs.state_dict()
    ours.load_state_dict({name: stored[hf] for name, hf in names.items()})
    tokens = torch.randint(0, 50, (2, 17))
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=2e-4)
    ours(tokens).square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[names[name]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormSpec("group"), "unknown norm 'group'\n  hint: known: rms, layer, none"),
        (lambda: attention("latent", rope_dim=5), "rope_dim=5 is odd"),
        (lambda: attention("latent", kv_rank=0), "kv_rank=0 must be positive"),
        (lambda: FeedForwardSpec(4, activation="tanh"), "unknown activation 'tanh'"),
        (lambda: attention("grouped", heads=5), "heads=5 is not a multiple of kv_heads=2"),
        (lambda: attention("grouped", head_dim=7), "head_dim=7 is odd"),
        (lambda: attention("grouped", window=0), "window=0 must be positive"),
        (lambda: attention("grouped", qk_norm="both"), "unknown qk_norm 'both'"),
        (lambda: model([]), "at least one layer"),
        (lambda: model(hybrid("grouped"), positions="gps"), "unknown positions 'gps'"),
        (lambda: BlockSpec(attention("grouped"), FeedForwardSpec(4), "between"), "unknown norm placement"),
        (lambda: model(hybrid("grouped"), vocab_size=0), "vocab_size=0 must be positive"),
    ],
)
def test_invalid_spec_is_explained(make, message):
    with pytest.raises(ModelError) as caught:
        make()
    assert message in str(caught.value)
