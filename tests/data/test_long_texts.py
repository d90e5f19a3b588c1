"""Long texts give the same tokens as in one piece, and memory stays flat."""

import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from whet.data.tokens import long_texts
from whet.data.tokens import tokenize as encode_module
from whet.data.tokens.rendering import Rendering
from whet.data.tokens.tokenize import Encoder
from whet.errors import DataError

WORDS = [
    "the",
    "quick",
    "brown",
    "fox,",
    "naïve",
    "12345",
    "hens",
    "—",
    "don't",
    "stop!",
    "日本語",
    "🙂🙂",
    "<|x|>",
    "\n\n\t",
    "",
    "x",
    "y",
]


def text(seed, words=6000):
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice([" ", " ", "  ", "\n", ""]) for _ in range(words))


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<|x|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text(0)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def sentences():
    """A tokenizer without a pre-tokenizer: the text is one word, as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], max_token_length=8)
    tokenizer.train_from_iterator([line[:400] for line in text(0, 2000).split("\n")], trainer)
    return tokenizer


def words():
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator([text(0)], trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"]))
    return tokenizer


class Wrapped:
    """The part of a transformers tokenizer that is used."""

    eos_token_id = 1

    def __init__(self, backend):
        self.backend_tokenizer = backend

    def __call__(self, given, **_):
        return {"special_tokens_mask": self.backend_tokenizer.encode(given).special_tokens_mask}


@pytest.fixture
def short(monkeypatch):
    for name, size in (
        ("MAX_WINDOW_CHARS", 2000),
        ("OVERLAP_CHARS", 600),
        ("_MATCH_CHARS", 64),
        ("MAX_UNSPLIT_CHARS", 5000),
    ):
        monkeypatch.setattr(long_texts, name, size)
    monkeypatch.setattr(encode_module, "MAX_WINDOW_CHARS", 2000)


@pytest.mark.parametrize("make", [byte_level, sentences, words])
@pytest.mark.parametrize("plain", [False, True])
def test_windows_give_the_tokens_and_mask_of_the_full_text(make, plain, monkeypatch):
    encoder = Encoder(Wrapped(make()))
    for seed in range(3):
        long = text(seed)
        for spans in ([(0, len(long))], [(100, 3000), (len(long) // 2, len(long) - 7)]):
            rendering = Rendering(long, spans, plain, plain, "here")
            expected = encoder.encode_one(rendering)
            with monkeypatch.context() as patched:
                for name, size in (
                    ("MAX_WINDOW_CHARS", 4000),
                    ("OVERLAP_CHARS", 1000),
                    ("_MATCH_CHARS", 100),
                ):
                    patched.setattr(long_texts, name, size)
                patched.setattr(long_texts, "MAX_UNSPLIT_CHARS", 0)  # never in one piece
                patched.setattr(encode_module, "MAX_WINDOW_CHARS", 4000)
                example = encoder.encode_one(rendering)
            assert example.tokens.tolist() == expected.tokens.tolist()
            assert example.supervised.tolist() == expected.supervised.tolist()


@pytest.mark.usefixtures("short")
def test_text_without_a_split_position_is_tokenized_at_once_or_rejected():
    backend = byte_level()
    encoder = Encoder(Wrapped(backend))
    for size in (2500, 4999, 6000):
        one_word = "".join(random.Random(size).choices("thequickbrown", k=size))
        rendering = Rendering(one_word, [(0, size)], False, False, "data.jsonl:7")
        [example] = encoder.encode([rendering])
        if size > 5000 and isinstance(example, DataError):
            assert "data.jsonl:7: a text of 6,000 characters" in example.message
        else:
            assert example.tokens.tolist() == backend.encode(one_word, add_special_tokens=False).ids


@pytest.mark.usefixtures("short")
def test_long_and_bad_texts_may_share_a_batch(tiny):
    encoder = Encoder(tiny[1])
    texts = ["short", "x" * 3000, "half \ud800" + "x" * 3000, "half \ud800"]
    examples = encoder.encode([Rendering(each, [(0, len(each))], True, True, "here") for each in texts])
    assert [isinstance(each, DataError) for each in examples] == [False, False, True, True]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tiny_directory):
    code = f"""
import resource
from transformers import AutoTokenizer
from whet.data.tokens.tokenize import Encoder
from whet.data.tokens.rendering import Rendering
tokenizer = AutoTokenizer.from_pretrained({str(tiny_directory)!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = "some words that repeat " * 434_000
example = Encoder(tokenizer).encode_one(Rendering(text, [(5, len(text))], True, True, "here"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(done.stdout) < 1200  # one token per byte; in one piece it took over 3,000
