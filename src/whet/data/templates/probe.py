"""Probe a chat template: what it reads, what it writes and what it leaves out, found by rendering chats."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jinja2 import meta

from whet.data.templates.sandbox import parse_template
from whet.data.templates.thinking import open_tag
from whet.errors import DataError

ToolArguments = Literal["object", "json", "either"]  # the form in which a template reads call arguments
Thinking = Literal["all", "last", "none"]  # the assistant turns whose thinking a template writes

# variables that every template gets, which are no choices of the user
_STANDARD = frozenset(("messages", "add_generation_prompt", "strftime_now", "raise_exception", "namespace"))
_USER = {"role": "user", "content": "probe question"}
_ANSWER = {"role": "assistant", "content": "probe answer"}
_THOUGHT = "probe thought"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_parameter": {"type": "string", "description": "A."}},
        },
    },
}


class ProbeRender(Protocol):
    """Renders messages with the template that is probed."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, tools: Any, prompt: bool) -> str:
        """Return the text. Any: JSON values. Raises a DataError if the template fails."""


@dataclass(frozen=True)
class TemplateProbe:
    """What a chat template does with the parts of a conversation."""

    arguments: tuple[str, ...]  # optional variables that it reads, such as enable_thinking, tools, documents
    accepts_system: bool
    writes_tools: bool
    tool_arguments: ToolArguments | None  # None if it writes no tool calls
    thinking: Thinking  # of `<think>` in the content
    reads_reasoning: bool  # whether it writes reasoning_content
    opens_thinking: str  # what the generation prompt ends with if it opens a thinking block, else ""
    end_of_turn: str | None  # what it writes after an answer, None if unknown
    has_generation_tags: bool

    def describe(self) -> list[str]:
        """Return the facts as short phrases."""
        tools = "writes tools" if self.writes_tools else "drops tools"
        forms = {"object": "as objects", "json": "as JSON text", "either": "as objects or JSON text"}
        calls = "drops tool calls"
        if self.tool_arguments is not None:
            calls = f"reads call arguments {forms[self.tool_arguments]}"
        thinking = {
            "all": "keeps thinking",
            "last": "strips the thinking of earlier turns",
            "none": "strips all thinking",
        }
        lines = [
            f"arguments: {', '.join(self.arguments) or 'none'}",
            tools,
            calls,
            thinking[self.thinking],
            "reads reasoning_content" if self.reads_reasoning else "drops reasoning_content",
        ]
        if self.opens_thinking:
            lines.append(f"opens {self.opens_thinking.strip()} in the prompt")
        if not self.accepts_system:
            lines.append("drops or refuses system messages")
        if self.end_of_turn is not None:
            lines.append(f"ends answers with {self.end_of_turn!r}")
        if self.has_generation_tags:
            lines.append("has generation tags")
        return lines


def probe_template(source: str, render: ProbeRender, *, special: Sequence[str] = ()) -> TemplateProbe:
    """Probe a template.

    Args:
        source: The template.
        render: Renders messages with it.
        special: Names of the special tokens that templates get, such as bos_token.
    """
    probe = _Probe(render)
    return TemplateProbe(
        arguments=template_arguments(source, special=special),
        accepts_system="probe system" in probe.text([{"role": "system", "content": "probe system"}, _USER]),
        writes_tools="probe_tool" in probe.text([_USER], tools=[_TOOL]),
        tool_arguments=probe.tool_arguments(),
        thinking=probe.thinking(),
        reads_reasoning=_THOUGHT in probe.text([_USER, {**_ANSWER, "reasoning_content": _THOUGHT}]),
        opens_thinking=open_tag(probe.text([_USER], prompt=True)),
        end_of_turn=probe.end_of_turn(),
        has_generation_tags=re.search(r"\{%-?\s*generation\b", source) is not None,
    )


def template_arguments(source: str, *, special: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the variables that a template reads and does not set, without those that every template gets."""
    try:
        names = meta.find_undeclared_variables(parse_template(source))
    except DataError:
        return ()
    return tuple(sorted(names - _STANDARD - {*special} - {n for n in names if n.endswith("_token")}))


class _Probe:
    def __init__(self, render: ProbeRender) -> None:
        self._render = render

    def text(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, prompt: bool = False) -> str:
        """Return the rendered messages, or an empty text if the template rejects them. Any: JSON values."""
        try:
            return str(self._render(messages, tools=tools, prompt=prompt))
        except DataError:
            return ""

    def tool_arguments(self) -> ToolArguments | None:
        forms: dict[ToolArguments, Any] = {  # Any: JSON values
            "object": {"probe_key": "probe value"},
            "json": '{"probe_key": "probe value"}',
        }
        accepted = [form for form, value in forms.items() if self._writes_arguments(value)]
        if len(accepted) == 2:
            return "either"
        return accepted[0] if accepted else None

    def _writes_arguments(self, arguments: Any) -> bool:  # Any: JSON values
        function = {"name": "probe_tool", "arguments": arguments}
        call = {"id": "call12345", "type": "function", "function": function}
        chat: list[Mapping[str, Any]] = [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call12345", "name": "probe_tool", "content": "probe result"},
            _ANSWER,
        ]
        text = self.text(chat, tools=[_TOOL])
        # an object that is printed has single quotes; text that is written as JSON again has escaped quotes
        is_clean = "'probe_key'" not in text and '\\"probe_key' not in text
        return is_clean and "probe_key" in text and "probe value" in text

    def thinking(self) -> Thinking:
        thoughtful = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nprobe answer"}
        if _THOUGHT not in self.text([_USER, thoughtful]):
            return "none"
        return "all" if _THOUGHT in self.text([_USER, thoughtful, _USER, _ANSWER]) else "last"

    def end_of_turn(self) -> str | None:
        text = self.text([_USER, _ANSWER])
        return text.rpartition("probe answer")[2] if "probe answer" in text else None
