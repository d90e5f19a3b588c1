"""Generate text from a prompt or chat messages."""

from collections.abc import Callable, Sequence
from typing import Any

from whet.data.templates.chat import render_chat
from whet.data.tokens.tokenize import encode_prompt_ids, tokenize
from whet.errors import DataError
from whet.generation.engine import generate_tokens
from whet.generation.sampling import Sampling
from whet.generation.stop_strings import TextStream, check_stops
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens

Messages = Sequence[dict[str, Any]]  # Any: chat templates may read any field


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
    """Return the text that the model generates for a prompt or chat messages.

    Args:
        model: the model to decode with.
        tokenizer: a transformers tokenizer.
        prompt_or_messages: a prompt or chat messages. A string is one user message if the tokenizer has a
            chat template.
        max_tokens: the largest number of new tokens.
        temperature: 0 is greedy decoding.
        top_p: sample from the smallest set of tokens with this total probability.
        top_k: sample from this number of most likely tokens. 0: no limit.
        min_p: exclude tokens less likely than this fraction of the most likely token's probability.
        seed: makes sampling reproducible. None: the seed is random.
        repetition_penalty: above 1, tokens of the prompt and of the generated text become less likely.
        stop: strings that end the text; it is truncated before the first of them.
        on_text: called with each new piece of text as soon as later tokens cannot change it.

    Raises:
        ConfigError: a sampling setting is out of range, or a stop string is empty.
        DataError: there is no tokenizer, or the prompt or the messages cannot be encoded.
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
    """Return the token ids of a prompt, rendered with the chat template if the tokenizer has one.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_or_messages: a prompt or chat messages. A string is one user message if the tokenizer has a
            chat template.

    Raises:
        DataError: there is no tokenizer, or the prompt or the messages are invalid.
    """
    if tokenizer is None:
        raise DataError("this model directory has no tokenizer, so it cannot read text")
    messages = prompt_or_messages
    if isinstance(messages, str):
        if not tokenizer.chat_template:
            return encode_prompt_ids(tokenizer, _check_unicode(messages))
        messages = [{"role": "user", "content": messages}]
    if not tokenizer.chat_template:
        raise DataError("messages need a chat template, and this tokenizer has none", hint="pass plain text")
    if not messages:
        raise DataError("the list of messages is empty", hint="pass at least one message")
    if not all(isinstance(message, dict) for message in messages):
        raise DataError(
            "messages must be objects with a role and a content", hint="pass plain text as a string"
        )
    rendered = _check_unicode(render_chat(tokenizer, messages, add_generation_prompt=True))
    return tokenize(tokenizer, rendered, add_special_tokens=False)


def _check_unicode(text: str) -> str:
    try:
        text.encode()  # fails for lone surrogates, which Python uses for invalid bytes of a terminal
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not UTF-8 text") from error
    return text
