"""A file in each format that other tools document, and what of it is supervised.

The tokenizer is byte-level: the expected number of supervised tokens is the number of supervised characters
and one token that ends each answer.
"""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from whet.data.sources.source import open_source
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.prompts import read_prompts
from whet.errors import DataError

FORMATS = Path(__file__).parent / "formats"
END = 1  # the token that ends an answer
# writes tools and tool calls, as the templates of models that were trained on them do
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = '{"name": "lamp", "arguments": {"on": true}}'


@pytest.fixture(scope="module")
def tokenizer(tiny_directory):
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


def prepare(name, tokenizer, cache, *, columns=None, pairs=False):
    source = open_source(str(FORMATS / f"{name}.jsonl"), columns=columns or {})
    store = Preparation(tokenizer, cache=cache, pairs=pairs).store(source)
    texts = []
    for start, stop in zip(store.bounds[:-1], store.bounds[1:], strict=True):
        tokens, mask = store.read(int(start), int(stop))
        texts.append(tokenizer.decode(tokens[mask], clean_up_tokenization_spaces=False))
    return [record.record_format for record in source], store.supervised_counts.tolist(), texts


@pytest.mark.parametrize(
    ("name", "record_format", "texts"),
    [
        ("openai_messages", "messages", ["Hello.<|end|>Bye.<|end|>"]),
        ("openai_tools", "messages", [f"{CALL}<|end|>It is on.<|end|>"]),
        ("sharegpt", "messages", ["Hello.<|end|>Bye.<|end|>"]),
        ("sharegpt_tools", "messages", [f"{CALL}<|end|>It is on.<|end|>"]),
        ("alpaca", "completion", ["Hund<|end|>", "Hello.<|end|>"]),
        ("alpaca_history", "messages", ["Hello.<|end|>Bye.<|end|>"]),
        ("trl_prompt_completion", "completion", ["Hello.<|end|>"]),
        ("trl_conversational_completion", "messages", ["Bye.<|end|>"]),
        ("raw_text", "text", ["Once upon a time.<|end|>"]),
    ],
)
def test_supervised_text_of_each_format(name, record_format, texts, tokenizer, tmp_path):
    formats, counts, supervised = prepare(name, tokenizer, tmp_path)
    assert set(formats) == {record_format}
    assert supervised == texts
    # the first token of a plain text is never a target
    expected = [len(text.replace("<|end|>", "")) + text.count("<|end|>") * END for text in texts]
    assert counts == [count - (record_format == "text") for count in expected]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("openai_preference", ["Hello.<|end|>", "What?<|end|>"]),
        ("sharegpt_preference", ["Hello.<|end|>", "What?<|end|>"]),
        ("trl_preference", ["Hello.<|end|>", "What?<|end|>"]),
        ("trl_implicit_conversation", ["Hello.<|end|>", "What?<|end|>"]),
        ("trl_implicit_prompt", [" blue.<|end|>", " green.<|end|>"]),
    ],
)
def test_preferences_supervise_both_answers(name, texts, tokenizer, tmp_path):
    formats, counts, supervised = prepare(name, tokenizer, tmp_path, pairs=True)
    assert formats == ["preference"]
    assert supervised == texts
    assert counts == [len(text.replace("<|end|>", "")) + END for text in texts]


def test_pretokenized_records_keep_their_labels(tokenizer, tmp_path):
    formats, counts, _ = prepare("pretokenized", tokenizer, tmp_path)
    assert formats == ["tokens", "tokens"]
    assert counts == [2, 1]  # two labels; the second token of a text without labels
    store = Preparation(tokenizer, cache=tmp_path).store(open_source(str(FORMATS / "pretokenized.jsonl")))
    tokens, mask = store.read(0, int(store.bounds[1]))
    assert tokens.tolist() == [72, 105, 33, 256]  # without the padding, and nothing added
    assert mask.tolist() == [False, False, True, True]


def test_own_columns_are_suggested_and_mapped(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"set data.columns: \{prompt: question, completion: response\}"):
        prepare("own_columns", tokenizer, tmp_path)
    columns = {"prompt": "question", "completion": "response"}
    assert prepare("own_columns", tokenizer, tmp_path, columns=columns)[2] == ["Hello.<|end|>"]


def test_reward_prompts_keep_all_columns(tokenizer):
    prompts = read_prompts(open_source(str(FORMATS / "reward_prompts.jsonl")), tokenizer)
    assert [prompt.question.text for prompt in prompts] == ["1+1?", "2+2?"]
    assert prompts[0].fields == {"prompt": "1+1?", "answer": "2", "difficulty": 3, "unit_tests": ["a", "b"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trl_kto", r"trl_kto.jsonl:1: label: true marks a good or bad completion \(as for KTO\)"),
        ("trl_stepwise", "trl_stepwise.jsonl:1: completions with labels are stepwise supervision"),
        ("trl_vision", "trl_vision.jsonl:1: message 1 has a content part of type image: .* multimodal model"),
        (
            "llamafactory_images",
            "llamafactory_images.jsonl:1: the field images belongs to a multimodal model",
        ),
    ],
)
def test_formats_without_support_are_refused_by_name(name, message, tokenizer, tmp_path):
    with pytest.raises(DataError, match=message):
        prepare(name, tokenizer, tmp_path)
