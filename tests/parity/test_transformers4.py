"""transformers 4 and transformers 5 read whet's files in the same way.

`make compat` builds the environment with transformers 4, and WHET_TRANSFORMERS4 names its Python. transformers 4
silently ignores unknown keys and tensor names and uses its defaults instead, so only results can be compared.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import whet
from parity.test_bridge import COMMON, GROUPED
from parity.test_families import ROWS, reference
from tiny import TEMPLATE, run_config
from whet.model_io.load_transformers import load_bridge
from whet.model_io.save import save_model
from whet.model_io.tokenizer_files import save_tokenizer

VOCAB = 97
TEXTS = ["a sharp knife", "", "  two  spaces\n", "naïve 数字 🙂", "<|special|>x", "<s>"]
THETA = {"rope_type": "default", "rope_theta": 50.0}
LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}
PARTIAL = {**THETA, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 50.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
LONGER = {**LONG, "original_max_position_embeddings": 16, "attention_factor": 1.3}
MSCALES = {"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 16}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# models that use the bridge, with a RoPE that differs from the default of the class
BRIDGED = {
    "phi": {**COMMON, "rope_parameters": PARTIAL},
    "gpt_neox": {**COMMON, "rope_parameters": PARTIAL},
    "cohere": {**GROUPED, "rope_parameters": LINEAR},
    "glm4": {**GROUPED, "head_dim": 8, "rope_parameters": PARTIAL},
    "gemma": {**GROUPED, "head_dim": 8, "rope_parameters": THETA},
    "starcoder2": {**GROUPED, "rope_parameters": LINEAR},
    "phi3": {**GROUPED, "original_max_position_embeddings": 16, "rope_parameters": LONG},
    "gemma3_text": {
        **GROUPED,
        **TWO_KINDS,
        "rope_parameters": {"sliding_attention": {**THETA, "rope_theta": 30.0}, "full_attention": LINEAR},
    },
    "olmo3": {**GROUPED, **TWO_KINDS, "rope_parameters": dict.fromkeys(TWO_KINDS["layer_types"], THETA)},
    "qwen2_moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24, "rope_parameters": LINEAR},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": THETA},
}
# settings that the keys of transformers 4 cannot express, although transformers 5 prefers those keys
LONG_ROPES = {
    "phimoe": {**GROUPED, "num_local_experts": 4, "rope_parameters": {**LONG, **MSCALES}},
    "qwen2_moe": {**BRIDGED["qwen2_moe"], "rope_parameters": LONGER},
    "phi3": {**BRIDGED["phi3"], "rope_parameters": {**LONG, "attention_factor": 1.3}},
}
NATIVE = [
    "llama-tied",
    "llama-llama3-rope",
    "llama-yarn-mscale",
    "llama-linear-rope",
    "mistral-window",
    "qwen2-windows",
    "qwen3moe",
    "gemma3",
    "smollm3-some-rope",
    "phi3",
    "granite",
    "mixtral",
    "olmoe",
    "gpt2",
]


def write_bridged(directory, family, settings=None):
    """Write a model as transformers 5 saves it (theirs) and as whet saves it (ours)."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(settings or BRIDGED[family]))
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory / "theirs")
    bridge = load_bridge(directory / "theirs", dtype=torch.float32, device=torch.device("cpu"))
    save_model(bridge, None, directory / "ours")
    return bridge


def tokens():
    return torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


