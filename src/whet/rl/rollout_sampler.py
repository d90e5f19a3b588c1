"""Sample completions from the model in training, and evaluate the rewards of greedy answers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from whet.config.objectives.grpo import GRPOObjective
from whet.data.tokens.prompts import Prompt
from whet.evaluation.answer_metrics import AnswerMetrics
from whet.evaluation.exact_match import ExactMatch
from whet.generation.engine import Completion, complete
from whet.generation.sampling import Sampling
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens
from whet.parallel.fsdp import gathered
from whet.parallel.process_group import SOLO, World
from whet.rl.rewards.worker_pool import Judged, RewardPool
from whet.training.callbacks import Metrics
from whet.training.loss import in_precision


class Sampler:
    """Completions of some prompts, and what they are worth."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer
        settings: GRPOObjective,
        pool: RewardPool,
        precision: Precision,
        world: World = SOLO,
    ) -> None:
        self.world = world
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.pool = pool
        self.precision = precision
        self.stops = stop_tokens(model, tokenizer)

    def complete(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
        pause: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """What the model makes of each prompt, computed as in training; greedy without a sampling.

        Each rank completes its share. `pause` is called before each new token, and may raise.
        """
        places = range(len(prompts))
        with gathered(self.model):
            completions = self.world.each(
                places,
                lambda mine: [
                    vars(completion)
                    for completion in self._complete(
                        [prompts[place] for place in mine],
                        sampling=sampling,
                        seeds=None if seeds is None else [seeds[place] for place in mine],
                        pause=pause,
                    )
                ],
            )
        return [Completion(**fields) for fields in completions]

    def _complete(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling | None,
        seeds: Sequence[int] | None,
        pause: Callable[[], None],
    ) -> Iterator[Completion]:

        def watch(_row: int, _tokens: list[int]) -> bool:
            self.world.watch.doing("generating")
            pause()
            return True

        rows = self.settings.generate_rows
        for start in range(0, len(prompts), rows):
            # as the trainer computes: a sampler in another precision would be another policy
            with in_precision(self.precision, self.model.device):
                found = complete(
                    self.model,
                    [prompt.tokens for prompt in prompts[start : start + rows]],
                    max_tokens=self.settings.max_new_tokens,
                    stop_tokens=self.stops,
                    sampling=sampling,
                    seeds=None if seeds is None else seeds[start : start + rows],
                    watch=watch,
                )
            yield from found

    def text(self, completion: Completion) -> str:
        """What a completion says."""
        tokens = completion.tokens[:-1] if completion.finished else completion.tokens
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
        """What each reward says of each completion, [completions, rewards], before weighting."""
        judged = [
            Judged(prompt.question.text, text, prompt.fields)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        with self.world.watch.patiently("judging completions"):  # rewards have a time limit of their own
            scores = self.world.each(judged, lambda mine: self.pool.score(mine) if mine else [])
        return np.array(scores, dtype=np.float64)

    def take_failures(self) -> int:
        """Calls of rewards that counted as on_error since this was asked last, on all ranks."""
        return sum(self.world.gather_shares(self.pool.take_failures()))

    @property
    def reward_weights(self) -> np.ndarray:
        """[rewards]."""
        return np.array([reward.weight for reward in self.settings.rewards])


def evaluate_rewards(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    *,
    metrics: AnswerMetrics | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Metrics:
    """The rewards and metrics of greedy completions, and how many are exactly the expected answer."""
    completions = sampler.complete(prompts, pause=pause)
    texts = [sampler.text(completion) for completion in completions]
    scores = sampler.score(prompts, texts)
    found: Metrics = {"eval_reward": float((scores @ sampler.reward_weights).mean())}
    for place, reward in enumerate(sampler.settings.rewards):
        found[f"eval_reward_{reward.label}"] = float(scores[:, place].mean())
    if sampler.settings.on_error is not None:
        found["eval_reward_errors"] = sampler.take_failures()
    found["eval_truncated_fraction"] = sum(not c.finished for c in completions) / len(completions)
    answered = [
        (text.strip() == prompt.question.answer.strip(), prompt.question.group)
        for text, prompt in zip(texts, prompts, strict=True)
        if prompt.question.answer
    ]
    if answered:
        correct, groups = zip(*answered, strict=True)
        found |= ExactMatch(list(correct), list(groups)).metrics()
    if metrics:
        found |= metrics.compute(texts, [prompt.fields for prompt in prompts], world=sampler.world)
    return found
