"""Rejected and masked turns: message marks, empty completions, boolean labels, null content."""

import json

import pytest

from tiny import TEMPLATE
from whet.data.sources.source import Record, open_source, validate_record
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.tokenize import Encoder
from whet.errors import DataError

SMOL = (  # like SmolLM2: writes only the contents
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOLS = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'] or '' }}{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% endif %}",
)
CALL = [{"type": "function", "function": {"name": "light", "arguments": {"on": True}}}]
USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def record(**fields):
    return Record(fields, "here.jsonl:7")


def chat(*contents, **marks):
    """Return alternating user and assistant messages; `marks` are fields of the first assistant turn."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    messages[1] |= marks
    return record(messages=messages)


def supervised(tokenizer, one, **settings):
    example = Encoder(tokenizer).encode_one(Renderer(tokenizer, **settings).render(one))
    return tokenizer.decode([t for t, mark in zip(example.tokens, example.supervised, strict=True) if mark])


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 0, "train": True}]
)
def test_message_with_weight_zero_is_context(tiny, mark):
    one = chat("a", "bad", "b", "good", **mark)
    assert supervised(tiny[1], one) == "good<|end|>"
    full_text = "<|user|>a<|end|><|assistant|>bad<|end|><|user|>b<|end|><|assistant|>good<|end|>"
    example = Encoder(tiny[1]).encode_one(Renderer(tiny[1]).render(one))
    assert tiny[1].decode(example.tokens) == full_text
    assert supervised(tiny[1], one, supervise="all") == full_text.replace("bad<|end|>", "")
    assert supervised(tiny[1], one, supervise="last") == "good<|end|>"
    assert one.fields["messages"][1]["content"] == "bad"


def test_mask_is_not_passed_to_the_template(tiny):
    tiny[1].chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m.keys() | list | length }}{{ m['content'] }}"
    )
    assert supervised(tiny[1], chat("a", "b", "c", "d", weight=0)) == "2d<|end|>"


@pytest.mark.parametrize("mark", [{"weight": 1}, {"weight": 1.0}, {"train": True}, {"weight": None}])
def test_message_with_weight_one_is_supervised(tiny, mark):
    assert supervised(tiny[1], chat("a", "b", "c", "d", **mark)) == "b<|end|>d<|end|>"


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"weight": -1}, "here.jsonl:7: message 2: weight must be a number from 0 to 1,000,000, not -1"),
        ({"weight": "0"}, "weight must be a number from 0 to 1,000,000, not '0'"),
        ({"weight": True}, "weight must be a number from 0 to 1,000,000, not True"),
        ({"weight": 1e7}, "weight must be a number"),
        ({"train": "no"}, "message 2: train must be true or false, not 'no'"),
    ],
)
def test_invalid_weights_are_rejected(tiny, mark, message):
    with pytest.raises(DataError, match=message):
        supervised(tiny[1], chat("a", "b", **mark))


def test_record_without_supervised_tokens_is_bad(tiny):
    with pytest.raises(DataError, match="no token of this example is supervised"):
        supervised(tiny[1], chat("a", "b", weight=0))


def test_weights_of_sharegpt_turns_are_applied(tiny):
    """As in OpenHermes: human turns have weight 0, and assistant turns may."""
    turns = [("human", "a", 0), ("gpt", "bad", 0), ("human", "b", 0), ("gpt", "good", 1)]
    conversations = [{"from": who, "value": text, "weight": weight} for who, text, weight in turns]
    assert supervised(tiny[1], record(conversations=conversations)) == "good<|end|>"


def test_system_field_of_conversations_is_read_in_both_spellings(tiny):
    for turns in ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], [USER, REPLY]):
        one = validate_record(record(conversations=turns, system="Be brief."))
        assert [message["role"] for message in one.fields["messages"]] == ["system", "user", "assistant"]


def test_masked_messages_of_a_completion_are_not_supervised(tiny):
    answer = [
        {**REPLY, "weight": 0},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "x"},
    ]
    chosen, rejected = Renderer(tiny[1]).render_pair(record(prompt="q", chosen=answer, rejected="no"))
    learned = "".join(chosen.text[low:high] for low, high in chosen.spans)
    assert learned == "<|user|>more<|end|><|assistant|>x<|end|>"
    assert [rejected.text[low:high] for low, high in rejected.spans] == ["no<|end|>"]


@pytest.mark.parametrize("supervise", ["assistant", "last", "all"])
@pytest.mark.parametrize("content", ["", None])
def test_tool_call_omitted_by_template_is_rejected(tiny, supervise, content):
    tiny[1].chat_template = SMOL
    one = chat("a", content, tool_calls=CALL)
    with pytest.raises(
        DataError, match="7: message 2 .assistant. renders as empty text: .* omits tool_calls\n"
    ):
        supervised(tiny[1], one, supervise=supervise)
    assert supervised(tiny[1], one, allow_empty=True) == "<|end|>"


@pytest.mark.parametrize("content", ["", None])
def test_tool_call_written_by_template_is_supervised(tiny, content):
    tiny[1].chat_template = TOOLS
    assert supervised(tiny[1], chat("a", content, tool_calls=CALL)) == "[light]<|end|>"


def test_null_content_with_tool_calls_is_not_rendered_as_none(tiny):
    tiny[1].chat_template = TOOLS.replace("m['content'] or ''", "m['content']")
    assert supervised(tiny[1], chat("None?", None, tool_calls=CALL)) == "[light]<|end|>"
    tiny[1].chat_template = TOOLS.replace("{% if m.tool_calls", "{% if m.content is none and m.tool_calls")
    assert supervised(tiny[1], chat("a", None, tool_calls=CALL)) == "[light]<|end|>"


def test_error_names_null_content(tiny):
    with pytest.raises(
        DataError, match=r"here.jsonl:7: message 2 \(assistant\) has no text content: it is null"
    ):
        supervised(tiny[1], chat("a", None))


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_empty_completions_are_rejected_unless_allowed(tiny, template):
    tiny[1].chat_template = template
    one = record(prompt="q", completion="")
    with pytest.raises(
        DataError, match="here.jsonl:7: the .* renders as empty text\n.*data.allow_empty_answers"
    ):
        supervised(tiny[1], one)
    assert supervised(tiny[1], one, allow_empty=True) == "<|end|>"
    with pytest.raises(DataError, match="renders as empty text"):
        Renderer(tiny[1]).render_pair(record(prompt="q", chosen="", rejected="x"))
    Renderer(tiny[1]).render_pair(record(prompt="q", chosen="x", rejected=""))


def test_empty_turn_may_be_context(tiny):
    assert supervised(tiny[1], chat("a", "", "b", "c", weight=0)) == "c<|end|>"
    assert supervised(tiny[1], chat("a", "", "b", "c"), supervise="last") == "c<|end|>"


def test_completion_stripped_to_nothing_by_template_is_rejected(tiny):
    tiny[1].chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] | trim }}"
    )
    with pytest.raises(DataError, match="renders as empty text: the chat template omits content"):
        supervised(tiny[1], chat("a", "<think>so</think>"))
    assert supervised(tiny[1], chat("a", "<think>so</think> b")) == "b<|end|>"


@pytest.mark.parametrize("label", [True, False, "True", "false"])
@pytest.mark.parametrize(
    "fields",
    [{"prompt": "q", "completion": "a"}, {"messages": [USER, REPLY]}, {"instruction": "q", "output": "a"}],
)
def test_completions_with_boolean_label_are_rejected(tiny, fields, label):
    with pytest.raises(
        DataError,
        match="here.jsonl:7: label: .* marks a good or bad completion .*would imitate both\n.*chosen and rejected",
    ):
        supervised(tiny[1], record(**fields, label=label))


def test_other_labels_are_accepted(tiny):
    assert supervised(tiny[1], record(prompt="q", completion="a", label="sports")) == "a<|end|>"


def test_allow_empty_uses_a_separate_token_store(tiny, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": ""}) + "\n")
    allowed = Preparation(tiny[1], cache=tmp_path / "cache", allow_empty=True)
    assert len(allowed.store(open_source(str(path)))) == 1
    with pytest.raises(DataError, match="renders as empty text"):
        Preparation(tiny[1], cache=tmp_path / "cache").store(open_source(str(path)))


def test_hint_names_the_field_to_rename(tiny):
    with pytest.raises(
        DataError,
        match="a prompt record has no text to supervise .*\n.*set data.columns: {completion: response}",
    ):
        supervised(tiny[1], record(prompt="q", response="a"))
