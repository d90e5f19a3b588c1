"""A bridged model matches the plain transformers model: logits, gradients, decoding."""

import json
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from whet.adapters.adapter import adapters_off, named_adapters
from whet.adapters.attach import attach_lora
from whet.adapters.merge import merge
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.errors import ModelError
from whet.generation.engine import generate_tokens
from whet.model_io.load_transformers import load_bridge
from whet.models.transformers_bridge import _groups
from whet.ops.attention import Layout
from whet.ops.cross_entropy import linear_cross_entropy
from whet.ops.dispatch import plan_for_device

VOCAB = 97
LOGIT_TOLERANCE = 2e-4
SAME = 1e-5  # relative L2 difference allowed between two float32 computations of the same value

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
# one row per family: its config, with family-specific fields that differ from their defaults
FAMILIES = {
    "phi3": GROUPED,
    "gemma2": {
        **GROUPED,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 1.5,
    },
    "granite": {
        **GROUPED,
        "logits_scaling": 3.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "phi": {**COMMON, "partial_rotary_factor": 0.5},
    "cohere": {**GROUPED, "logit_scale": 0.25},
    "gpt_neox": COMMON,
    "mistral": {**GROUPED, "sliding_window": 6},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {
        **{key: value for key, value in COMMON.items() if key != "max_position_embeddings"},
        "state_size": 8,
        "time_step_rank": 4,
    },
    "bamba": {
        **GROUPED,
        "attn_layer_indices": [1],
        "mamba_expand": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
    "falcon_h1": {
        **GROUPED,
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "lm_head_multiplier": 0.3,
    },
}
HEADS = {  # logit transformations after the projection
    "gemma2": {"softcap": 2.0},
    "granite": {"scale": 1 / 3},
    "cohere": {"scale": 0.25},
    "falcon_h1": {"scale": 0.3},
}


def write(directory, family, **overrides):
    """Write a random transformers model of a family, with non-default biases and norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    return directory


def bridge_of(directory, dtype=torch.float32):
    return load_bridge(directory, dtype=dtype, device=torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny matmuls gain nothing from threads, and lose much on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """Return the bridge of a family, and the same directory loaded by transformers with eager attention."""
    directory = write(tmp_path_factory.mktemp(request.param), request.param)
    alone = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return SimpleNamespace(family=request.param, bridge=bridge_of(directory), alone=alone)


@pytest.fixture
def phi3(tmp_path):
    return write(tmp_path / "model", "phi3")


def tokens(batch=2, length=14):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def relative_error(output, expected):
    return ((output - expected).norm() / expected.norm()).item()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def assert_same_gradients(ours, expected):
    assert ours.keys() == expected.keys()
    flat = [torch.cat([grads[name].flatten() for name in expected]) for grads in (ours, expected)]
    assert relative_error(*flat) < SAME


def test_logits_match_transformers(pair):
    with torch.no_grad():
        error = (pair.bridge(tokens()) - pair.alone(tokens()).logits).abs().max().item()
    print(f"{pair.family}: max abs logit error {error:.1e}")
    assert error < LOGIT_TOLERANCE


def test_head_follows_the_config(pair):
    """The bare projection differs from the logits if the head has a transformation."""
    head = pair.bridge.head()
    expected = {"scale": 1.0, "softcap": None, **HEADS.get(pair.family, {})}
    assert {"scale": head.scale, "softcap": head.softcap} == expected
    assert (head.bias is not None) == (pair.family == "phi")
    with torch.no_grad():
        hidden = pair.bridge.hidden(tokens())
        bare = (F.linear(hidden, head.weight) - pair.alone(tokens()).logits).abs().max()
    assert (bare > 0.1) == (pair.family in {*HEADS, "phi"})


def test_attention_implementation_supports_the_model(pair):
    chosen = pair.bridge.model.config._attn_implementation
    assert chosen == ("eager" if pair.family in {"gemma2", "mamba"} else "sdpa")


def test_attention_softcap_uses_eager_attention(tmp_path):
    config = AutoConfig.for_model("gemma3_text", **{**GROUPED, "head_dim": 8, "attn_logit_softcapping": 1.5})
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    assert bridge_of(tmp_path).model.config._attn_implementation == "eager"


def test_loss_and_gradients_match_transformers(pair):
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:].reshape(-1)
    expected = F.cross_entropy(pair.alone(inputs).logits.flatten(0, 1), targets, reduction="sum")
    loss = linear_cross_entropy(pair.bridge.hidden(inputs).flatten(0, 1), pair.bridge.head(), targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    named = {pair.bridge.hf_name(name): grad for name, grad in gradients(pair.bridge, loss).items()}
    assert_same_gradients(named, gradients(pair.alone, expected))


DOCUMENTS = ((1, 9, 4), (14,))


def test_packed_documents_match_separate_documents(pair):
    """Values and gradients match, with lengths so different that documents run in several groups."""
    rows = tokens()
    weights = torch.randn(2, 14, 32, generator=torch.Generator().manual_seed(2))
    packed = pair.bridge.hidden(rows, layout=Layout(documents=DOCUMENTS))
    separate = torch.cat(
        [
            pair.bridge.hidden(document[None])[0]
            for row, lengths in zip(rows, DOCUMENTS, strict=True)
            for document in row.split(lengths)
        ]
    ).view_as(packed)
    assert relative_error(packed, separate) < SAME
    # per position, because an error at a single position is small in the norm
    assert (packed - separate).abs().max() < 1e-4
    packed_gradients = gradients(pair.bridge, (packed * weights).sum())
    assert_same_gradients(packed_gradients, gradients(pair.bridge, (separate * weights).sum()))


@pytest.mark.parametrize("lengths", [[5], [1] * 50, [2000, *[10] * 200], [17, 9, 5, 3], list(range(1, 200))])
def test_packed_padding_is_bounded(lengths):
    groups = list(_groups(lengths, range(len(lengths))))
    assert sorted(document for group in groups for document in group) == list(range(len(lengths)))
    assert sum(max(lengths[d] for d in group) * len(group) for group in groups) <= 2 * sum(lengths)


def test_packed_rows_run_one_forward_with_sharded_parameters(phi3):
    """FSDP ranks deadlock if they run different numbers of forward passes."""
    bridge = bridge_of(phi3)
    calls = []
    bridge.blocks()[0].register_forward_hook(lambda *_: calls.append(1))
    layout = Layout(documents=((1, 1, 1, 11), (14,)))
    unsharded = bridge.hidden(tokens(), layout=layout)
    assert len(calls) == 2
    next(bridge.parameters()).device_mesh = "as a DTensor has"
    assert relative_error(bridge.hidden(tokens(), layout=layout), unsharded) < SAME
    assert len(calls) == 3


def decode(bridge, rows, lengths, *, first):
    """Left-pad rows to one length, fill the cache with `first` slots, then continue slot by slot."""
    keys = rows.shape[1]
    visible = torch.arange(keys) >= keys - torch.tensor(lengths)[:, None]
    padded = torch.stack([row.roll(keys - length) for row, length in zip(rows, lengths, strict=True)])
    padded = padded.where(visible, 0)
    positions = (visible.long().cumsum(1) - 1).clamp(min=0)
    cache, outputs = bridge.new_cache(), []
    for start, end in [(0, first), *((slot, slot + 1) for slot in range(first, keys))]:
        layout = Layout.cached(visible[:, :end], new_tokens=end - start, padded=True)
        outputs.append(bridge.hidden(padded[:, start:end], positions[:, start:end], layout, cache))
        assert cache.length == end
    return torch.cat(outputs, 1), cache


@torch.no_grad()
def test_cached_decoding_of_ragged_rows_matches_a_full_forward(pair):
    rows, lengths = tokens(batch=3), (9, 14, 12)
    full = pair.bridge.hidden(rows)
    decoded, _ = decode(pair.bridge, rows, lengths, first=8)
    for row, length in enumerate(lengths):
        assert relative_error(decoded[row, -length:], full[row, :length]) < SAME


@torch.no_grad()
def test_cache_selects_rows(pair):
    rows, extra = tokens(batch=3), tokens(batch=2, length=3)
    _, cache = decode(pair.bridge, rows, (14, 14, 14), first=8)
    selected = torch.tensor([2, 0])
    cache.select_rows(selected)
    output = pair.bridge.hidden(
        extra, cache=cache
    )  # several tokens at once, without positions, because nothing is padded
    expected = pair.bridge.hidden(torch.cat([rows[selected], extra], 1))[:, 14:]
    assert relative_error(output, expected) < SAME


def test_gradient_checkpointing_recomputes_and_gives_equal_gradients(pair):
    """Only one weight is trainable, so the embeddings pass no gradient, as with LoRA."""
    bridge = pair.bridge
    calls = []
    inside = [*bridge.blocks()[-1].children()]
    hooks = [module.register_forward_hook(lambda *_: calls.append(1)) for module in inside]
    trainable = next(p for p in bridge.blocks()[0].parameters() if p.dim() == 2)
    results, counts = [], []
    try:
        bridge.train()
        bridge.requires_grad_(False)
        trainable.requires_grad_(True)
        for enabled in (False, True, False):
            bridge.grad_checkpoint = enabled
            calls.clear()
            results.append(gradients(bridge, bridge.hidden(tokens()).square().sum()))
            counts.append(len(calls))
            assert bridge.grad_checkpoint is enabled
            assert not bridge.model.get_input_embeddings()(tokens()).requires_grad
    finally:
        for hook in hooks:
            hook.remove()
        bridge.requires_grad_(True)
        bridge.eval()
    assert counts[0] == counts[2] < counts[1]
    assert len(results[0]) == 1
    assert_same_gradients(results[1], results[0])


@torch.no_grad()
def test_gradient_checkpointing_keeps_the_cache(phi3):
    """Rollouts may run while the policy is in training mode."""
    bridge = bridge_of(phi3).train()
    bridge.grad_checkpoint = True
    full = bridge.hidden(tokens())
    decoded, _ = decode(bridge, tokens(), (14, 14), first=8)
    assert relative_error(decoded, full) < SAME
    assert bridge.grad_checkpoint


def test_position_jumps_do_not_start_documents(phi3):
    """transformers treats a jump in position_ids as a document boundary, which whet describes by the layout."""
    bridge = bridge_of(phi3)
    positions = torch.tensor([[*range(7), *range(20, 27)]]).expand(2, -1)
    jumped, plain = bridge.hidden(tokens(), positions), bridge.hidden(tokens())
    assert relative_error(jumped[:, :7], plain[:, :7]) < SAME
    split = bridge.hidden(tokens(), layout=Layout(documents=((7, 7), (7, 7))))
    assert relative_error(jumped[:, 7:], split[:, 7:]) > 0.01


@pytest.fixture
def longrope(tmp_path):
    """A model that rotates texts of more than 16 tokens with different factors."""
    factors = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    write(tmp_path, "phi3", rope_parameters=factors, original_max_position_embeddings=16)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    return SimpleNamespace(directory=tmp_path, bridge=bridge_of(tmp_path), alone=alone)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[(5, 19)], [(5,), (30,)], [(16,), (3, 2), (17,)]])
def test_longrope_uses_the_length_of_each_text(longrope, rows):
    """Packed or padded. Plain transformers uses the longest text of a batch for all of them."""
    texts = [[tokens(length=30)[0, :length].tolist() for length in row] for row in rows]
    examples = [
        [Example([*text, 3], np.ones(len(text) + 1, dtype=bool), origin="") for text in row] for row in texts
    ]
    batch = make_batch(examples)
    hidden = longrope.bridge.hidden(batch.tokens, batch.positions, batch.layout())
    for row, states in zip(texts, hidden, strict=True):
        ends = list(accumulate(map(len, row), initial=0))
        for text, start in zip(row, ends, strict=False):
            expected = longrope.alone(torch.tensor([text])).logits[0]
            logits = longrope.bridge.logits(states[start : start + len(text)])
            torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_TOLERANCE)


def test_longrope_can_be_planned(longrope):
    """With fake tensors, the text lengths cannot be read from the positions."""
    assert_planned(longrope.bridge)


def test_dynamic_rope_can_be_planned(tmp_path):
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    write(tmp_path, "phi", rope_parameters={**dynamic, "partial_rotary_factor": 0.5})
    assert_planned(bridge_of(tmp_path))


def assert_planned(bridge):
    kinds = [module.rope_type for module in bridge.modules() if hasattr(module, "rope_type")]
    assert kinds
    with plan_for_device("cpu"), FakeTensorMode(allow_non_fake_inputs=True):
        zeros = torch.zeros(2, 30, dtype=torch.long)
        assert bridge.hidden(zeros, zeros).shape == (2, 30, 32)
    assert [module.rope_type for module in bridge.modules() if hasattr(module, "rope_type")] == kinds


@torch.no_grad()
@pytest.mark.parametrize("length", [11, 15, 16, 17])
def test_longrope_decodes_across_the_length_limit(longrope, length):
    prompt = tokens(length=30)[0, :length].tolist()
    expected = list(prompt)
    for _ in range(10):
        expected.append(int(longrope.alone(torch.tensor([expected])).logits[0, -1].argmax()))
    [completion] = generate_tokens(longrope.bridge, [prompt], max_tokens=10, stop_tokens=())
    assert prompt + completion == expected


def test_longrope_rejects_decoding_short_and_long_rows_together(longrope):
    prompts = [tokens(length=30)[0, :length].tolist() for length in (3, 20)]
    with pytest.raises(
        ModelError, match="longrope cannot decode rows of up to 16 tokens together with longer ones"
    ):
        generate_tokens(longrope.bridge, prompts, max_tokens=2, stop_tokens=())


def test_longrope_rejects_short_and_long_texts_with_sharded_weights(longrope):
    next(longrope.bridge.parameters()).device_mesh = "as a DTensor has"
    with pytest.raises(
        ModelError, match="longrope cannot train on texts of up to 16 tokens together with longer ones if"
    ):
        longrope.bridge.hidden(tokens(1, 30), layout=Layout(documents=((5, 25),)))


DROPOUTS = {  # classes read their rates from the config, from modules (also to skip layers), or from layers
    "phi3": {"attention_dropout": 0.3, "resid_pdrop": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3},
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "gptj": {"rotary_dim": 8, "attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
}


@torch.no_grad()
@pytest.mark.parametrize("family", DROPOUTS)
def test_dropout_is_disabled_but_stays_in_the_config(tmp_path, family):
    config = AutoConfig.for_model(family, **{**COMMON, **DROPOUTS[family]})
    alone = AutoModelForCausalLM.from_config(config)
    alone.save_pretrained(tmp_path)
    bridge = bridge_of(tmp_path)
    evaluated = bridge.eval()(tokens())
    assert torch.equal(bridge.train()(tokens()), evaluated)
    torch.testing.assert_close(evaluated, alone.eval()(tokens()).logits)
    assert relative_error(alone.train()(tokens()).logits, evaluated) > 0.01
    assert bridge.hf_config().items() >= DROPOUTS[family].items()


def test_names_and_description(pair):
    bridge = pair.bridge
    assert {bridge.hf_name(name) for name in bridge.state_dict()} == set(pair.alone.state_dict())
    assert len(bridge.blocks()) == 2
    assert bridge.vocab_size == VOCAB
    assert bridge.max_positions == (64 if pair.family != "mamba" else 2**31 - 1)
    described = json.loads(json.dumps(bridge.describe()))
    assert described["model_type"] == pair.family
    assert not {"_name_or_path", "transformers_version", "dtype"} & described.keys()


def test_saved_names_and_config_load_again(pair, tmp_path):
    stored = {}
    for name, tensor in pair.bridge.state_dict().items():
        if tensor.data_ptr() not in {other.data_ptr() for other in stored.values()}:
            stored[pair.bridge.hf_name(name)] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(pair.bridge.hf_config()))
    loaded = bridge_of(tmp_path)
    assert loaded.fingerprint == pair.bridge.fingerprint
    with torch.no_grad():
        assert torch.equal(loaded(tokens()), pair.bridge(tokens()))


def test_fingerprint_depends_only_on_the_architecture(phi3, tmp_path):
    fingerprint = bridge_of(phi3).fingerprint
    assert bridge_of(phi3, torch.bfloat16).fingerprint == fingerprint
    assert bridge_of(write(tmp_path / "other", "phi3", intermediate_size=40)).fingerprint != fingerprint


def test_bfloat16_passes_the_checks_on_loading(pair, tmp_path):
    pair.alone.save_pretrained(tmp_path)
    bridge = bridge_of(tmp_path, torch.bfloat16)
    assert bridge.hidden(tokens()).dtype == torch.bfloat16
    assert bridge.cache_problem is None


def edit_tensors(directory, edit):
    stored = load_file(directory / "model.safetensors")
    edit(stored)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory, **fields):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


NORM = "model.layers.1.input_layernorm.weight"


def shorten(stored):
    stored[NORM] = stored[NORM][:-1].clone()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda stored: stored.pop(NORM), f"missing: {NORM}"),
        (lambda stored: stored.update(stray=torch.zeros(2)), "unexpected: stray"),
        (shorten, rf"wrong shape: {NORM} is \[31\], expected \[32\]"),
    ],
    ids=["missing", "unexpected", "mismatched"],
)
def test_mismatched_tensors_are_named(phi3, edit, message, capfd):
    edit_tensors(phi3, edit)
    with pytest.raises(ModelError, match=message):
        bridge_of(phi3)
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "abacus"}, "`abacus` but Transformers does not recognize"),
        ({"model_type": "clip"}, "'clip' is not a causal language model"),
        ({"num_attention_heads": "many"}, "num_attention_heads.*expected int"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "weights quantized by gptq are not supported",
        ),
        (
            {"model_type": "abacus", "auto_map": {"AutoConfig": "evil.Config"}},
            "contains custom code",
        ),
    ],
    ids=["unknown", "not-causal-lm", "broken", "quantized", "remote-code"],
)
def test_unsupported_configs_raise_errors(phi3, fields, message):
    edit_config(phi3, **fields)
    (phi3 / "evil.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(ModelError, match=message) as caught:
        bridge_of(phi3)
    assert "\n" not in caught.value.message


def test_pickled_weights_are_never_loaded(phi3):
    torch.save(load_file(phi3 / "model.safetensors"), phi3 / "pytorch_model.bin")
    (phi3 / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        bridge_of(phi3)


def test_adapter_in_the_directory_is_not_applied(phi3):
    """transformers would load the adapter unasked, and even another base model that it names."""
    (phi3 / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere", "r": 1}))
    bridge_of(phi3)


def test_attention_implementation_of_the_config_is_ignored(phi3):
    edit_config(phi3, attn_implementation="someone/kernel")
    assert bridge_of(phi3).model.config._attn_implementation == "sdpa"


def test_unknown_head_is_rejected(phi3, monkeypatch):
    from transformers import Phi3ForCausalLM

    plain = Phi3ForCausalLM.forward

    def modified_forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 1.001
        return output

    monkeypatch.setattr(Phi3ForCausalLM, "forward", modified_forward)
    with pytest.raises(ModelError, match="the head of Phi3ForCausalLM transforms the logits in a way"):
        bridge_of(phi3)


def test_model_without_a_head_is_rejected(phi3, monkeypatch):
    from transformers import Phi3ForCausalLM

    monkeypatch.setattr(Phi3ForCausalLM, "get_output_embeddings", lambda self: None)
    with pytest.raises(ModelError, match="no output embeddings"):
        bridge_of(phi3)


def test_non_causal_model_is_rejected(phi3):
    edit_config(phi3, is_causal=False)
    with pytest.raises(ModelError, match="not causal"):
        bridge_of(phi3)


def test_unusable_cache_raises_an_error_on_generation(tmp_path, monkeypatch):
    """rwkv treats padding as text, so it cannot generate, but it can be trained, also packed."""
    monkeypatch.setitem(FAMILIES, "rwkv", {**COMMON, "context_length": 64, "attention_hidden_size": 32})
    bridge = bridge_of(write(tmp_path, "rwkv"))
    packed = bridge.hidden(tokens(), layout=Layout(documents=DOCUMENTS))
    assert relative_error(packed[1], bridge.hidden(tokens())[1]) < SAME
    with pytest.raises(ModelError, match="cannot generate with RwkvForCausalLM"):
        bridge.new_cache()


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_reaches_every_adapted_layer_and_merges(tmp_path, family):
    """Also for classes that multiply by a layer's weight instead of calling the layer."""
    bridge = bridge_of(write(tmp_path, family))
    attach_lora(bridge, rank=2)
    generator = torch.Generator().manual_seed(0)
    for _, layer in named_adapters(bridge):
        layer.lora_B.data = torch.randn(layer.lora_B.shape, generator=generator) * 0.1
    inputs = tokens()
    hidden = bridge.hidden(inputs[:, :-1])
    linear_cross_entropy(hidden.flatten(0, 1), bridge.head(), inputs[:, 1:].flatten()).backward()
    for name, parameter in bridge.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
    with torch.no_grad():
        adapted_logits = bridge(inputs)
        with adapters_off(bridge):
            base = bridge(inputs)
        assert not torch.allclose(adapted_logits, base, atol=1e-4)
        torch.testing.assert_close(merge(bridge)(inputs), adapted_logits, rtol=1e-4, atol=1e-4)
