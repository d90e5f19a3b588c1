"""Every native family matches transformers: logits, gradients, decoding, saving and loading.

A new family adds one row per option.
"""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import whet
from tiny_adapters import adapter_tensors
from whet.data.batches import make_batch
from whet.generation.engine import generate_tokens
from whet.model_io.save import save_model
from whet.models.decoder import Decoder
from whet.models.families import FAMILIES
from whet.ops.cross_entropy import linear_cross_entropy

LOGIT_TOLERANCE = 2e-4
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
VOCAB = 97

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "pad_token_id": None,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA2 = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

# row: (family in transformers, config fields that differ from SIZES)
ROWS = {
    "llama-untied": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("Llama", {"attention_bias": True}),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16}}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head-wide": ("Llama", {"num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-3}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "layer_types": TYPES, "use_sliding_window": True, "sliding_window": 6}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3-bias-tied": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-no-caps": ("Gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": TYPES}),
    "gemma2-strong-caps": ("Gemma2", {**GEMMA2, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3, "attention_bias": True}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 6, "layer_types": TYPES}),
    "gemma3-caps-scaled": ("Gemma3Text", {
        "head_dim": 8, "sliding_window": 5, "layer_types": TYPES, "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 1.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {}),
    "smollm3-some-rope": ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "smollm3-windows": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [1, 0, 1, 0]}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 6, "tie_word_embeddings": True}),
    "granite": ("Granite", {"attention_multiplier": 0.1, "logits_scaling": 5.0, "embedding_multiplier": 3.0}),
    "granite-usual-scores-tied": ("Granite", {"attention_multiplier": 8**-0.5, "logits_scaling": 0.5, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window-tied": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7, "tie_word_embeddings": True, "head_dim": 12}),
    "mixtral-odd-width": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 27}),
    "qwen3moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3moe-some-dense": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [2], "decoder_sparse_step": 2, "head_dim": 20}),
    "qwen3moe-window-bias": ("Qwen3Moe", {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "eos_token_id": 2}),
    "olmoe-renormalised": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True, "eos_token_id": 2}),
    "gpt2": ("GPT2", GPT2),
    "gpt2-relu-wide": ("GPT2", {**GPT2, "activation_function": "gelu", "n_inner": 48, "tie_word_embeddings": False}),
}  # fmt: skip
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def reference(directory, row):
    """Write a random transformers model, and return it."""
    family, differences = ROWS[row]
    sizes = differences if family == "GPT2" else {**SIZES, **differences}
    config = getattr(transformers, f"{family}Config")(**sizes)
    # only the eager implementation supports softcapped scores
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped implementation does not support every width
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config)
    randomize(model).save_pretrained(directory)
    return model


