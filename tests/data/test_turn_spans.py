"""Turns of long conversations are located as by rendering every prefix, with few renderings."""

import copy

import pytest
from chat_templates import TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.test_chat_template import ODD_TEMPLATES, record
from whet.data.tokens.chat_template import Renderer
from whet.errors import DataError


def by_prefixes(tokenizer, messages):
    """The reference: two renderings per turn, by transformers."""

    def render(part, prompt=False):
        return tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt)

    try:
        text = render(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        spans = []
        for index in turns:
            before, after = render(messages[:index], prompt=True), render(messages[: index + 1])
            is_prefix = text.startswith(before) and text.startswith(after)
            spans.append((len(before), len(after)) if is_prefix else None)
    except Exception:
        return "refused"
    turn_spans = [span for span in spans if span]
    if len(turn_spans) == len(spans):
        return text, turn_spans, False
    return (text, turn_spans[-1:], True) if spans[-1] else "refused"


def outcome(tokenizer, messages):
    try:
        rendering = Renderer(tokenizer, allow_empty=True).render(record(messages=messages))
    except DataError:
        return "refused"
    return rendering.text, list(rendering.spans), rendering.only_last


texts = st.sampled_from(
    ["4", " spaced\n", "é", "\n\nbreaks", "<|end|>", "words of an answer", "a" * 300, "0: x"]
)
spoken = st.one_of(texts, texts, texts, st.sampled_from(["<think>\nhm\n</think>\n\nyes", "<think></think>"]))
call = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
}


@st.composite
def conversations(draw):
    plain = draw(st.booleans())
    messages = [{"role": "system", "content": "Be kind."}] if draw(st.booleans()) else []
    thoughts = draw(st.booleans())
    for _ in range(draw(st.integers(17, 34))):
        messages.append({"role": "user", "content": draw(texts)})
        if not plain and draw(st.integers(0, 3)) == 0:
            messages += [call, {"role": "tool", "content": draw(texts)}]
        messages.append({"role": "assistant", "content": draw(spoken if thoughts else texts)})
    return messages[:-1] if draw(st.integers(0, 5)) == 0 else messages


@pytest.mark.parametrize("name", [*TEMPLATES, *ODD_TEMPLATES])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=conversations())
def test_turns_of_long_conversations_equal_those_of_rendered_prefixes(tiny, name, messages):
    tokenizer = copy.copy(tiny[1])
    tokenizer.chat_template = {**TEMPLATES, **ODD_TEMPLATES}[name]
    assert outcome(tokenizer, messages) == by_prefixes(tokenizer, messages)


@pytest.mark.parametrize(
    "name", ["chatml", "trims", "alternates", "thinks", "thinks last", "in loop", "marks"]
)
def test_number_of_renderings_grows_slowly_with_turns(tiny, name):
    tokenizer = copy.copy(tiny[1])
    tokenizer.chat_template = TEMPLATES[name]
    template, calls = tokenizer.get_chat_template, []
    tokenizer.get_chat_template = lambda *a, **k: calls.append(1) or template(*a, **k)
    turns = [{"role": "user", "content": " why? "}, {"role": "assistant", "content": " because\n"}]
    rendering = Renderer(tokenizer).render(record(messages=turns * 400))
    assert len(rendering.spans) == (1 if name == "thinks last" else 400)
    assert len(calls) < 50
    for start, end in rendering.spans:
        assert rendering.text[start:end].strip().startswith(("because", "<think>"))
