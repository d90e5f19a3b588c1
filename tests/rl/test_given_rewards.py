"""Rewards that are Python functions: called in this process, or imported by the workers where they can be."""

import functools
import os
import sys
import time

import pytest

from whet.config.objectives.grpo import GRPOObjective
from whet.errors import ConfigError, RunError
from whet.rl.rewards.worker_pool import Judged, RewardPool
from whet.user_code import bind_arguments, importable_reference


def pool(functions, *others, arguments=None, **settings):
    rewards = [{"function": f"python:{name}", "arguments": arguments or {}} for name in functions]
    section = GRPOObjective(rewards=[*rewards, *others], **{"reward_workers": 1, **settings})
    return RewardPool(section, functions)


def judged(*texts):
    return [Judged("a prompt", text, {"completion": "42"}) for text in texts]


def short(prompt, completion, record):
    return -len(completion)


def process(completion):
    return os.getpid()


def test_closures_lambdas_and_objects_are_called_here_beside_imported_and_built_in_ones():
    seen = []

    def closure(prompt, completion, record):
        seen.append((prompt, completion, record))
        return len(completion)

    class Bonus:
        def __call__(self, completion):
            return completion == "42"

    functions = {
        "closure": closure,
        "negative": lambda prompt, completion, record: -1,
        "bonus": Bonus(),
        "part": functools.partial(short, "a prompt"),
        "here": lambda completion: os.getpid(),
        "there": process,
    }
    with pool(functions, "exact_match") as rewards:
        found = rewards.score(judged("42", "seven"))
    assert [row[:4] for row in found] == [[2, -1, 1, -2], [5, -1, 0, -5]]
    assert [row[6] for row in found] == [1, 0]
    assert all(row[4] == os.getpid() != row[5] for row in found)
    assert seen == [("a prompt", "42", {"completion": "42"}), ("a prompt", "seven", {"completion": "42"})]
    assert [reward.label for reward in rewards.rewards] == [*functions, "exact_match"]


def test_without_a_function_for_the_workers_no_process_is_started(monkeypatch):
    monkeypatch.setattr("whet.rl.rewards.worker_pool.subprocess.Popen", None)
    with pool({"one": lambda completion: 1}) as rewards:
        assert rewards.score(judged("a", "b")) == [[1], [1]]
        assert rewards.score([]) == []


def test_a_function_whose_module_the_workers_cannot_import_is_called_here(tmp_path, monkeypatch):
    (tmp_path / "gone_rewards.py").write_text("import os\ndef f(completion):\n    return os.getpid()\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import gone_rewards
    with pool({"f": gone_rewards.f}) as rewards:
        assert rewards.score(judged("a")) == [[os.getpid()]]
    sys.modules.pop("gone_rewards")


def slow(completion):
    time.sleep(0.3)
    return 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda completion: {}["nothing there"], "KeyError: 'nothing there'"),
        (lambda completion: slow(completion) + 1, "it took more than 0.1 s"),
        (lambda completion: float("nan"), "it returned nan"),
        (lambda completion: None, "it returned None, which is no number"),
        (lambda completion: [slow(completion), 1 / 0], "it took more than 0.1 s"),
    ],
    ids=["raises", "slow", "nan", "none", "slow and raises"],
)
def test_one_that_fails_here_shows_the_completion_or_counts_as_stated(function, why):
    limit = 0.1 if "took" in why else 30.0
    with pool({"f": function}, reward_timeout=limit) as rewards, pytest.raises(RunError) as caught:
        rewards.score(judged("text"))
    assert f"the reward f failed: {why}" in caught.value.message
    assert "completion: 'text'" in caught.value.message
    with pool({"f": function}, reward_timeout=limit, on_error=-0.5) as rewards:
        assert rewards.score(judged("a", "b")) == [[-0.5], [-0.5]]
        assert rewards.take_failures() == 2


def test_interrupting_a_reward_interrupts_the_run():
    def interrupted(completion):
        raise KeyboardInterrupt

    with pool({"f": interrupted}, on_error=0.0) as rewards, pytest.raises(KeyboardInterrupt):
        rewards.score(judged("a"))


def test_a_reward_cannot_change_the_records_of_the_run():
    record = {"answer": {"number": 1}}

    def careless(completion, record):
        record["answer"]["number"] += 1
        return record["answer"]["number"]

    with pool({"f": careless}) as rewards:
        assert rewards.score([Judged("", "a", record)] * 2) == [[2], [2]]
    assert record == {"answer": {"number": 1}}


def test_arguments_of_the_config_reach_it():
    with pool({"f": lambda completion, bonus=0: bonus}, arguments={"bonus": 3}) as rewards:
        assert rewards.score(judged("a")) == [[3]]
    with (
        pytest.raises(ConfigError, match="objective.rewards: f cannot be used: its signature is"),
        pool({"f": lambda completion: 1}, arguments={"bonos": 3}),
    ):
        pass


def test_one_that_was_not_passed_is_named():
    section = GRPOObjective(rewards=["python:short:0123456789abcdef"])
    with pytest.raises(ConfigError, match=r"python:short:0123456789abcdef stands for.*\n.*rewards=\{'short'"):
        RewardPool(section)


NAMES = ("prompt", "completion", "record")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda prompt, completion, record: (prompt, completion, record), (1, 2, 3)),
        (lambda a, b, c: (a, b, c), (1, 2, 3)),
        (lambda prompt, completion, extra=None: (prompt, completion, extra), (1, 2, 3)),
        (lambda *args: args, (1, 2, 3)),
        (lambda prompt, *rest: (prompt, rest), (1, (2, 3))),
        (lambda a, b, c=0, *, completion=9: (a, b, c, completion), (1, 2, 3, 9)),
        (lambda record, completion, prompt: (prompt, completion, record), (1, 2, 3)),
        (lambda completion: completion, 2),
        (lambda completion, record=None: (completion, record), (2, 3)),
        (lambda completion, **others: (completion, others), (2, {"prompt": 1, "record": 3})),
        (lambda **everything: everything, {"prompt": 1, "completion": 2, "record": 3}),
        (max, 3),
    ],
)
def test_values_go_to_the_parameters_that_are_called_like_them(function, expected):
    assert bind_arguments(function, NAMES)(1, 2, 3) == expected


@pytest.mark.parametrize("function", [lambda: 0, lambda text: 0, lambda completion, other: 0])
def test_a_function_that_cannot_be_called_so_says_how_it_is_called(function):
    with pytest.raises(ValueError, match=r"its signature is \("):
        bind_arguments(function, NAMES)


def test_only_what_another_process_would_import_has_a_reference():
    assert importable_reference(short) == f"{__name__}:short"
    assert importable_reference(os.path.join) == "posixpath:join"
    local = functools.wraps(short)(lambda *args: 0)  # calls itself by the name of another
    for function in (lambda: 0, local, functools.partial(short), print, RewardPool.score, RewardPool):
        assert importable_reference(function) is None
