"""Text in, text out."""

from collections.abc import Callable, Sequence
from typing import Any

from whet.data.tokens.chat_template import render_chat
from whet.data.tokens.tokenize import open_ids, tokenize
from whet.errors import DataError
from whet.generation.engine import generate_tokens
from whet.generation.sampling import Sampling
from whet.generation.stop_strings import TextStream, check_stops
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens

Messages = Sequence[dict[str, Any]]  # Any: templates read fields of their own choice


def generate(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    prompt_or_messages: str | Messages,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    *,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The model's answer. A string is one user message where the tokenizer has a chat template.

    The answer ends before the first of the `stop` strings, if there is one in it. `on_text` is handed each
    new piece of text as soon as it is certain.
    """
    stream = TextStream(tokenizer, check_stops(stop), on_text)
    sampling = Sampling(temperature, top_p, top_k, min_p, repetition_penalty)
    [tokens] = generate_tokens(
        model,
        [encode_prompt(tokenizer, prompt_or_messages)],
        max_tokens=max_tokens,
        stop_tokens=stop_tokens(model, tokenizer),
        sampling=sampling,
        seed=seed,
        watch=stream.watch if stop or on_text is not None else None,
    )
    return stream.finish(tokens)


def encode_prompt(tokenizer: Any, prompt_or_messages: str | Messages) -> list[int]:
    """Token ids of a prompt, through the chat template where there is one."""
    if tokenizer is None:
        raise DataError("this model directory has no tokenizer, so it cannot read text")
    messages = prompt_or_messages
    if isinstance(messages, str):
        if not tokenizer.chat_template:
            return open_ids(tokenizer, _checked(messages))
        messages = [{"role": "user", "content": messages}]
    if not tokenizer.chat_template:
        raise DataError("messages need a chat template, and this tokenizer has none", hint="pass plain text")
    if not messages:
        raise DataError("there are no messages to answer")
    if not all(isinstance(message, dict) for message in messages):
        raise DataError(
            "messages must be objects, with a role and a content", hint="pass plain text as a string"
        )
    rendered = _checked(render_chat(tokenizer, messages, prompt=True))
    return tokenize(tokenizer, rendered, special=False)


def _checked(text: str) -> str:
    try:
        text.encode()  # half characters, which stand for bytes of a terminal that are none
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not UTF-8 text") from error
    return text
