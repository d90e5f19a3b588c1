"""Sample completions from the model in training, and evaluate the rewards of greedy completions."""

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
from whet.parallel.fsdp import gathered_parameters
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.rl.rewards.worker_pool import RewardInput, RewardPool
from whet.training.callbacks import Metrics
from whet.training.loss import autocast_context


class RolloutSampler:
    """Generates completions with the model in training, and scores them with the rewards."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer
        settings: GRPOObjective,
        pool: RewardPool,
        precision: Precision,
        world: World = SINGLE_PROCESS,
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
        """Return the completions of all prompts, on every rank; each rank generates a share of them.

        Args:
            prompts: the prompts of all ranks.
            sampling: how tokens are sampled. None: greedy decoding.
            seeds: one seed per prompt.
            pause: called before each new token; it may raise.
        """
        with gathered_parameters(self.model):
            completions = self.world.map_items(
                range(len(prompts)),
                lambda indices: [
                    vars(completion)
                    for completion in self._complete(
                        [prompts[i] for i in indices],
                        sampling=sampling,
                        seeds=None if seeds is None else [seeds[i] for i in indices],
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
            self.world.watchdog.report_activity("generating")
            pause()
            return True

        rows = self.settings.generate_rows
        for start in range(0, len(prompts), rows):
            # the trainer's precision, because sampling in another precision would sample another policy
            with autocast_context(self.precision, self.model.device):
                completions = complete(
                    self.model,
                    [prompt.tokens for prompt in prompts[start : start + rows]],
                    max_tokens=self.settings.max_new_tokens,
                    stop_tokens=self.stops,
                    sampling=sampling,
                    seeds=None if seeds is None else seeds[start : start + rows],
                    watch=watch,
                )
            yield from completions

    def text(self, completion: Completion) -> str:
        """Return the decoded text of a completion, without its stop token."""
        tokens = completion.tokens[:-1] if completion.finished else completion.tokens
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
        """Return the unweighted value of each reward for each completion, [completions, rewards]."""
        inputs = [
            RewardInput(prompt.question.text, text, prompt.fields)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        with self.world.watchdog.long_operation(
            "scoring completions"
        ):  # the calls of rewards have a time limit
            scores = self.world.map_items(inputs, lambda part: self.pool.score(part) if part else [])
        return np.array(scores, dtype=np.float64)

    def pop_failure_count(self) -> int:
        """Return the number of failed reward calls of all ranks since the last call, and reset it to 0."""
        return sum(self.world.gather_dp(self.pool.pop_failure_count()))

    @property
    def reward_weights(self) -> np.ndarray:
        """The weights of the rewards, [rewards]."""
        return np.array([reward.weight for reward in self.settings.rewards])


def evaluate_rewards(
    sampler: RolloutSampler,
    prompts: Sequence[Prompt],
    *,
    metrics: AnswerMetrics | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Metrics:
    """Return the evaluation metrics of greedy completions: rewards, exact match and user-defined metrics.

    Args:
        sampler: generates and scores the completions.
        prompts: the prompts of the evaluation split.
        metrics: user-defined metrics of the completions.
        pause: called before each new token; it may raise.
    """
    completions = sampler.complete(prompts, pause=pause)
    texts = [sampler.text(completion) for completion in completions]
    scores = sampler.score(prompts, texts)
    results: Metrics = {"eval_reward": float((scores @ sampler.reward_weights).mean())}
    for index, reward in enumerate(sampler.settings.rewards):
        results[f"eval_reward_{reward.label}"] = float(scores[:, index].mean())
    if sampler.settings.on_error is not None:
        results["eval_reward_errors"] = sampler.pop_failure_count()
    results["eval_truncated_fraction"] = sum(not c.finished for c in completions) / len(completions)
    matches = [
        (text.strip() == prompt.question.answer.strip(), prompt.question.group)
        for text, prompt in zip(texts, prompts, strict=True)
        if prompt.question.answer
    ]
    if matches:
        correct, groups = zip(*matches, strict=True)
        results |= ExactMatch(list(correct), list(groups)).metrics()
    if metrics:
        results |= metrics.compute(texts, [prompt.fields for prompt in prompts], world=sampler.world)
    return results
