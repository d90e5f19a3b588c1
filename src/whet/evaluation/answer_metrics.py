"""User-defined metrics (`eval.metrics`): functions of the model's greedy answers and the data records."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from whet.config.placeholder import parse_placeholder
from whet.data.tokens.tokenize import Question
from whet.error_boundary import error_text
from whet.errors import ConfigError, RunError, prefix_errors
from whet.evaluation.exact_match import ExactMatch, compare_answers, exact_match, greedy_answers
from whet.models.language_model import LanguageModel
from whet.parallel.fsdp import gathered_parameters
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.user_code import bind_arguments, load_user_object

log = logging.getLogger("whet")

Functions = Mapping[str, Callable[..., Any]]  # Any: whatever a user's function returns


class AnswerMetrics:
    """The functions of `eval.metrics`, which the constructor imports.

    Args:
        named: "package.module:function", "path/to/file.py:function" or a placeholder, by the metric's name.
        given: functions passed from Python, by the name of their placeholder.

    Raises:
        ConfigError: a function cannot be imported or called, or was not passed.
    """

    def __init__(self, named: Mapping[str, str], given: Functions = MappingProxyType({})) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}  # Any: whatever a user's function returns
        self._computed: set[str] = set()  # names of metrics that were computed at least once
        for name, reference in named.items():
            with prefix_errors(f"eval.metrics.{name}"):
                self._functions[name] = _load(reference, given)

    def __bool__(self) -> bool:
        return bool(self._functions)

    def compute(
        self,
        answers: Sequence[str],
        records: Sequence[Mapping[str, Any]],  # Any: JSON values
        *,
        world: World = SINGLE_PROCESS,
    ) -> dict[str, float]:
        """Return eval_NAME of every metric in the order of the config; the main rank computes them.

        Args:
            answers: the generated texts.
            records: the data record of each answer.
            world: the processes of the run; all of them must call this.

        Raises:
            RunError: a metric fails or returns no number in its first call. If a later call fails, the value
                is NaN, because a long run should not stop for it.
        """
        values: dict[str, float] = {}
        with world.watchdog.long_operation("computing metrics"), world.sync_errors():
            if world.is_main:
                values = {
                    f"eval_{name}": self._value(name, function, answers, records)
                    for name, function in self._functions.items()
                }
        return world.broadcast(values)

    def _value(
        self,
        name: str,
        function: Callable[..., Any],  # Any: whatever a user's function returns
        answers: Sequence[str],
        records: Sequence[Mapping[str, Any]],  # Any: JSON values
    ) -> float:
        try:
            value = float(function(list(answers), copy.deepcopy(list(records))))
        except Exception as error:  # user code may raise anything
            problem = f"the metric {name} failed: {error_text(error)}"
            if name not in self._computed:
                raise RunError(
                    problem, hint="it is called with the lists (answers, records), and must return a number"
                ) from error
            log.warning("%s; its value is nan", problem)
            return math.nan
        self._computed.add(name)
        return value


def answer_evaluator(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    questions: Sequence[Question],
    *,
    max_tokens: int,
    exact: bool = True,
    metrics: AnswerMetrics | None = None,
    pause: Callable[[], None] = lambda: None,
    world: World = SINGLE_PROCESS,
) -> Callable[[], dict[str, float]]:
    """Return a function that generates one greedy answer per question and computes their metrics.

    The questions are distributed over the ranks.

    Args:
        model: generates the answers.
        tokenizer: the model's tokenizer.
        questions: the prompts, with their expected answers.
        max_tokens: the largest number of tokens per answer.
        exact: whether to compute exact match.
        metrics: the user-defined metrics of `eval.metrics`.
        pause: called before each new token; it may raise.
        world: the processes of the run.
    """

    def compute_matches(part: Sequence[Question]) -> list[bool]:
        return exact_match(model, tokenizer, part, max_tokens=max_tokens, pause=pause).correct

    def generate_answers(part: Sequence[Question]) -> list[str]:
        return greedy_answers(model, tokenizer, part, max_tokens=max_tokens, pause=pause)

    def evaluate() -> dict[str, float]:
        groups = [question.group for question in questions]
        if not metrics:  # exact match alone does not need complete answers
            with gathered_parameters(model):
                return ExactMatch(world.map_items(questions, compute_matches), groups).metrics()
        with gathered_parameters(model):
            answers = world.map_items(questions, generate_answers)
        matches = compare_answers(answers, questions).metrics() if exact else {}
        return matches | metrics.compute(answers, [question.record for question in questions], world=world)

    return evaluate


def _load(reference: str, given: Functions) -> Callable[..., Any]:  # Any: whatever a user's function returns
    placeholder = parse_placeholder(reference)
    if placeholder is not None and placeholder.name not in given:
        raise ConfigError(
            f"{reference} is a placeholder for a function passed from Python, and it was not passed",
            hint=f"pass it to whet.train or whet.resume: metrics={{{placeholder.name!r}: function}}",
        )
    try:
        function = load_user_object(reference) if placeholder is None else given[placeholder.name]
        return bind_arguments(function, ("answers", "records"))
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(f"{reference} cannot be used: {error_text(error)}") from error
