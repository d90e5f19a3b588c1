"""Render conversations with the chat template of a tokenizer."""

import functools
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from whet.data.sources.chat_messages import Message
from whet.data.sources.message_weights import MARKS
from whet.data.templates.sandbox import Rendered, render_template
from whet.errors import DataError, shorten

if TYPE_CHECKING:
    from whet.data.templates.probe import TemplateProbe


class ChatTemplate:
    """The chat template of a tokenizer, with its arguments and the date that it may print."""

    def __init__(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        *,
        today: date,
        arguments: Mapping[str, Any],  # Any: JSON values
    ) -> None:
        self.tokenizer = tokenizer
        self.today = today
        self.arguments = check_template_args(arguments)

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def is_dated(self) -> bool:
        """Whether the output depends on the date."""
        return "strftime_now" in str(self.tokenizer.chat_template)

    @functools.cached_property
    def probe(self) -> "TemplateProbe":
        """What the template reads and writes."""
        return probe_tokenizer(self.tokenizer, template_args=self.arguments)

    def render(
        self,
        messages: list[Message],
        *,
        tools: Any = None,  # Any: JSON values
        prompt: bool = False,
        origin: str,
    ) -> Rendered:
        """Return the text of a conversation.

        Args:
            messages: The conversation. Loss weights are left out.
            tools: The tools that the conversation may call.
            prompt: Whether to add the generation prompt.
            origin: The location of the conversation, for errors.
        """
        if not self.exists:
            raise DataError(
                f"{origin}: chat messages need a chat template, and this tokenizer has none",
                hint="use prompt + completion or text records, or an instruct model",
            )
        if tools is not None or any(message.get("tool_calls") for message in messages):
            from whet.data.templates.tool_calls import normalize_calls, normalize_tools

            tools, messages = normalize_tools(tools), normalize_calls(messages, self.probe.tool_arguments)
        # with tool_calls, content may be null: some templates require it, others print None or fail
        has_null = any(message.get("content") is None for message in messages)
        try:
            text = render_chat(
                self.tokenizer,
                without_marks(messages),
                tools=tools,
                add_generation_prompt=prompt,
                today=self.today,
                template_args=self.arguments,
            )
        except DataError as error:
            if has_null:
                return self.render(_fill_null_content(messages), tools=tools, prompt=prompt, origin=origin)
            raise DataError(f"{origin}: {error.message}", hint=error.hint) from error
        if has_null and "None" in text:
            filled = self.render(_fill_null_content(messages), tools=tools, prompt=prompt, origin=origin)
            return filled if filled.count("None") < text.count("None") else text
        return text


def render_chat(
    tokenizer: Any,  # Any: a transformers tokenizer
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Any = None,  # Any: JSON values
    today: date | None = None,
    template_args: Mapping[str, Any] | None = None,  # Any: JSON values
) -> Rendered:
    """Render messages with a tokenizer's chat template. All chats are rendered by this function."""
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:  # several templates without a default
        raise DataError(shorten(str(error))) from error
    special = tokenizer.special_tokens_map
    return render_template(
        template,
        messages,
        tools=tools,
        prompt=add_generation_prompt,
        special=special,
        today=today,
        arguments=template_args,
    )


def probe_tokenizer(
    tokenizer: Any, *, template_args: Mapping[str, Any] | None = None
) -> "TemplateProbe":  # Any: a transformers tokenizer; JSON values
    """Probe the chat template of a tokenizer, or its default one and the one for tools."""
    from whet.data.templates.probe import probe_template

    def render(messages: Sequence[Mapping[str, Any]], *, tools: Any, prompt: bool) -> str:
        chat = [dict(message) for message in messages]
        return render_chat(
            tokenizer, chat, tools=tools, add_generation_prompt=prompt, template_args=template_args
        )

    try:
        source = str(tokenizer.get_chat_template())
    except ValueError:  # several templates without a default
        source = ""
    return probe_template(source, render, special=list(tokenizer.special_tokens_map))


def check_template_args(arguments: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON values
    """Return the arguments of a template; raise a DataError for names that whet sets itself."""
    reserved = sorted({"messages", "tools", "add_generation_prompt", "strftime_now"} & arguments.keys())
    if reserved:
        raise DataError(
            f"data.template_args cannot set {', '.join(reserved)}",
            hint="tools come from the records; the others are set for each conversation",
        )
    return dict(arguments)


def without_marks(messages: list[Message]) -> list[Message]:
    """Return the messages without the fields that set loss weights, which are not for templates."""
    if not any(name in message for message in messages for name in MARKS):
        return messages
    return [{name: value for name, value in message.items() if name not in MARKS} for message in messages]


def _fill_null_content(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message.get("content") or ""} for message in messages]
