"""Several answers to one prompt, and a choice among them: best of n, majority vote."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError
from whet.generation.engine import complete, without_stop
from whet.generation.generate import Messages, encode_prompt
from whet.generation.sampling import Sampling, row_seeds
from whet.generation.stop_strings import check_stops, cut, decoded, stop_watch
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens

_SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    text: str
    mean_logprob: float  # over its tokens, the stop token with them
    finished: bool  # ended by a stop token or stop string, not by length


@dataclass(frozen=True)
class Vote:
    """What most answers agree on."""

    answer: Answer  # the likeliest of those
    votes: int
    answers: list[Answer]


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
    """n answers to one prompt, decoded together; the prompt is read once."""
    if n < 1:
        raise ConfigError(f"n={n}: at least one answer is needed")
    if n > 1 and sampling.temperature == 0:
        raise ConfigError(f"at temperature 0 all {n} answers would be the same", hint="temperature: 1, say")
    stops, ends = check_stops(stop), stop_tokens(model, tokenizer)
    completions = complete(
        model,
        [encode_prompt(tokenizer, prompt_or_messages)] * n,
        max_tokens=max_tokens,
        stop_tokens=ends,
        sampling=sampling,
        seeds=row_seeds(n, seed=seed),
        watch=stop_watch(tokenizer, stops) if stops else None,
    )
    return [
        Answer(
            cut(decoded(tokenizer, without_stop(found, ends)), stops),
            sum(found.logprobs) / max(len(found.logprobs), 1),
            found.finished,
        )
        for found in completions
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
    """The best of n answers, the first of equals: by a scorer of texts, or by mean log-probability."""
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
    """What most of n answers agree on (self-consistency, arXiv 2203.11171).

    `key` reads from a text what is compared, the final number for instance; None is no vote. Of equally
    frequent ones the first to appear wins.
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
        if (found := key(answer.text)) is not None:
            groups.setdefault(found, []).append(answer)
    winners = max(groups.values(), key=len, default=answers)
    votes = len(winners) if groups else 0
    return Vote(max(winners, key=lambda answer: answer.mean_logprob), votes, answers)
