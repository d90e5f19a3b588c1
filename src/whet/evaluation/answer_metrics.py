"""Metrics of a user's own on greedy answers, `eval.metrics`: functions of the answers and the records."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from whet.config.placeholder import parse_placeholder
from whet.data.tokens.tokenize import Question
from whet.error_boundary import reason
from whet.errors import ConfigError, RunError, blamed_on
from whet.evaluation.exact_match import ExactMatch, compare_answers, exact_match, greedy_answers
from whet.models.language_model import LanguageModel
from whet.parallel.fsdp import gathered
from whet.parallel.process_group import SOLO, World
from whet.user_code import bind_arguments, load_user_object

log = logging.getLogger("whet")

Functions = Mapping[str, Callable[..., Any]]  # Any: whatever a user's function returns


class AnswerMetrics:
    """The functions of `eval.metrics`, imported when this is made.

    Args:
        named: "package.module:function", "path/to/file.py:function" or a placeholder, by the metric's name.
        given: functions passed from Python, for the placeholders, by name.
    """

    def __init__(self, named: Mapping[str, str], given: Functions = MappingProxyType({})) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}  # Any: whatever a user's function returns
        self._computed: set[str] = set()  # those that have given a number before
        for name, reference in named.items():
            with blamed_on(f"eval.metrics.{name}"):
                self._functions[name] = _load(reference, given)

    def __bool__(self) -> bool:
        return bool(self._functions)

    def compute(
        self,
        answers: Sequence[str],
        records: Sequence[Mapping[str, Any]],  # Any: JSON values
        *,
        world: World = SOLO,
    ) -> dict[str, float]:
        """Return eval_NAME of every metric, computed on the main rank, in the order of the config.

        Raises:
            RunError: a metric raises or returns no number the first time. Later its value is NaN instead:
                a long run is not given up for it.
        """
        values: dict[str, float] = {}
        with world.watch.patiently("computing metrics"), world.abreast():
            if world.is_main:
                values = {
                    f"eval_{name}": self._value(name, function, answers, records)
                    for name, function in self._functions.items()
                }
        return world.from_main(values)

    def _value(
        self,
        name: str,
        function: Callable[..., Any],  # Any: whatever a user's function returns
        answers: Sequence[str],
        records: Sequence[Mapping[str, Any]],  # Any: JSON values
    ) -> float:
        try:
            value = float(function(list(answers), copy.deepcopy(list(records))))
        except Exception as error:  # whatever somebody else's code raises
            problem = f"the metric {name} failed: {reason(error)}"
            if name not in self._computed:
                raise RunError(
                    problem, hint="it is called with the lists (answers, records), and returns a number"
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
    world: World = SOLO,
) -> Callable[[], dict[str, float]]:
    """Return what generates an answer to each question once, each rank its share, and measures them.

    Args:
        model: who answers.
        tokenizer: of the model.
        questions: what is asked.
        max_tokens: longest answer.
        exact: whether exact match is among the results.
        metrics: those of the config.
        pause: called before each new token, and may raise.
        world: the processes that take part.
    """

    def judge(mine: Sequence[Question]) -> list[bool]:
        return exact_match(model, tokenizer, mine, max_tokens=max_tokens, pause=pause).correct

    def ask(mine: Sequence[Question]) -> list[str]:
        return greedy_answers(model, tokenizer, mine, max_tokens=max_tokens, pause=pause)

    def evaluate() -> dict[str, float]:
        groups = [question.group for question in questions]
        if not metrics:  # whole answers are not needed
            with gathered(model):
                return ExactMatch(world.each(questions, judge), groups).metrics()
        with gathered(model):
            answers = world.each(questions, ask)
        matches = compare_answers(answers, questions).metrics() if exact else {}
        return matches | metrics.compute(answers, [question.record for question in questions], world=world)

    return evaluate


def _load(reference: str, given: Functions) -> Callable[..., Any]:  # Any: whatever a user's function returns
    placeholder = parse_placeholder(reference)
    if placeholder is not None and placeholder.name not in given:
        raise ConfigError(
            f"{reference} stands for a function that is passed from Python, and it is not here",
            hint=f"whet.train and whet.resume take it: metrics={{{placeholder.name!r}: function}}",
        )
    try:
        function = load_user_object(reference) if placeholder is None else given[placeholder.name]
        return bind_arguments(function, ("answers", "records"))
    except Exception as error:  # a module raises what it likes while it is imported
        raise ConfigError(f"{reference} cannot be used: {reason(error)}") from error
