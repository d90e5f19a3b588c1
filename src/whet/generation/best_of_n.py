"""Sample several completions of one prompt and choose one: best of n, majority vote."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError
from whet.generation.engine import complete, strip_stop_token
from whet.generation.generate import Messages, encode_prompt
from whet.generation.sampling import Sampling, row_seeds
from whet.generation.stop_strings import check_stops, decode, stop_watcher, truncate_at_stop
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens

_SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Answer:
    """One sampled completion of a prompt."""

    text: str
    mean_logprob: float  # over its tokens, including the stop token
    finished: bool  # ended by a stop token or stop string, not by the length limit


@dataclass(frozen=True)
class Vote:
    """The result of a majority vote."""

    answer: Answer  # the most likely answer of the majority
    votes: int  # size of the majority
    answers: list[Answer]  # all sampled answers


def sample_answers(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    prompt_or_messages: str | Messages,
    n: int,
    *,
    max_tokens: int = 256,
    sampling: Sampling = _SAMPLING,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
) -> list[Answer]:
    """Return `n` sampled completions of one prompt, decoded as one batch with a single prefill.

    Args:
        model: the model to decode with.
        tokenizer: a transformers tokenizer.
        prompt_or_messages: a prompt or chat messages. A string is one user message if the tokenizer has a
            chat template.
        n: the number of completions.
        max_tokens: the largest number of new tokens per completion.
        sampling: how tokens are sampled; the temperature must not be 0 if `n` is above 1.
        stop: strings that end a completion; it is truncated before the first of them.
        seed: makes the completions reproducible. None: the seed is random.
    """
    if n < 1:
        raise ConfigError(f"n={n} must be at least 1")
    if n > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"at temperature 0 all {n} answers would be the same", hint="set a temperature above 0, such as 1"
        )
    stops, stop_ids = check_stops(stop), stop_tokens(model, tokenizer)
    completions = complete(
        model,
        [encode_prompt(tokenizer, prompt_or_messages)] * n,
        max_tokens=max_tokens,
        stop_tokens=stop_ids,
        sampling=sampling,
        seeds=row_seeds(n, seed=seed),
        watch=stop_watcher(tokenizer, stops) if stops else None,
    )
    return [
        Answer(
            truncate_at_stop(decode(tokenizer, strip_stop_token(completion, stop_ids)), stops),
            sum(completion.logprobs) / max(len(completion.logprobs), 1),
            completion.finished,
        )
        for completion in completions
    ]


def best_of_n(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    prompt_or_messages: str | Messages,
    n: int,
    *,
    scorer: Callable[[str], float] | None = None,
    max_tokens: int = 256,
    sampling: Sampling = _SAMPLING,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
) -> Answer:
    """Return the best of `n` sampled completions; of equally good ones, the first.

    Args:
        model: the model to decode with.
        tokenizer: a transformers tokenizer.
        prompt_or_messages: a prompt or chat messages. A string is one user message if the tokenizer has a
            chat template.
        n: the number of completions.
        scorer: returns the score of a text, higher is better. None: the mean log-probability is the score.
        max_tokens: the largest number of new tokens per completion.
        sampling: how tokens are sampled; the temperature must not be 0 if `n` is above 1.
        stop: strings that end a completion; it is truncated before the first of them.
        seed: makes the completions reproducible. None: the seed is random.

    Raises:
        ConfigError: `n` is below 1, or the temperature is 0 and `n` is above 1.
    """
    answers = sample_answers(
        model,
        tokenizer,
        prompt_or_messages,
        n,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        seed=seed,
    )
    if scorer is None:
        return max(answers, key=lambda answer: answer.mean_logprob)
    return max(answers, key=lambda answer: scorer(answer.text))


def majority_vote(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    prompt_or_messages: str | Messages,
    n: int,
    *,
    key: Callable[[str], Hashable] = str.strip,
    max_tokens: int = 256,
    sampling: Sampling = _SAMPLING,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
) -> Vote:
    """Return the most frequent answer among `n` sampled completions (self-consistency, arXiv 2203.11171).

    Of equally frequent answers, the first to appear wins.

    Args:
        model: the model to decode with.
        tokenizer: a transformers tokenizer.
        prompt_or_messages: a prompt or chat messages. A string is one user message if the tokenizer has a
            chat template.
        n: the number of completions.
        key: extracts the value to compare from a text, for example the final number. A completion with the
            key None has no vote.
        max_tokens: the largest number of new tokens per completion.
        sampling: how tokens are sampled; the temperature must not be 0 if `n` is above 1.
        stop: strings that end a completion; it is truncated before the first of them.
        seed: makes the completions reproducible. None: the seed is random.

    Returns:
        The vote; `votes` is 0 if no completion has a key, and `answer` is then the most likely completion.

    Raises:
        ConfigError: `n` is below 1, or the temperature is 0 and `n` is above 1.
    """
    answers = sample_answers(
        model,
        tokenizer,
        prompt_or_messages,
        n,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        seed=seed,
    )
    groups: dict[Hashable, list[Answer]] = {}
    for answer in answers:
        if (value := key(answer.text)) is not None:
            groups.setdefault(value, []).append(answer)
    majority = max(groups.values(), key=len, default=answers)
    votes = len(majority) if groups else 0
    return Vote(max(majority, key=lambda answer: answer.mean_logprob), votes, answers)
