"""Chat templates render as in transformers; hostile ones are rejected before they exhaust memory or time."""

import copy
import re
import threading
import time

import pytest
from chat_templates import TEMPLATES

from whet.data.templates.chat import render_chat
from whet.data.templates.sandbox import render_template
from whet.errors import DataError

CHAT = [
    {"role": "user", "content": " What is 2 + 2?\n"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4 "},
    {"role": "user", "content": "And <b>3</b> more, naïve 🙂?"},
    {"role": "assistant", "content": "7"},
]
CALLS = [
    CHAT[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": [1, 2.5, None]}}}],
    },
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "4", "reasoning": "the tool said so"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds «numbers»", "strict": True}}]


def with_reasoning(message):
    """Return messages with the reasoning under each key, which older versions of transformers do not add."""
    if "reasoning" not in message:
        return message
    return {"thinking": message["reasoning"], "reasoning_content": message["reasoning"], **message}


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_is_rendered_as_in_transformers(tiny, name, prompt):
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = TEMPLATES[name]
    for messages, tools in ((CHAT, None), (CHAT[:3], None), (CALLS, TOOLS), (CALLS[:2], TOOLS)):
        try:
            expected = tokenizer.apply_chat_template(
                [with_reasoning(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # any error of Jinja
            with pytest.raises(DataError, match=re.escape(str(error))):
                render_chat(tokenizer, messages, tools=tools, add_generation_prompt=prompt)
        else:
            assert render_chat(tokenizer, messages, tools=tools, add_generation_prompt=prompt) == expected


HARMLESS = [
    "{{ [3, 1, 2] | sort | join(', ') }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -3 | abs }}{{ 7 / 2 }}",
    "{{ '%s and %05d' % ('x', 42) }}{{ '%s-%s' | format(1, 2) }}{{ '{:>10}|{a}'.format('r', a=3) }}",
    "{{ 'a-b-c'.replace('-', '+') }}{{ 'abc' | replace('b', 'XX') }}{{ 'x'.center(9) }}{{ 'x' | center(9) }}",
    "{{ {'b': 1, 'a': [1, 'é']} | tojson }}{{ {'b': 1} | tojson(indent=2) }}{{ [1] | tojson(separators=(',', ':')) }}",
    "{{ [[1, 2], [3]] | sum(start=[]) }}{{ [1, 2, 3] | sum }}{{ [{'n': 2}] | sum(attribute='n') }}",
    "{{ 'one\ntwo' | indent(4, first=true) }}{{ 'abc'[::-1] }}{{ 'abc'[1:] }}{{ [1, 2, 3][:2] }}{{ 'x' * 3 }}",
    "{% for x in range(5) if x is odd %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k ~ v }}{% endfor %}{{ {'a': 1} | dictsort }}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for x in range(4) %}{% set ns.l = ns.l + [x] %}{% endfor %}{{ ns.l }}{{ ns }}",
    "{% for x in range(9) %}{% if x == 3 %}{% continue %}{% endif %}{% if x > 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x | upper }}{% filter lower %}ABC{{ x }}{% endfilter %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}",
    "{{ messages | map('length') | list }}{{ messages | groupby('role') | length }}{{ [2, 1] | max }}{{ undefined }}",
    "{{ dict(a=1) }}{{ 'a' in 'abc' and [1] != [2] }}{{ 'x,y'.split(',') }}{{ 'ab' | list }}{{ 3.7 | round | int }}",
    "{{ '<a>' | e }}{{ '<a>' | safe + '<b>' }}{{ cycler(1, 2).next() }}{{ 'a b' | wordcount }}{{ 'a' 'b' }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(3, b=4) %}!{% endcall %}",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_template_features_match_transformers(tiny, source):
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = source
    assert render_chat(tokenizer, CHAT, add_generation_prompt=False) == tokenizer.apply_chat_template(
        CHAT, tokenize=False
    )


GROW = "{% set ns = namespace(x=" + "START" + ") %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"


def grow(start, step, then=""):
    return GROW.replace("START", start).replace("STEP", step) + then


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops with a test": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}"
    + "x" * 999
    + "{% endfor %}{% endfor %}",
    "output in a macro": "{% macro m() %}{% for b in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endmacro %}{% set x = m() %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{{ 10**100000000 }}",
    "square": grow("3", "ns.x * ns.x"),
    "center": "{{ 'x'.center(4000000000) }}",
    "center filter": "{{ 'x' | center(4000000000) }}",
    "zfill": "{{ 'x'.zfill(4000000000) }}",
    "ljust of bytes": "{{ 'x'.encode().ljust(4000000000) }}",
    "to_bytes": "{{ (1).to_bytes(length=4000000000, byteorder='big') }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "product": "{{ 'x' * 10**10 }}",
    "product of a list": "{{ ([0] * 10**10) | length }}",
    "product by a text": "{{ 10**10 * 'x' }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "replace filter": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "replace by name": "{{ ('x' * 100000) | replace(new='y' * 100000, old='x') }}",
    "join": "{{ ('y' * 100000).join(['x'] * 100000) }}",
    "join filter": "{{ (['x'] * 100000) | join('y' * 100000) }}",
    "join of what is mapped": "{{ range(99999) | map('string') | map('center', 99999) | join }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "percent": "{{ '%1000000000d' % 5 }}",
    "percent star": "{{ '%*d' % (1000000000, 5) }}",
    "format filter": "{{ '%1000000000d' | format(5) }}",
    "format method": "{{ '{:1000000000}'.format(5) }}",
    "format precision": "{{ '{:.1000000000f}'.format(5.5) }}",
    "format nested": "{{ '{:{}}'.format(5, 1000000000) }}",
    "format text": "{{ '{:{}}'.format(5, '1000000000') }}",
    "indent": "{{ 'a\nb' | indent(1000000000) }}",
    "indent of lines": "{{ ('a\n' * 100000) | indent(100000) }}",
    "json indent": "{{ [[1]] | tojson(indent=1000000000) }}",
    "json separators": "{{ range(99999) | list | tojson(separators=('x' * 99999, ':')) }}",
    "date": "{{ strftime_now('%d' * 1000000) }}",
    "date width": "{{ strftime_now('%1000000000d') }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}",
    "doubled text": grow("'x'", "ns.x + ns.x"),
    "doubled by tilde": grow("'x'", "ns.x ~ ns.x"),
    "doubled by set": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "doubled list": grow("[1]", "ns.x + ns.x"),
    "growing list": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x + ['x' * i] %}{% endfor %}",
    "slices": "{% set x = 'x' * 9999999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "nested lists written": grow("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "nested lists as text": grow("[1]", "[ns.x, ns.x]", "{{ ns.x | string | length }}"),
    "nested lists as json": grow("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "nested lists joined": grow("[1]", "[ns.x, ns.x]", "{{ ns.x | join }}"),
    "nested lists in a tilde": grow("[1]", "[ns.x, ns.x]", "{% set y = ns.x ~ '' %}"),
    "nested lists formatted": grow("[1]", "[ns.x, ns.x]", "{{ '{}'.format(ns.x) }}"),
    "nested lists in a namespace": grow("[1]", "[ns.x, ns.x]", "{{ ns }}"),
    "nested lists in values": grow("[1]", "[ns.x, ns.x]", "{{ {'a': ns.x}.values() }}"),
    "nested lists compared": "{% set a = namespace(x=[1], y=[1]) %}{% for i in range(99) %}{% set a.x = [a.x, a.x] %}"
    "{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x == a.y }}",
    "nested lists tested": "{% set a = namespace(x=[1], y=[1]) %}{% for i in range(99) %}{% set a.x = [a.x, a.x] %}"
    "{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x is eq a.y }}",
    "nested tuples hashed": grow("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} | length }}"),
    "nested tuples looked up": grow("(1,)", "(ns.x, ns.x)", "{{ {1: 1}[ns.x] }}"),
    "sum of lists": "{{ ([[0] * 1000] * 100000) | sum(start=[]) | length }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "lists of a long text": "{{ ('x' * 99999999) | list | length }}",
    "lorem": "{{ lipsum(n=100000000) }}",
    "web filters": "{{ '<' * 10000 | striptags }}",
    "long": "{{ 1 }}" * 100_000,
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep attributes": "{{ x" + ".a" * 5000 + " }}",
    "long number": "{{ " + "9" * 5000 + " }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_template_that_exhausts_memory_or_time_is_rejected(name):
    began = time.thread_time()
    with pytest.raises(DataError, match="the chat template") as caught:
        render_template(HOSTILE[name], CHAT)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 600
    assert time.thread_time() - began < 60, "bounded, however slow the machine"


def test_limits_apply_per_rendering_in_any_thread():
    caught = []

    def render(source):
        try:
            render_template(source, CHAT)
        except DataError as error:
            caught.append(error.message)

    source = "{% for a in range(600) %}{% for b in range(1000) %}{% endfor %}{% endfor %}ok"
    for _ in range(2):  # in total more than the limit of one rendering
        assert render_template(source, CHAT) == "ok"
    thread = threading.Thread(target=render, args=[HOSTILE["nested loops"]])
    thread.start()
    thread.join()
    assert caught == ["the chat template exceeds a limit of whet: it runs too many steps"]


def test_long_conversation_may_use_more_steps():
    chat = [{"role": "user", "content": "x" * 1000}, {"role": "assistant", "content": "y"}] * 1000
    quadratic = (
        "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}{{ messages | length }}"
    )
    assert render_template(quadratic, chat) == "2000"
    assert len(render_template(TEMPLATES["collects"], chat[:600])) > 300 * 1000


def test_non_json_values_and_non_object_tools_are_rejected():
    with pytest.raises(DataError, match="a object is not a JSON value"):
        render_template("x", [{"role": "user", "content": object()}])
    with pytest.raises(DataError, match="tools must be a list of objects"):
        render_template("x", CHAT, tools=[3])