def names_in(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("family", LONG_ROPES)
def test_transformers_5_reads_every_key_of_a_long_rope(tmp_path, family):
    write_bridged(tmp_path, family, LONG_ROPES[family])
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("theirs", "ours")]
    with torch.no_grad():
        for length in (8, 24):  # with the short factors and with the long ones
            theirs, ours = (model(tokens()[:, :length]).logits for model in models)
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", BRIDGED)
def test_tensor_names_are_those_of_the_hub(tmp_path, family):
    """transformers writes the same names. transformers 4 would randomly initialize missing tensors."""
    bridge = write_bridged(tmp_path, family)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    loaded = load_bridge(tmp_path / "ours", dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(loaded(tokens()), bridge(tokens()))


def test_configs_have_the_keys_of_transformers_4(tmp_path):
    expected = {
        "gpt_neox": {"rotary_emb_base": 50.0, "rotary_pct": 0.5},
        "phi": {"rope_theta": 50.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
        "cohere": {"rope_theta": 50.0, "rope_scaling": LINEAR},
        "gemma3_text": {"rope_theta": 50.0, "rope_local_base_freq": 30.0, "rope_scaling": LINEAR},
    }
    for family, keys in expected.items():
        write_bridged(tmp_path / family, family)
        saved = json.loads((tmp_path / family / "ours" / "config.json").read_text())
        assert {key: saved.get(key) for key in keys} == keys
        assert saved["torch_dtype"] == saved["dtype"] == "float32"


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def generic_tokenizer():
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|special|>"],
        chat_template=TEMPLATE,
    )


def tokenizer_with_template():
    backend = byte_tokenizer()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|end|>")


def sentencepiece_like(name, special):
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "th"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return getattr(transformers, name)(vocab=vocab, merges=[("t", "h")])


TOKENIZERS = {
    "generic": generic_tokenizer,
    "with-bos": tokenizer_with_template,
    "llama": lambda: sentencepiece_like("LlamaTokenizer", ["<unk>", "<s>", "</s>"]),
    "gemma": lambda: sentencepiece_like("GemmaTokenizer", ["<pad>", "<eos>", "<bos>", "<unk>"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_saved_tokenizer_is_unchanged(tmp_path, name):
    tokenizer = TOKENIZERS[name]()
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert [loaded(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert sorted(loaded.all_special_tokens) == sorted(tokenizer.all_special_tokens)
    assert loaded.chat_template == tokenizer.chat_template
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] != "TokenizersBackend"
    assert "token_type_ids" not in saved["model_input_names"]
    assert not isinstance(saved.get("extra_special_tokens"), list)


def in_transformers_4(jobs):
    python = os.environ.get("WHET_TRANSFORMERS4")
    if not python:
        pytest.skip("WHET_TRANSFORMERS4 is not set: run make compat")
    environment = {"PATH": os.environ.get("PATH", ""), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [python, str(Path(__file__).with_name("transformers4_side.py"))],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout)


def job(path, kind="model", **inputs):
    return {"path": str(path), "kind": kind, **inputs}


@pytest.mark.slow
def test_models_match_in_transformers_4(tmp_path):
    expected, jobs = {}, []
    for row in NATIVE:
        assert row in ROWS
        reference(tmp_path / row / "theirs", row)
        model, _ = whet.load(tmp_path / row / "theirs", dtype=torch.float32, device="cpu")
        save_model(model, None, tmp_path / row / "ours")
        expected[row] = model
    for family in BRIDGED:
        expected[f"bridged {family}"] = write_bridged(tmp_path / f"bridged {family}", family)
    jobs = [job(tmp_path / name / "ours", tokens=tokens().tolist()) for name in expected]
    for (name, model), result in zip(expected.items(), in_transformers_4(jobs), strict=True):
        with torch.no_grad():
            difference = (torch.tensor(result["logits"]) - model(tokens())).abs().max()
        assert difference < 2e-4, name


@pytest.mark.slow
def test_tokenizers_match_in_transformers_4(tmp_path):
    for name, make in TOKENIZERS.items():
        save_tokenizer(make(), tmp_path / name)
    jobs = [job(tmp_path / name, texts=TEXTS) for name in TOKENIZERS]
    for (name, make), result in zip(TOKENIZERS.items(), in_transformers_4(jobs), strict=True):
        tokenizer = make()
        assert result["encoded"] == [dict(tokenizer(text)) for text in TEXTS], name
        assert result["special"] == sorted(tokenizer.all_special_tokens), name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_finished_run_and_its_exports_load(request, tmp_path, model):
    directory = request.getfixturevalue(f"{model}_directory")
    config = run_config(directory, tmp_path, run={"steps": 2, "batch_size": 2}, data={"valid": None})
    run = whet.train(config).directory
    ours, tokenizer = whet.load(run, dtype=torch.float32, device="cpu")
    from typer.testing import CliRunner

    from whet.cli.app import app

    cli_result = CliRunner().invoke(app, ["export", str(run), "--to", "hf", "--dtype", "float32"])
    assert cli_result.exit_code == 0, cli_result.output
    inputs = {"tokens": tokens().tolist(), "texts": TEXTS}
    results = in_transformers_4(
        [job(run / "final", "adapter", **inputs), job(run / "export" / "hf", **inputs)]
    )
    with torch.no_grad():
        logits = ours(tokens())
    chat = [{"role": "user", "content": "a sharp knife"}]
    for result in results:
        assert (torch.tensor(result["logits"]) - logits).abs().max() < 1e-3
        assert result["encoded"] == [dict(tokenizer(text)) for text in TEXTS]
        assert result["chat"] == tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
