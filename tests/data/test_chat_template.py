"""Which tokens an example has and which of them are learned."""

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
    """Rendering and encoding together."""

    def __init__(self, tokenizer, **settings):
        self.render, self.encode = Renderer(tokenizer, **settings), Encoder(tokenizer)

    def example(self, record):
        return self.encode.example(self.render.render(record))

    def question(self, record):
        asked = self.render.question(record)
        return None if asked is None else self.encode.question(asked)


def renderer(tiny, **settings):
    return Rendered(tiny[1], **settings)


def record(**fields):
    return Record(fields, "here.jsonl:7")


def learned(tiny, example):
    """The supervised tokens as text."""
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
def test_chat_supervises_the_turns_asked_for_and_their_end(tiny, supervise, expected):
    example = renderer(tiny, supervise=supervise).example(record(messages=CHAT))
    assert learned(tiny, example) == expected
    whole = tiny[1].apply_chat_template(CHAT, tokenize=False)
    assert tiny[1].decode(example.tokens) == whole


def test_prompt_and_completion_become_two_turns_where_there_is_a_template(tiny):
    example = renderer(tiny).example(record(prompt="2+2?", completion="4"))
    assert tiny[1].decode(example.tokens) == "<|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert learned(tiny, example) == "4<|end|>"


def test_without_a_template_prompt_and_completion_are_joined_and_ended(tiny):
    tiny[1].chat_template = None
    example = renderer(tiny).example(record(prompt="2+2=", completion="4"))
    assert tiny[1].decode(example.tokens) == "2+2=4<|end|>"
    assert learned(tiny, example) == "4<|end|>"
    with pytest.raises(DataError, match="need a chat template, and this tokenizer has none"):
        renderer(tiny).example(record(messages=CHAT))


def test_text_is_learned_whole_with_one_end(tiny):
    example = renderer(tiny).example(record(text="hello"))
    assert learned(tiny, example) == "hello<|end|>"
    assert example.supervised_count == 5  # the first token has nothing to be predicted from


def test_text_that_ends_already_gets_no_second_end(tiny):
    ended, plain = (renderer(tiny).example(record(text=text)) for text in ("hello<|end|>", "hello"))
    assert ended.tokens.tolist() == plain.tokens.tolist()
    assert ended.supervised.tolist() == plain.supervised.tolist()
    tiny[1].chat_template = None
    example = renderer(tiny).example(record(prompt="2+2=", completion="4<|end|>"))
    assert learned(tiny, example) == "4<|end|>"
    unlearned = renderer(tiny, allow_empty=True).example(record(prompt="2+2=4<|end|>", completion=""))
    assert learned(tiny, unlearned) == "<|end|>"
    assert tiny[1].decode(unlearned.tokens) == "2+2=4<|end|><|end|>"


def test_pad_equal_to_eos_does_not_unlearn_the_end(tiny):
    """Masks go by position: a pad token that is also EOS must not remove EOS from the targets."""
    assert tiny[1].pad_token_id == tiny[1].eos_token_id
    example = renderer(tiny).example(record(messages=CHAT))
    assert example.supervised[-1]
    assert example.tokens[-1] == tiny[1].eos_token_id


def test_a_template_that_rewrites_earlier_answers_teaches_only_the_last(tiny):
    """Some templates drop the thoughts of earlier turns: those turns cannot be learned as they were said."""
    tiny[1].chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] != 'assistant' else '...' }}"
    )
    example = renderer(tiny).example(record(messages=CHAT))
    assert learned(tiny, example) == "7, naïve friend<|end|>"
    assert Renderer(tiny[1]).render(record(messages=CHAT)).only_last
    assert not Renderer(tiny[1]).render(record(messages=CHAT[:3])).only_last


