"""Built-in tokenizers: lossless decoding, round trips through files, and errors."""

import pydoc_data.topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from whet.errors import ConfigError, DataError
from whet.models.from_scratch.train_tokenizer import byte_tokenizer, char_tokenizer, make_tokenizer, train_bpe

CORPUS = [pydoc_data.topics.topics["while"], pydoc_data.topics.topics["for"], "naïve café 🎉"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(TEXTS)
def test_byte_tokenizer_ids_are_the_bytes(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


BPE = train_bpe(CORPUS, vocab_size=400)


@given(TEXTS)
def test_bpe_decodes_every_text(text):
    assert BPE.decode(BPE(text)["input_ids"]) == text


def test_bpe_size_merges_and_reproducibility():
    assert len(BPE) == 400
    assert len(BPE(CORPUS[0])["input_ids"]) < len(CORPUS[0].encode()) / 1.5
    assert train_bpe(iter(CORPUS), vocab_size=400).get_vocab() == BPE.get_vocab()
    assert BPE.eos_token == "<|endoftext|>"


def test_char_tokenizer_has_the_characters_of_its_texts():
    tokenizer = char_tokenizer(["hello", "world"])
    assert len(tokenizer) == 2 + len(set("helloworld"))
    ids = tokenizer("low\u2603")["input_ids"]
    assert tokenizer.decode(ids[:3]) == "low"
    assert ids[3] == tokenizer.unk_token_id
    assert len(tokenizer("hello world")["input_ids"]) == 11


@pytest.mark.parametrize("spec", ["bytes", "chars", "bpe:300"])
def test_saved_tokenizer_is_loaded_by_transformers(spec, tmp_path):
    tokenizer = make_tokenizer(spec, CORPUS)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in CORPUS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("spec", ["words", "bpe", "bpe:", "bpe:-3", "bytes:4"])
def test_unknown_tokenizer_error_lists_the_known_ones(spec):
    with pytest.raises(ConfigError, match="bytes; chars; bpe:N"):
        make_tokenizer(spec, CORPUS)


def test_too_small_vocabulary_and_empty_corpus_raise_errors():
    with pytest.raises(ConfigError, match="a byte-level BPE cannot have only 200 tokens"):
        make_tokenizer("bpe:200", CORPUS)
    with pytest.raises(DataError, match="needs text"):
        make_tokenizer("bpe:300", [""])
    with pytest.raises(DataError, match="needs text"):
        make_tokenizer("chars", [])
