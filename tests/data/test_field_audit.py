"""Fields that are not tokenized: the counts equal the difference between renderings with and without them."""

import json

import pytest

from tiny import TEMPLATE
from whet.data.sources.source import open_source
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.field_audit import FieldAudit, unread_fields
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.prompts import read_prompts

CALL = [{"type": "function", "function": {"name": "light", "arguments": {"on": True}}}]
TOOL = [{"type": "function", "function": {"name": "light", "description": "switches", "parameters": {}}}]
WRITES_ALL = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}",
)


def messages(*, user=None, **answer):
    return [
        {"role": "user", "content": "on", **(user or {})},
        {"role": "assistant", "content": "done", **answer},
    ]


@pytest.fixture
def unread(tiny, tmp_path):
    """Return the counts for some records, and the number of renderings."""

    def audit(records, template=TEMPLATE, **settings):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        tiny[1].chat_template = template
        store = Preparation(tiny[1], cache=tmp_path / "cache", **settings).store(open_source(str(path)))
        return store.notes["unread"]

    return audit


def test_fields_omitted_by_template_are_counted(unread):
    plain = {"messages": messages()}
    called = {"messages": messages(tool_calls=CALL), "tools": TOOL}
    thought = {"messages": messages(reasoning_content="so", name=""), "tools": []}
    records = [plain, *[called] * 3, *[thought] * 2]
    assert unread(records) == {"record": {"tools": 3}, "message": {"tool_calls": 3, "reasoning_content": 2}}
    assert unread(records, WRITES_ALL) == {"record": {}, "message": {}}


def test_count_is_exact_if_template_writes_a_field_sometimes(unread):
    """The template writes it only after a user message that asks for it, far after the tested records."""
    template = WRITES_ALL.replace(
        "if m.reasoning_content", "if m.reasoning_content and messages[0].content == 'why'"
    )
    records = [{"messages": messages(user={"content": "why"} if n % 3 else None, reasoning_content="so")}
               for n in range(100)]  # fmt: skip
    assert unread(records, template)["message"] == {"reasoning_content": sum(n % 3 == 0 for n in range(100))}


def test_field_that_is_always_omitted_costs_few_renderings(tiny):
    class Counted(Renderer):
        calls = 0

        def render_chats(self, record):
            self.calls += 1
            return super().render_chats(record)

    renderer = Counted(tiny[1])
    audit = FieldAudit(renderer)
    [record] = _records({"messages": messages(name="x"), "tools": TOOL, "id": 3})
    for _ in range(1000):
        audit.add(record)
    assert audit.counts() == {"record": {"id": 1000, "tools": 1000}, "message": {"name": 1000}}
    assert renderer.calls <= 4 * 32


def _records(*fields):
    from whet.data.sources.source import Record, validate_record

    return [validate_record(Record(each, "here")) for each in fields]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"prompt": "a", "completion": "b", "label": "x", "id": 1, "empty": "", "null": None},
            ["label", "id"],
        ),
        ({"messages": messages(), "system": "Be brief."}, ["system"]),
        (
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "system": "c",
            },
            [],
        ),
        ({"instruction": "a", "input": "b", "output": "c", "text": "a b c"}, ["text"]),
        ({"text": "a", "auth_weight": 0.5, "prov_entropy": 1.0}, ["auth_weight", "prov_entropy"]),
        ({"text": "a", "rating": 0, "tools": TOOL}, ["rating", "tools"]),
        ({"prompt": "a", "completion": "b", "tools": json.dumps(TOOL)}, ["tools"]),
    ],
)
def test_fields_outside_the_format_are_counted(unread, record, expected):
    assert unread([record])["record"] == dict.fromkeys(expected, 1)


def test_preferences_are_rendered_with_both_completions(unread):
    pair = {"prompt": "a", "chosen": messages(reasoning_content="so")[1:], "rejected": "c", "score_chosen": 3}
    assert unread([pair], pairs=True) == {"record": {"score_chosen": 1}, "message": {"reasoning_content": 1}}
    assert unread([pair], WRITES_ALL, pairs=True)["message"] == {}


def test_weights_and_nulls_are_not_reported(unread):
    assert unread([{"messages": messages(weight=1, tool_calls=None)}])["message"] == {}


def test_tools_of_a_text_prompt_reach_the_template(tiny, tmp_path):
    tiny[1].chat_template = WRITES_ALL
    [record] = _records({"prompt": "a", "completion": "b", "tools": json.dumps(TOOL)})
    expected = tiny[1].apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tools=TOOL, tokenize=False
    )
    assert Renderer(tiny[1]).render(record).text == expected


def test_ignored_fields_are_removed(tiny, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": messages(name="x", id=2), "id": 1, "label": False}) + "\n")
    source = open_source(str(path), ignore=["id", "label"])
    store = Preparation(tiny[1], cache=tmp_path / "cache").store(source)  # the ignored label is not rejected
    assert store.notes["unread"] == {"record": {}, "message": {"name": 1}}
    assert source.digest() != open_source(str(path)).digest() == open_source(str(path), ignore=[]).digest()


def test_record_fields_of_prompts_are_not_reported(tiny, tmp_path):
    path = tmp_path / "train.jsonl"
    messages = [{"role": "user", "content": "a", "name": "x"}]
    path.write_text(json.dumps({"prompt": messages, "answer": "4", "tools": TOOL}) + "\n")
    prompts = read_prompts(open_source(str(path)), tiny[1])
    reported = [message for message, _ in unread_fields(prompts.unread_fields, used=None)]
    assert reported == [
        "field tools of 1 record is not tokenized",
        "message field name of 1 record is not tokenized",
    ]


def test_long_list_of_unread_fields_is_shortened():
    reported = list(unread_fields({"record": {f"f{n}": 1 for n in range(99)} | {"group": 2}}, used={"group"}))
    assert len(reported) == 21
    assert reported[-1][0] == "79 more fields are not tokenized"
