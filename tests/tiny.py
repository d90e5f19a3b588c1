"""Small test inputs: a random model on disk, examples and configs."""

import json
import random
import subprocess
import sys

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from whet.data.sources.source import open_source
from whet.data.tokens.examples import Example

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_tokenizer(directory):
    """Write a byte-level tokenizer with 256 bytes and four special tokens, which round-trips any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def write_tiny_model(directory, **overrides):
    """Write a random llama of about 40k parameters with the tokenizer above."""
    torch.manual_seed(0)
    config = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    LlamaForCausalLM(LlamaConfig(**{**config, **overrides})).save_pretrained(directory)
    write_tokenizer(directory)


def random_examples(count, *, seed=0, shortest=3, longest=40, vocab=260):
    """Return examples of random tokens, about half of them supervised, at least one per example."""
    rng = random.Random(seed)
    examples = []
    for index in range(count):
        length = rng.randint(shortest, longest)
        supervised = [rng.random() < 0.5 for _ in range(length)]
        supervised[-1] = True
        examples.append(
            Example([rng.randrange(vocab) for _ in range(length)], supervised, f"example {index}")
        )
    return examples


def weighted_examples(count, *, seed=0, share=0.5):
    """Return random examples, about a share of them with weights; the first has none."""
    rng = np.random.default_rng(seed)
    examples = []
    for number, one in enumerate(random_examples(count, seed=seed)):
        weights = np.where(one.supervised, rng.choice([0.25, 0.5, 1, 3], len(one.tokens)), 0)
        has_weights = number > 0 and rng.random() < share
        examples.append(
            Example(
                one.tokens,
                one.supervised,
                one.origin,
                weights=weights.astype(np.float32) if has_weights else None,
            )
        )
    return examples


def weights_of(example):
    """Return the loss weight of each token of an example."""
    return np.asarray(example.supervised if example.weights is None else example.weights, dtype=np.float32)


def run_config(tiny_directory, tmp_path, **sections):
    """Return the config of a short LoRA run on the tiny model, with some keys replaced."""
    config = {
        "model": str(tiny_directory),
        "method": {"kind": "lora", "rank": 4},
        "data": {"train": "synth:house:24", "valid": "synth:house-valid:6", "max_length": 256},
        "optim": {"lr": 1e-2, "warmup": 2},
        "run": {
            "name": "test",
            "dir": f"{tmp_path}/runs",
            "steps": 4,
            "batch_size": 4,
            "micro_batch_tokens": 512,
            "device": "cpu",
            "precision": "fp32",
        },
    }
    for name, keys in sections.items():
        config[name] = {**config.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return config


def read_records(spec):
    """Return all records of a source."""
    return list(open_source(spec))


def run_commands(*commands, cwd):
    """Run several whet commands in one subprocess; each must succeed."""
    script = """
import json, sys
from whet.cli.app import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["whet", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""
    arguments = json.dumps([[str(word) for word in command] for command in commands])
    completed = subprocess.run(
        [sys.executable, "-c", script, arguments], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert completed.returncode == 0, completed.stderr
