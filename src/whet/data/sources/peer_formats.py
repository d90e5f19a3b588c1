"""Normalize the record formats of other tools: several fields that together make a conversation or a pair."""

from typing import Any

from whet.data.sources.chat_messages import (
    Message,
    parse_bare_tools,
    parse_conversations,
    parse_messages,
    parse_tools,
    split_pair,
)
from whet.errors import DataError

Fields = dict[str, Any]  # Any: JSON values


def read_sharegpt(fields: Fields) -> Fields:
    """Return the messages of a ShareGPT record (`conversations`, perhaps `system` and `tools`)."""
    return {"messages": parse_conversations(fields), **parse_bare_tools(fields), **_kto_label(fields)}


def read_completion(fields: Fields) -> Fields:
    """Return prompt and completion as text or, if one of them is a list of messages, as one conversation."""
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion, **parse_tools(fields)}
    prompt_messages = _to_messages(fields, "prompt", role="user")
    answer = _to_messages(fields, "completion", role="assistant")
    messages = parse_messages({"messages": [*map(_as_context, prompt_messages), *answer]}, "messages")
    return {
        "messages": messages,
        "prompt": prompt_messages,
        "completion": str(messages[-1].get("content") or ""),
        **parse_tools(fields),
    }


def _as_context(message: Message) -> Message:
    """Return a message of the prompt, of which nothing is supervised."""
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def read_alpaca(fields: Fields) -> Fields:
    """Return prompt and completion of an Alpaca record, or a conversation if it has a system or a history."""
    prompt, completion = _instruction(fields), require_string(fields, "output")
    tools = parse_tools(fields) | _kto_label(fields)
    if not fields.get("system") and not fields.get("history"):
        return {"prompt": prompt, "completion": completion, **tools}
    answer = {"role": "assistant", "content": completion}
    return {"messages": [*_alpaca_context(fields), _user(prompt), answer], **tools}


def read_alpaca_preference(fields: Fields) -> Fields:
    """Return the preference pair of an Alpaca record with `chosen` and `rejected` instead of `output`."""
    prompt, context = _instruction(fields), _alpaca_context(fields)
    return read_preference({**fields, "prompt": [*context, _user(prompt)] if context else prompt})


def _instruction(fields: Fields) -> str:
    """Return the instruction and, if present, an empty line and the input."""
    instruction = require_string(fields, "instruction")
    return f"{instruction}\n\n{require_string(fields, 'input')}" if fields.get("input") else instruction


def _alpaca_context(fields: Fields) -> list[Message]:
    """Return the messages before the instruction: `system`, then the turns of `history`."""
    messages = []
    if fields.get("system"):
        messages.append({"role": "system", "content": require_string(fields, "system")})
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(map(_is_exchange, history)):
        raise DataError("history must be a list of [question, answer] pairs of text")
    for question, answer in history:
        messages += [_user(question), {"role": "assistant", "content": answer}]
    return messages


def _is_exchange(item: Any) -> bool:  # Any: a JSON value
    return isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def read_sharegpt_preference(fields: Fields) -> Fields:
    """Return the preference pair of a ShareGPT record: `chosen` and `rejected` follow `conversations`."""
    pair = read_preference({**fields, "prompt": parse_conversations(fields)})
    return {**pair, **parse_bare_tools(fields)}


def read_openai_preference(fields: Fields) -> Fields:
    """Return the preference pair of OpenAI's format: `input`, `preferred_output`, `non_preferred_output`."""
    question = fields["input"]
    if not isinstance(question, dict) or "messages" not in question:
        raise DataError("input must be an object with messages, as in OpenAI's preference format")
    pair = {
        "prompt": question["messages"],
        "chosen": fields["preferred_output"],
        "rejected": fields["non_preferred_output"],
    }
    return read_preference(pair | {"tools": question.get("tools")})


def read_preference(fields: Fields) -> Fields:
    """Normalize prompt, chosen and rejected: all three are text, or all three are messages."""
    prompt, chosen, rejected = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, chosen, rejected = _split_texts(chosen, rejected)
        if isinstance(prompt, str):
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **parse_tools(fields)}
    completions = [_to_messages(fields, name, role="assistant") for name in ("chosen", "rejected")]
    prompt_messages = None if prompt is None else _to_messages(fields, "prompt", role="user")
    prompt, chosen, rejected = split_pair(prompt_messages, *completions)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **parse_tools(fields)}


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split texts that both start with the prompt: after the last complete word that they share."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    prompt = chosen[:shared].rstrip()
    if not prompt:
        raise DataError(
            "chosen and rejected are text without a common beginning, and the record has no prompt",
            hint="add a prompt field, or map one: data.columns: {prompt: NAME}",
        )
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _to_messages(fields: Fields, name: str, *, role: str) -> list[Message]:
    """Return text, one message or a list of messages as a list of messages."""
    value = fields[name]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list | dict):
        raise DataError(f"{name} must be a string or a list of messages, not {type(value).__name__}")
    return parse_messages({**fields, name: [value] if isinstance(value, dict) else value}, name)


def _kto_label(fields: Fields) -> Fields:
    """Return LLaMA-Factory's `kto_tag` under the name `label`, so that judged answers are recognized."""
    return {"label": fields["kto_tag"]} if isinstance(fields.get("kto_tag"), bool) else {}


def read_tokens(fields: Fields) -> Fields:
    """Return token ids with labels, -100 where a token is not supervised, without the padding."""
    ids = _require_ids(fields, "input_ids", minimum=0)
    labels = _require_ids(fields, "labels", minimum=-100) if fields.get("labels") is not None else ids
    mask = fields.get("attention_mask") or [1] * len(ids)
    for name, values in (("labels", labels), ("attention_mask", mask)):
        if not isinstance(values, list) or len(values) != len(ids):
            raise DataError(f"{name} must have one value for each of the {len(ids)} input_ids")
    if any(label not in (token, -100) for token, label in zip(ids, labels, strict=True)):
        raise DataError(
            "labels must repeat input_ids, with -100 for tokens that are not supervised",
            hint="labels are not shifted: the label at a position is the token at that position",
        )
    kept = [index for index, keep in enumerate(mask) if keep]
    return {
        "input_ids": [ids[index] for index in kept],
        "labels": [labels[index] for index in kept],
        "attention_mask": [1] * len(kept),
    }


def _require_ids(fields: Fields, name: str, *, minimum: int) -> list[int]:
    values = fields[name]
    is_valid = isinstance(values, list) and all(
        type(value) is int and minimum <= value < 2**31 for value in values
    )
    if not is_valid or not values:
        raise DataError(f"{name} must be a list of token ids")
    ids: list[int] = values
    return ids


def require_string(fields: Fields, name: str) -> str:
    """Return a text field; raise a DataError for other values."""
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(f"{name} must be a string, not {type(value).__name__}")
    return value
