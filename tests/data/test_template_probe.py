"""Templates like those of public families: probed facts, and training tokens that follow the served prompt."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_shapes import SHAPES
from transformers import AutoTokenizer

import whet
from tiny import TEMPLATE, run_config
from whet.config.load_config import validate_config
from whet.data.sources.source import Record, open_source
from whet.data.templates.builtin import TEMPLATES, load_template
from whet.data.templates.chat import probe_tokenizer
from whet.data.tokens.chat_template import Renderer
from whet.data.tokens.prepare_dataset import Preparation
from whet.data.tokens.tokenize import Encoder
from whet.errors import DataError
from whet.reporting.data.data_wording import tokenizer_rows
from whet.runs.inspect_data import view_data

NAMES = [shape.family for shape in SHAPES]
THINK = "<think>\nhm\n</think>\n\n"
CALL = {"id": "call12345", "type": "function", "function": {"name": "light", "arguments": {"on": True}}}
TOOL = {"name": "light", "description": None, "parameters": {"type": "object", "required": None}}


def record(**fields):
    return Record(fields, "here.jsonl:7")


def tokenizer_with(tiny, template):
    tokenizer = copy.copy(tiny[1])
    tokenizer.bos_token = "<|user|>"
    tokenizer.chat_template = template
    return tokenizer


def supervised_text(tokenizer, one, **options):
    example = Encoder(tokenizer).encode_one(Renderer(tokenizer, **options).render(one))
    return tokenizer.decode([t for t, mark in zip(example.tokens, example.supervised, strict=True) if mark])


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_probe_finds_the_facts_of_a_template(tiny, shape):
    probe = probe_tokenizer(tokenizer_with(tiny, shape.template))
    facts = (
        *(probe.arguments, probe.accepts_system, probe.writes_tools, probe.tool_arguments),
        *(probe.thinking, probe.reads_reasoning, probe.opens_thinking, probe.end_of_turn),
        probe.has_generation_tags,
    )
    assert facts == shape[2:]
    assert all(probe.describe())


def test_documentation_has_every_shape():
    page = (Path(__file__).parents[2] / "docs" / "chat-templates.md").read_text()
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in page.splitlines()
        if len(cells := line.strip("|").split("|")) == 7
    }
    thinking = {"all": "kept", "last": "of the last turn", "none": "stripped"}
    forms = {"object": "object", "json": "JSON text", "either": "either", None: "dropped"}
    for shape in SHAPES:
        expected = [
            ", ".join(f"`{name}`" for name in shape.arguments) or "none",
            "written" if shape.tools else "dropped",
            forms[shape.calls],
            thinking[shape.thinking],
            "read" if shape.reasoning else "dropped",
            f"`{shape.opens.strip()}`" if shape.opens else "no",
        ]
        assert rows[shape.family] == expected


texts = st.sampled_from(["yes", "no.", "a b", "4"])


@st.composite
def conversations(draw):
    messages = []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(texts)})
        thought = draw(st.sampled_from(["", THINK, "field"]))
        answer = {"role": "assistant", "content": (THINK if thought == THINK else "") + draw(texts)}
        messages.append(answer | ({"reasoning_content": "so"} if thought == "field" else {}))
    return messages


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(messages=conversations(), enable=st.sampled_from([None, True, False]))
def test_training_tokens_start_with_the_prompt_that_is_served(tiny, shape, messages, enable):
    """For every k, training on messages[:k + 1] supervises a turn that continues the prompt of messages[:k]."""
    tokenizer = tokenizer_with(tiny, shape.template)
    arguments = (
        {"enable_thinking": enable} if enable is not None and "enable_thinking" in shape.arguments else {}
    )
    for k in range(1, len(messages), 2):
        one = record(messages=copy.deepcopy(messages[: k + 1]))
        try:
            rendering = Renderer(tokenizer, template_args=arguments).render(one)
        except DataError:  # the prompt closes the thinking that the answer has
            assert enable is False
            assert "<think>" in messages[k]["content"] or "reasoning_content" in messages[k]
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:k], tokenize=False, add_generation_prompt=True, **arguments
        )
        start, end = rendering.spans[-1]
        assert rendering.text[:start] == prompt
        example = Encoder(tokenizer).encode_one(rendering)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert example.tokens[: len(ids)].tolist() == ids
        answer = messages[k]["content"].removeprefix(THINK)
        assert answer in rendering.text[start:end]
        if not rendering.only_last:  # every supervised turn follows its own prompt
            for turn, (low, _) in zip(range(1, k + 1, 2), rendering.spans, strict=True):
                assert rendering.text[:low] == tokenizer.apply_chat_template(
                    messages[:turn], tokenize=False, add_generation_prompt=True, **arguments
                )


SHAPE = {shape.family: shape.template for shape in SHAPES}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "4"}, "</think>\n\n4<|end|>"),
        ({"content": f"{THINK}4"}, "hm\n</think>\n\n4<|end|>"),
        ({"content": "4", "reasoning_content": "2 and 2\n"}, "2 and 2\n</think>\n\n4<|end|>"),
    ],
)
def test_turn_continues_a_prompt_that_opens_thinking(tiny, message, expected):
    tokenizer = tokenizer_with(tiny, SHAPE["DeepSeek-R1"])
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", **message}]
    assert supervised_text(tokenizer, record(messages=chat)) == expected
    longer = [*chat, {"role": "user", "content": "more"}]  # what follows the turn does not matter
    assert supervised_text(tokenizer, record(messages=longer)) == expected


@pytest.mark.parametrize(
    ("family", "thinking", "answer"),
    [
        ("Qwen3", "<think>\nhm\n</think>\n\n", "4<|im_end|>\n"),
        ("Qwen3 Thinking", "hm\n</think>\n\n", "4<|im_end|>\n"),
        ("SmolLM2", THINK, "4<|im_end|>\n"),
        ("GLM-4.5", "<think>hm</think>\n", "4"),
    ],
)
@pytest.mark.parametrize("rule", ["assistant", "all"])
def test_thinking_is_masked_if_asked_for(tiny, family, thinking, answer, rule):
    tokenizer = tokenizer_with(tiny, SHAPE[family])
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": f"{THINK}4"}]
    if rule == "assistant":
        assert supervised_text(tokenizer, record(messages=chat)) == thinking + answer
        assert supervised_text(tokenizer, record(messages=chat), supervise_thinking=False) == answer
    elif "Thinking" not in family:
        text = supervised_text(tokenizer, record(messages=chat), supervise="all", supervise_thinking=False)
        whole = supervised_text(tokenizer, record(messages=chat), supervise="all")
        assert text == whole.replace(thinking, "")


@pytest.mark.parametrize("given_as", ["object", "json"])
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Qwen2.5", '<tool_call>light {"on": true}</tool_call>'),
        ("DeepSeek-R1", '<tool_call>light {"on": true}</tool_call>'),
        ("Kimi K2", '<tool_call>light {"on": true}</tool_call>'),
        ("GLM-4.5", "<tool_call>light<key>on</key><value>True</value></tool_call>"),
    ],
)
def test_call_arguments_have_the_form_that_the_template_reads(tiny, family, expected, given_as):
    arguments = {"on": True, "level": None} if given_as == "object" else '{"on": true}'
    call = {**CALL, "function": {"name": "light", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "Light!"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    text = Renderer(tokenizer_with(tiny, SHAPE[family])).render(record(messages=chat, tools=[TOOL])).text
    assert expected in text
    assert "null" not in text
    assert "None" not in text


def test_tools_are_wrapped_and_have_no_nulls(tiny):
    chat = [{"role": "user", "content": "Light!"}, {"role": "assistant", "content": "ok"}]
    wrapped = {"type": "function", "function": {"name": "light", "parameters": {"type": "object"}}}
    for tool in (
        TOOL,
        {"type": "function", "function": {**TOOL, "strict": None}},
        {"type": "function", **TOOL},
    ):
        text = (
            Renderer(tokenizer_with(tiny, SHAPE["Qwen2.5"])).render(record(messages=chat, tools=[tool])).text
        )
        assert text.startswith(json.dumps(wrapped) + "\n")


def test_template_arguments_reach_the_template_and_the_key(tiny, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    )
    tokenizer = tokenizer_with(tiny, "{{ 'loud ' if loud else '' }}" + TEMPLATE)
    sizes = []
    for arguments in ({}, {"loud": True}, {"loud": False}):
        preparation = Preparation(tokenizer, cache=tmp_path / "cache", template_args=arguments)
        sizes.append(len(preparation.store(open_source(str(path))).read(0, 100)[0]))
    assert sizes == [sizes[0], sizes[0] + 5, sizes[0]]
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(DataError, match=f"data.template_args cannot set {name}"):
            Renderer(tokenizer, template_args={name: True})


@pytest.mark.parametrize("name", TEMPLATES)
def test_own_templates_write_tools_calls_and_answers(tiny, name):
    tokenizer = tokenizer_with(tiny, load_template(name))
    probe = probe_tokenizer(tokenizer)
    assert (probe.accepts_system, probe.writes_tools, probe.tool_arguments) == (True, True, "object")
    assert probe.thinking == ("last" if name == "qwen3" else "all")
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Light!"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "It is on."},
    ]
    text = supervised_text(tokenizer, record(messages=chat, tools=[TOOL]))
    end = re.escape(probe.end_of_turn)
    call = re.escape('\n<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>')
    assert re.fullmatch(f"{call}{end}It is on\\.{end}", text)
    for k in (2, 4):
        rendering = Renderer(tokenizer).render(record(messages=chat[: k + 1]))
        prompt = tokenizer.apply_chat_template(chat[:k], tokenize=False, add_generation_prompt=True)
        assert rendering.text[: rendering.spans[-1][0]] == prompt


def test_template_of_the_config_is_used_and_shown(tiny_directory, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{{ '#' }}" + TEMPLATE)
    shown = {}
    for template in (None, "chatml", str(path)):
        config = validate_config(run_config(tiny_directory, tmp_path, data={"template": template}))
        view = view_data(config, samples=1)
        shown[template] = "".join(piece.text for piece in view.splits[0].samples[0].head)
        assert "ends answers with" in dict(tokenizer_rows(view))[""]
    assert shown["chatml"].startswith("<|im_start|>")
    assert shown[str(path)] == "#" + shown[None]
    config = run_config(tiny_directory, tmp_path, data={"template": "chatml"}, run={"steps": 1})
    run = whet.train(config, verbose=0).directory
    final = AutoTokenizer.from_pretrained(run / "final")
    assert final.chat_template == TEMPLATES["chatml"]
    _, of_checkpoint = whet.load(next(run.glob("checkpoints/step-*")))
    assert of_checkpoint.chat_template == final.chat_template
    with pytest.raises(DataError, match="nowhere.jinja is neither a template"):
        load_template("nowhere.jinja")
    path.write_text("{% if %}")
    with pytest.raises(DataError, match="not valid Jinja"):
        load_template(str(path))
