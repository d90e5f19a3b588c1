"""Tokens and loss masks of examples."""

import copy
import json
from datetime import date

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import whet
from tiny import TEMPLATE, read_records, write_tokenizer
from whet.data.sources.source import Record
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.tokenize import Encoder, token_bytes
from whet.errors import DataError


class Rendered:
    """Render and encode records in one step."""

    def __init__(self, tokenizer, **settings):
        self.render, self.encode = Renderer(tokenizer, **settings), Encoder(tokenizer)

    def example(self, record):
        return self.encode.encode_one(self.render.render(record))

    def question(self, record):
        prompt = self.render.render_question(record)
        return None if prompt is None else self.encode.encode_question(prompt)


def renderer(tiny, **settings):
    return Rendered(tiny[1], **settings)


def record(**fields):
    return Record(fields, "here.jsonl:7")


def supervised_text(tiny, example):
    """Return the supervised tokens as text."""
    chosen = [token for token, mark in zip(example.tokens, example.supervised, strict=True) if mark]
    return tiny[1].decode(chosen)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "7, naïve friend"},
]


@pytest.mark.parametrize(
    ("supervise", "expected"),
    [
        ("assistant", "4<|end|>7, naïve friend<|end|>"),
        ("last", "7, naïve friend<|end|>"),
        ("all", "<|system|>Be brief.<|end|><|user|>2+2?<|end|><|assistant|>4<|end|><|user|>and 3?<|end|>"
                "<|assistant|>7, naïve friend<|end|>"),
    ],
)  # fmt: skip
def test_supervise_selects_turns_with_their_end_token(tiny, supervise, expected):
    example = renderer(tiny, supervise=supervise).example(record(messages=CHAT))
    assert supervised_text(tiny, example) == expected
    full_text = tiny[1].apply_chat_template(CHAT, tokenize=False)
    assert tiny[1].decode(example.tokens) == full_text


def test_prompt_and_completion_are_two_turns_with_a_template(tiny):
    example = renderer(tiny).example(record(prompt="2+2?", completion="4"))
    assert tiny[1].decode(example.tokens) == "<|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert supervised_text(tiny, example) == "4<|end|>"


def test_prompt_and_completion_are_joined_with_eos_without_a_template(tiny):
    tiny[1].chat_template = None
    example = renderer(tiny).example(record(prompt="2+2=", completion="4"))
    assert tiny[1].decode(example.tokens) == "2+2=4<|end|>"
    assert supervised_text(tiny, example) == "4<|end|>"
    with pytest.raises(DataError, match="need a chat template, and this tokenizer has none"):
        renderer(tiny).example(record(messages=CHAT))


def test_text_is_fully_supervised_with_one_eos(tiny):
    example = renderer(tiny).example(record(text="hello"))
    assert supervised_text(tiny, example) == "hello<|end|>"
    assert example.supervised_count == 5  # the first token is never a target


def test_text_that_ends_with_eos_gets_no_second_eos(tiny):
    ended, plain = (renderer(tiny).example(record(text=text)) for text in ("hello<|end|>", "hello"))
    assert ended.tokens.tolist() == plain.tokens.tolist()
    assert ended.supervised.tolist() == plain.supervised.tolist()
    tiny[1].chat_template = None
    example = renderer(tiny).example(record(prompt="2+2=", completion="4<|end|>"))
    assert supervised_text(tiny, example) == "4<|end|>"
    unlearned = renderer(tiny, allow_empty=True).example(record(prompt="2+2=4<|end|>", completion=""))
    assert supervised_text(tiny, unlearned) == "<|end|>"
    assert tiny[1].decode(unlearned.tokens) == "2+2=4<|end|><|end|>"


def test_eos_is_supervised_if_pad_equals_eos(tiny):
    """The mask depends on positions: a pad token equal to EOS must not remove EOS from the targets."""
    assert tiny[1].pad_token_id == tiny[1].eos_token_id
    example = renderer(tiny).example(record(messages=CHAT))
    assert example.supervised[-1]
    assert example.tokens[-1] == tiny[1].eos_token_id


def test_only_the_last_turn_is_supervised_if_template_rewrites_earlier_turns(tiny):
    """Some templates remove the reasoning of earlier turns, so these turns cannot be supervised."""
    tiny[1].chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] != 'assistant' else '...' }}"
    )
    example = renderer(tiny).example(record(messages=CHAT))
    assert supervised_text(tiny, example) == "7, naïve friend<|end|>"
    assert Renderer(tiny[1]).render(record(messages=CHAT)).only_last
    assert not Renderer(tiny[1]).render(record(messages=CHAT[:3])).only_last