def randomize(model):
    """Randomize all weights, including biases and norms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.2)
    return model.eval()


def ours(directory):
    model, _ = whet.load(directory, dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder), "this row must be native"
    return model


def tokens(batch=3, length=70):
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("row", ROWS)
def test_logits_and_gradients_match_transformers(tmp_path, row):
    expected, model = reference(tmp_path, row), ours(tmp_path)
    batch = tokens()
    inputs, targets = batch[:, :-1], batch[:, 1:].reshape(-1)
    logits = expected(inputs).logits
    assert logits.std() > 0.1, "constant logits would test nothing"
    assert (model(inputs) - logits).abs().max().item() < LOGIT_TOLERANCE

    F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").backward()
    linear_cross_entropy(model.hidden(inputs).flatten(0, 1), model.head(), targets).backward()
    theirs = dict(expected.named_parameters())
    squared_sums = [0.0, 0.0]
    for name, parameter in model.named_parameters():
        gradient = theirs[model.hf_name(name)].grad
        difference = (model.to_hf_layout(name, parameter.grad) - gradient).double().square().sum().item()
        size = gradient.double().square().sum().item()
        # float32 sums in another order, with an absolute term for gradients that are small compared to others
        assert difference**0.5 < 1e-4 * size**0.5 + 2e-4, name
        squared_sums = [squared_sums[0] + difference, squared_sums[1] + size]
    assert (squared_sums[0] / squared_sums[1]) ** 0.5 < 2e-5  # relative L2 over all weights


@pytest.mark.parametrize("row", ROWS)
def test_saved_model_loads_in_transformers_and_in_whet(tmp_path, row):
    reference(tmp_path / "theirs", row)
    model = ours(tmp_path / "theirs")
    save_model(model, None, tmp_path / "ours", max_shard_bytes=20_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32, **EAGER
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, model(tokens()), rtol=0, atol=LOGIT_TOLERANCE)
        assert torch.equal(ours(tmp_path / "ours")(tokens()), model(tokens()))
    assert ours(tmp_path / "ours").fingerprint == model.fingerprint
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    stored = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert saved["tie_word_embeddings"] == stored["tie_word_embeddings"] == model.spec.tied_head


@pytest.mark.parametrize("row", ROWS)
def test_decoding_with_a_cache_matches_full_forwards(tmp_path, row):
    """Ragged rows, with and without a shared prefix. Windows count positions, not slots."""
    reference(tmp_path, row)
    model = ours(tmp_path)
    for shared in (0, 11):
        prompts = [list(range(shared)) + tokens(1, 20)[0, :length].tolist() for length in (3, 12, 20)]
        completions = generate_tokens(model, prompts, max_tokens=14, stop_tokens=set())
        for prompt, generated in zip(prompts, completions, strict=True):
            row_tokens = list(prompt)
            with torch.no_grad():
                for _ in range(14):
                    row_tokens.append(model(torch.tensor([row_tokens]))[0, -1].argmax().item())
            assert generated == row_tokens[len(prompt) :]


@pytest.mark.parametrize("row", ROWS)
def test_packed_documents_match_separate_documents(tmp_path, row):
    from tiny import random_examples

    reference(tmp_path, row)
    model = ours(tmp_path)
    examples = random_examples(4, seed=1, vocab=VOCAB)
    batch = make_batch([examples[:1], examples[1:]])
    with torch.no_grad():
        packed = model.hidden(batch.tokens, batch.positions, batch.layout())
        for index, group in enumerate((examples[:1], examples[1:])):
            start = 0
            for example in group:
                separate = model.hidden(torch.tensor([example.tokens[:-1]]))
                torch.testing.assert_close(
                    packed[index, start : start + example.length], separate[0], rtol=1e-5, atol=2e-5
                )
                start += example.length


ONE_EACH = {row.split("-")[0]: row for row in reversed(ROWS)}


@pytest.mark.parametrize("family", ONE_EACH)
def test_adapters_match_peft_and_load_in_peft(tmp_path, family):
    reference(tmp_path / "base", ONE_EACH[family])
    model = ours(tmp_path / "base")
    whet.attach_lora(model, rank=3, alpha=5)
    generator = torch.Generator().manual_seed(4)
    for tensor in adapter_tensors(model).values():
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.2
    whet.save_adapter(model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, **EAGER)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(input_ids=tokens()).logits, model(tokens()), rtol=0, atol=LOGIT_TOLERANCE
        )
        assert not torch.allclose(model(tokens()), ours(tmp_path / "base")(tokens()), atol=1e-2)

    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, **EAGER)
    settings = LoraConfig(
        r=2,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )
    peft = get_peft_model(fresh, settings)
    peft.save_pretrained(tmp_path / "from-peft")
    from_peft = whet.load_adapter(ours(tmp_path / "base"), tmp_path / "from-peft")
    with torch.no_grad():
        torch.testing.assert_close(
            from_peft(tokens()), peft(input_ids=tokens()).logits, rtol=0, atol=LOGIT_TOLERANCE
        )


def test_rows_exercise_the_option_they_name(tmp_path):
    """A silently ignored key would test nothing."""

    def spec(row):
        reference(tmp_path / row, row)
        return ours(tmp_path / row).spec

    plain = spec("llama-untied")
    different = [row for row in ROWS if row.startswith("llama-") and row != "llama-untied"]
    assert all(spec(row) != plain for row in different)
    assert [b.attention.window for b in spec("qwen2-windows").blocks] == [None, None, 5, 5]
    assert [b.attention.rope is None for b in spec("smollm3").blocks] == [False, False, False, True]
    assert [b.attention.window for b in spec("gemma2").blocks] == [9, None, 9, None]
    assert len({b.attention.rope for b in spec("gemma3").blocks}) == 2
    assert spec("gemma2").norm.offset
    assert spec("olmo2").blocks[0].placement == "post"


LINEAR = {"rope_type": "linear", "factor": 3.0}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
# row: (model_type, config.json fields in addition to SIZES), with keys that save_pretrained would add or move
RAW_ROWS = {
    "mistral-some-windows": ("mistral", {"head_dim": 8, "sliding_window": 5, "layer_types": TYPES}),
    "mistral-all-windows": ("mistral", {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention"] * 4}),
    "mistral-no-windows": ("mistral", {"head_dim": 8, "sliding_window": 5, "layer_types": ["full_attention"] * 4}),
    "phi3-types": ("phi3", {"sliding_window": 5, "layer_types": ALTERNATING}),
    "mixtral-types": ("mixtral", {**MIXTRAL, "sliding_window": 5, "layer_types": ALTERNATING}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    "smollm3-window-unused": ("smollm3", {"use_sliding_window": False, "sliding_window": 5}),
    "smollm3-types": ("smollm3", {"sliding_window": 5, "layer_types": TYPES}),
    "gemma2-all-full": ("gemma2", {**GEMMA2, "layer_types": ["full_attention"] * 4}),
    "gemma3-all-full": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "layer_types": ["full_attention"] * 4}),
    "gemma2-bare": ("gemma2", {"head_dim": 16}),
    "gemma3-bare": ("gemma3_text", {"head_dim": 16}),
    "gemma2-null-types": ("gemma2", {"head_dim": 16, "sliding_window": 5, "layer_types": None}),
    "gemma3-null-types": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "layer_types": None}),
    "gemma3-old-ropes": ("gemma3_text", {"head_dim": 16, "rope_theta": 5e5, "rope_local_base_freq": 700.0, "rope_scaling": LINEAR}),
    "gemma3-both-spellings": ("gemma3_text", {
        "head_dim": 16, "rope_scaling": LINEAR, "original_max_position_embeddings": 16,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 700.0}},
    }),
    "gemma3-one-rope": ("gemma3_text", {"head_dim": 16, "rope_parameters": {**LINEAR, "rope_theta": 5e5}}),
    **{
        f"{family}-both-spellings": (family, {
            **(MIXTRAL if family == "mixtral" else QWEN3_MOE), "rope_theta": 7e4, "rope_scaling": LINEAR,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
        })
        for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "smollm3", "granite", "mixtral", "qwen3_moe", "olmoe")
    },
    **{
        f"{family}-biases": (family, {**(MIXTRAL if family == "mixtral" else QWEN3_MOE), "attention_bias": True, "mlp_bias": True})
        for family in ("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3", "granite", "mixtral", "qwen3_moe", "olmoe")
    },
    "llama-old-type": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "llama-llama3-length": ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}),
    "llama-llama3-no-length": ("llama", {"rope_scaling": {k: LLAMA3[k] for k in LLAMA3 if k[:8] != "original"}}),
    "qwen3-yarn-length": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32}),
    "llama-yarn-two-lengths": ("llama", {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 16}),
}  # fmt: skip


def raw_reference(directory, row):
    """Write a random transformers model with a manually written config.json, and return the model."""
    family, differences = RAW_ROWS[row]
    directory.mkdir()
    raw = json.dumps({**SIZES, "model_type": family, **differences})
    (directory / "config.json").write_text(raw)
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **EAGER)
    except AttributeError:
        if row != "gemma3-one-rope":
            raise
        pytest.skip("transformers 5.17 cannot read it; later ones do")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model).save_pretrained(directory)
    (directory / "config.json").write_text(raw)
    return model


@pytest.mark.parametrize("row", RAW_ROWS)
def test_manually_written_configs_are_read_as_in_transformers(tmp_path, row):
    expected = raw_reference(tmp_path / "theirs", row)
    model, _ = whet.load(tmp_path / "theirs", dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder) == (row != "phi3-partial")
    save_model(model, None, tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, **EAGER)
    reloaded, _ = whet.load(tmp_path / "ours", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        logits = expected(tokens()).logits
        for output in (model(tokens()), loaded(tokens()).logits, reloaded(tokens())):
            torch.testing.assert_close(output, logits, rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "qwen2", "qwen3", "qwen3_moe"])
def test_default_sliding_window_is_that_of_transformers(family):
    layers = {"num_hidden_layers": 2, "use_sliding_window": True, "max_window_layers": 0}
    config = {**SIZES, **QWEN3_MOE, **layers, "model_type": family}
    theirs = transformers.AutoConfig.for_model(**config)
    assert (
        FAMILIES[family].from_config(config).blocks[0].grouped_attention.window
        == theirs.sliding_window
        == 4096
    )


def test_old_and_new_dtype_keys_agree(tmp_path):
    raw_reference(tmp_path / "theirs", "llama-old-type")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    save_model(ours(tmp_path / "theirs"), None, tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["dtype"] == saved["torch_dtype"] == "float32"


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    reference(tmp_path / "theirs", "llama-tied")
    model = ours(tmp_path / "theirs")
    save_model(model, None, tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_old_gpt2_files_without_prefix_and_with_masks_load(tmp_path):
    from safetensors.torch import load_file, save_file

    expected = reference(tmp_path, "gpt2")
    stored = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128) for layer in range(3)}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        torch.testing.assert_close(
            ours(tmp_path)(tokens()), expected(tokens()).logits, rtol=0, atol=LOGIT_TOLERANCE
        )