def test_a_template_in_which_even_the_last_answer_cannot_be_found_is_refused(tiny):
    tiny[1].chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last else '...' }}"
    )
    with pytest.raises(
        DataError, match=r"here.jsonl:7: the chat template rewrites earlier turns.*\n.*supervise"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_a_template_whose_prompt_opens_what_answers_do_not_have_is_refused(tiny):
    tiny[1].chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    )
    with pytest.raises(
        DataError, match=r"ends a prompt with '<think>\\n', and does not write that before message 5"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_a_batch_of_texts_is_encoded_as_each_alone_and_a_bad_one_spoils_no_other(tiny):
    make = renderer(tiny)
    records = [
        record(messages=CHAT),
        record(text="plain"),
        record(text="half \ud800"),
        record(prompt="a", completion="b"),
    ]
    found = make.encode.encode([make.render.render(r) for r in records])
    assert isinstance(found[2], DataError)
    for r, example in zip(records, found, strict=True):
        if not isinstance(example, DataError):
            alone = make.example(r)
            assert example.tokens.tolist() == alone.tokens.tolist()
            assert example.supervised.tolist() == alone.supervised.tolist()


def test_truncation_and_padding_of_a_tokenizer_json_are_not_applied(tiny):
    tiny[1].backend_tokenizer.enable_truncation(4)
    tiny[1].backend_tokenizer.enable_padding(length=50)
    assert learned(tiny, renderer(tiny).example(record(text="hello world"))) == "hello world<|end|>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"question": "x", "reply": "y"}, "fields 'question', 'reply' fits no shape"),
        ({}, "fields none fits no shape"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [{"content": "hi"}]}, "message 1 must be an object with a role"),
        ({"messages": [{"role": "user"}]}, r"message 1 .user. has no text content"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no token of this example is supervised"),
        ({"prompt": "a", "completion": 3}, "completion must be a string, not int"),
        ({"text": None}, r"fields 'text' .null. fits no shape"),
        ({"text": 3}, "text must be a string"),
        ({"prompt": "only"}, "a prompt record holds nothing to learn"),
        ({"text": "half a pair \ud800"}, "the tokenizer cannot read this text"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": 3}, "here.jsonl:7"),
    ],
)
def test_a_bad_record_is_named_with_its_place(tiny, fields, message):
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
def test_whatever_fails_in_a_template_is_named_with_its_place(tiny, expression, message):
    tiny[1].chat_template = f"{{{{ {expression} }}}}{TEMPLATE}"
    with pytest.raises(
        DataError, match=f"here.jsonl:7: the chat template refuses these messages: .*{message}"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_a_template_with_a_syntax_error_is_blamed_itself_and_not_the_messages(tiny):
    tiny[1].chat_template = "{{ messages }}\n{% if %}"
    with pytest.raises(
        DataError, match="here.jsonl:7: the chat template is not valid Jinja: line 2: Expected"
    ):
        renderer(tiny).example(record(messages=CHAT))


def test_questions_end_where_the_answer_begins(tiny):
    question = renderer(tiny).question(record(messages=CHAT, group="known"))
    assert tiny[1].decode(question.tokens).endswith("<|user|>and 3?<|end|><|assistant|>")
    assert (question.answer, question.text, question.group) == ("7, naïve friend", "and 3?", "known")
    assert renderer(tiny).question(record(text="x")) is None
    assert renderer(tiny).question(record(messages=CHAT[:2])) is None
    assert renderer(tiny, supervise="all").question(record(prompt="p", completion="c")).answer == "c"


def test_an_answer_that_is_a_tool_call_is_no_question(tiny):
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
        (b"", "holds no records"),
        (b"\n\n", "holds no records"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records(str(tmp_path / "data.jsonl"))


def test_missing_files_and_directories_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_records(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is a directory"):
        read_records(str(tmp_path))


def test_tools_reach_the_template(tiny):
    tiny[1].chat_template = "{{ tools | tojson if tools else '' }}" + TEMPLATE
    example = renderer(tiny).example(record(messages=CHAT[1:3], tools=[{"name": "add"}]))
    assert json.dumps([{"name": "add"}]) in tiny[1].decode(example.tokens)
    assert learned(tiny, example) == "4<|end|>"


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
@given(said=st.lists(contents, min_size=2, max_size=6), system=st.booleans())
def test_learned_spans_are_those_of_rendered_prefixes(tiny, template, said, system):
    """Skeletons save renderings, never change what is learned: whatever the template does with a content."""
    tiny[1].chat_template = ODD_TEMPLATES[template]
    roles = ["system"] * system + ["user", "assistant"] * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    if not any(message["role"] == "assistant" for message in messages):
        return
    renderer = Renderer(tiny[1])
    slow = Renderer(tiny[1])
    slow._skeletons.spans = lambda *_: None
    outcomes = []
    for each in (renderer, slow):
        try:
            found = each.render(record(messages=messages))
            outcomes.append((found.text, list(found.spans), found.only_last))
        except DataError as error:
            outcomes.append(error.message)
    assert outcomes[0] == outcomes[1]


def test_a_conversation_of_known_roles_is_rendered_once(tiny):
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
def test_white_space_is_learned_whatever_the_tokenizer_says_of_its_place(tmp_path, several):
    write_tokenizer(tmp_path)
    wanted = Rendered(AutoTokenizer.from_pretrained(tmp_path)).example(record(messages=CODE))
    path = tmp_path / "tokenizer.json"
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    settings = json.loads(path.read_text())
    settings["post_processor"] = {"type": "Sequence", "processors": [trimming]} if several else trimming
    path.write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    before = tokenizer.backend_tokenizer.to_str()
    found = Rendered(tokenizer).example(record(messages=CODE))
    assert list(found.tokens) == list(wanted.tokens)
    assert list(found.supervised) == list(wanted.supervised)
    assert sum(found.supervised) == len(CODE[1]["content"]) + 1
    assert tokenizer.backend_tokenizer.to_str() == before, "what is saved with a model stays as it was"


def test_a_conversation_may_begin_with_the_assistant(tiny):
    """As transformers renders it; what it says before anybody asked is read, and not learned."""
    greeted = [{"role": "assistant", "content": "Hello!"}, *CHAT[1:]]
    example = renderer(tiny).example(record(messages=greeted))
    assert learned(tiny, example) == "4<|end|>7, naïve friend<|end|>"
    assert tiny[1].decode(example.tokens) == tiny[1].apply_chat_template(greeted, tokenize=False)
    with pytest.raises(DataError, match=r"here.jsonl:7: the assistant says the first message, and no other"):
        renderer(tiny).example(record(messages=greeted[:2]))


def test_a_template_writes_the_day_it_is_told(tiny):
    tokenizer = copy.deepcopy(tiny[1])
    asked = '{% if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}'
    tokenizer.chat_template = asked + TEMPLATE
    for day in (date(2024, 2, 29), date(2031, 12, 1)):
        text = Renderer(tokenizer, today=day).render(record(messages=CHAT)).text
        assert text.startswith(day.strftime("%d %b %Y") + "<|system|>")
    today = Renderer(tokenizer).render(record(messages=CHAT)).text
    assert today.startswith(date.today().strftime("%d %b %Y"))


def test_special_tokens_stand_for_no_bytes(tiny_directory):
    _, tokenizer = whet.load(tiny_directory, device="cpu")
    sizes = token_bytes(tokenizer, vocab_size=260)
    names = ("<|end|>", "<|user|>", "<|assistant|>")
    assert [sizes[tokenizer.convert_tokens_to_ids(name)] for name in names] == [0, 0, 0]
    tokens = tokenizer("Größe<|user|>", add_special_tokens=False)["input_ids"]
    assert sizes[tokens].sum() == len("Größe".encode())