def test_template_that_rewrites_the_last_turn_is_rejected(tiny):
    tiny[1].chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last else '...' }}"
    )
    with pytest.raises(
        DataError, match=r"here.jsonl:7: the chat template rewrites earlier turns.*\n.*supervise"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_template_with_a_different_generation_prompt_is_rejected(tiny):
    tiny[1].chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>Sure:\n{% endif %}"
    )
    with pytest.raises(
        DataError, match=r"ends a prompt with 'Sure:\\n', but does not write this before message 5"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_batch_is_encoded_like_single_texts_despite_bad_ones(tiny):
    make = renderer(tiny)
    records = [
        record(messages=CHAT),
        record(text="plain"),
        record(text="half \ud800"),
        record(prompt="a", completion="b"),
    ]
    examples = make.encode.encode([make.render.render(r) for r in records])
    assert isinstance(examples[2], DataError)
    for r, example in zip(records, examples, strict=True):
        if not isinstance(example, DataError):
            single = make.example(r)
            assert example.tokens.tolist() == single.tokens.tolist()
            assert example.supervised.tolist() == single.supervised.tolist()


def test_truncation_and_padding_of_tokenizer_json_are_not_applied(tiny):
    tiny[1].backend_tokenizer.enable_truncation(4)
    tiny[1].backend_tokenizer.enable_padding(length=50)
    assert supervised_text(tiny, renderer(tiny).example(record(text="hello world"))) == "hello world<|end|>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"question": "x", "reply": "y"}, "fields 'question', 'reply' matches no known record format"),
        ({}, "fields none matches no known record format"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [{"content": "hi"}]}, "message 1 must be an object with a role"),
        ({"messages": [{"role": "user"}]}, r"message 1 .user. has no text content"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no token of this example is supervised"),
        ({"prompt": "a", "completion": 3}, "completion must be a string or a list of messages, not int"),
        ({"text": None}, r"fields 'text' .null. matches no known record format"),
        ({"text": 3}, "text must be a string"),
        ({"prompt": "only"}, "a prompt record has no text to supervise"),
        ({"text": "half a pair \ud800"}, "the tokenizer cannot read this text"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": 3}, "here.jsonl:7"),
    ],
)
def test_bad_record_error_has_origin(tiny, fields, message):
    with pytest.raises(DataError, match=message) as caught:
        renderer(tiny).example(record(**fields))
    assert "here.jsonl:7" in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("'{1}'.format('a')", "index out of range"),
        ("'{a}'.format()", "a"),
        ("'abc' | dictsort", "no attribute 'items'"),
        ("'a' + 1", "can only concatenate"),
        ("'a'.index('b')", "substring not found"),
        ("raise_exception('no')", "no"),
    ],
)
def test_template_error_has_origin(tiny, expression, message):
    tiny[1].chat_template = f"{{{{ {expression} }}}}{TEMPLATE}"
    with pytest.raises(
        DataError, match=f"here.jsonl:7: the chat template rejects these messages: .*{message}"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_template_syntax_error_is_not_blamed_on_messages(tiny):
    tiny[1].chat_template = "{{ messages }}\n{% if %}"
    with pytest.raises(
        DataError, match="here.jsonl:7: the chat template is not valid Jinja: line 2: Expected"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_question_ends_where_the_answer_starts(tiny):
    question = renderer(tiny).question(record(messages=CHAT, group="known"))
    assert tiny[1].decode(question.tokens).endswith("<|user|>and 3?<|end|><|assistant|>")
    assert (question.answer, question.text, question.group) == ("7, naïve friend", "and 3?", "known")
    assert renderer(tiny).question(record(text="x")) is None
    assert renderer(tiny).question(record(messages=CHAT[:2])) is None
    assert renderer(tiny, supervise="all").question(record(prompt="p", completion="c")).answer == "c"


def test_tool_call_answer_gives_no_question(tiny):
    for turn in (
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": []},
    ):
        assert renderer(tiny).question(record(messages=[CHAT[1], turn])) is None


def test_jsonl_is_read_line_by_line(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n\n  \n{"text": "b"}')
    assert [(r.fields["text"], r.origin) for r in read_records(str(path))] == [
        ("a", f"{path}:1"),
        ("b", f"{path}:4"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"data.jsonl:2: not valid JSON"),
        (b'{"text": "abcdefgh"\n', r"data.jsonl:1: not valid JSON \(Expecting ',' delimiter at column 20\)"),
        (b'{"text": "a"}\n[1, 2]\n', r"data.jsonl:2: a record must be a JSON object, not list"),
        (b'{"text": "\xff"}\n', r"data.jsonl:1: not UTF-8 text"),
        (b'{"text": ' + b"1" * 5000 + b"}\n", r"data.jsonl:1: not valid JSON"),
        (b"[" * 100_000 + b"\n", r"data.jsonl:1: nested too deeply|data.jsonl:1: not valid JSON"),
        (b"", "contains no records"),
        (b"\n\n", "contains no records"),
    ],
)
def test_broken_file_error_has_line(tmp_path, content, message):
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records(str(tmp_path / "data.jsonl"))


def test_error_names_missing_files_and_directories(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_records(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="has no train file"):
        read_records(str(tmp_path))


def test_tools_reach_the_template(tiny):
    tiny[1].chat_template = "{{ tools | tojson if tools else '' }}" + TEMPLATE
    example = renderer(tiny).example(record(messages=CHAT[1:3], tools=[{"name": "add"}]))
    assert json.dumps([{"type": "function", "function": {"name": "add"}}]) in tiny[1].decode(example.tokens)
    assert supervised_text(tiny, example) == "4<|end|>"


ODD_TEMPLATES = {
    "plain": TEMPLATE,
    "trims": TEMPLATE.replace("m['content']", "m['content'] | trim"),
    "default system": "{% if messages[0]['role'] != 'system' %}<|system|>Be kind.<|end|>{% endif %}"
    + TEMPLATE,
    "by content": TEMPLATE.replace(
        "{{ m['content'] }}", "{% if '4' in m['content'] %}!{% endif %}{{ m['content'] }}"
    ),
    "twice": TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}|{{ m['content'] | length }}"),
    "last only": TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}{% if loop.last %}.{% endif %}"),
    "numbered": TEMPLATE.replace("{{ m['content'] }}", "{{ loop.index }}: {{ m['content'] }}"),
}
contents = st.text(st.sampled_from("4aé \n<|end|>qx0xq1"), max_size=12)


@pytest.mark.parametrize("template", ODD_TEMPLATES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(contents, min_size=2, max_size=6), system=st.booleans())
def test_supervised_spans_equal_those_of_rendered_prefixes(tiny, template, texts, system):
    """Skeletons save renderings and never change the loss mask, whatever the template does with contents."""
    tiny[1].chat_template = ODD_TEMPLATES[template]
    roles = ["system"] * system + ["user", "assistant"] * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if not any(message["role"] == "assistant" for message in messages):
        return
    renderer = Renderer(tiny[1])
    slow = Renderer(tiny[1])
    slow.conversations._skeletons.spans = lambda *_: None
    outcomes = []
    for each in (renderer, slow):
        try:
            rendering = each.render(record(messages=messages))
            outcomes.append((rendering.text, list(rendering.spans), rendering.only_last))
        except DataError as error:
            outcomes.append(error.message)
    assert outcomes[0] == outcomes[1]


def test_conversation_with_known_roles_is_rendered_once(tiny):
    make, calls = Renderer(tiny[1]), []
    template = tiny[1].get_chat_template
    tiny[1].get_chat_template = lambda *a, **k: calls.append(1) or template(*a, **k)
    make.render(record(messages=CHAT))
    calls.clear()
    for _ in range(3):
        make.render(record(messages=CHAT))
    assert len(calls) == 3


CODE = [
    {"role": "user", "content": "  code?"},
    {"role": "assistant", "content": "  if x:\n    return 1 \n"},
]


@pytest.mark.parametrize("several", [False, True])
def test_white_space_is_supervised_with_trimmed_offsets(tmp_path, several):
    write_tokenizer(tmp_path)
    expected = Rendered(AutoTokenizer.from_pretrained(tmp_path)).example(record(messages=CODE))
    path = tmp_path / "tokenizer.json"
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    settings = json.loads(path.read_text())
    settings["post_processor"] = {"type": "Sequence", "processors": [trimming]} if several else trimming
    path.write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    before = tokenizer.backend_tokenizer.to_str()
    example = Rendered(tokenizer).example(record(messages=CODE))
    assert list(example.tokens) == list(expected.tokens)
    assert list(example.supervised) == list(expected.supervised)
    assert sum(example.supervised) == len(CODE[1]["content"]) + 1
    assert tokenizer.backend_tokenizer.to_str() == before, "what is saved with a model stays as it was"


def test_conversation_may_start_with_the_assistant(tiny):
    """Rendered as in transformers; assistant text before the first user message is context."""
    greeted = [{"role": "assistant", "content": "Hello!"}, *CHAT[1:]]
    example = renderer(tiny).example(record(messages=greeted))
    assert supervised_text(tiny, example) == "4<|end|>7, naïve friend<|end|>"
    assert tiny[1].decode(example.tokens) == tiny[1].apply_chat_template(greeted, tokenize=False)
    with pytest.raises(
        DataError, match=r"here.jsonl:7: the only assistant message is the first message, which has no prompt"
    ):
        renderer(tiny).example(record(messages=greeted[:2]))


def test_template_prints_the_given_date(tiny):
    tokenizer = copy.deepcopy(tiny[1])
    date_line = '{% if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}'
    tokenizer.chat_template = date_line + TEMPLATE
    for day in (date(2024, 2, 29), date(2031, 12, 1)):
        text = Renderer(tokenizer, today=day).render(record(messages=CHAT)).text
        assert text.startswith(day.strftime("%d %b %Y") + "<|system|>")
    today = Renderer(tokenizer).render(record(messages=CHAT)).text
    assert today.startswith(date.today().strftime("%d %b %Y"))


def test_special_tokens_have_no_bytes(tiny_directory):
    _, tokenizer = whet.load(tiny_directory, device="cpu")
    sizes = token_bytes(tokenizer, vocab_size=260)
    names = ("<|end|>", "<|user|>", "<|assistant|>")
    assert [sizes[tokenizer.convert_tokens_to_ids(name)] for name in names] == [0, 0, 0]
    tokens = tokenizer("Größe<|user|>", add_special_tokens=False)["input_ids"]
    assert sizes[tokens].sum() == len("Größe".encode())
