"""Rewards passed as Python functions: called in this process, or imported by the workers if possible."""

import functools
import os
import sys
import time

import pytest

from whet.config.objectives.grpo import GRPOObjective
from whet.errors import ConfigError, RunError
from whet.rl.rewards.worker_pool import RewardInput, RewardPool
from whet.user_code import bind_arguments, find_import_reference


def pool(functions, *more_rewards, arguments=None, **settings):
    rewards = [{"function": f"python:{name}", "arguments": arguments or {}} for name in functions]
    section = GRPOObjective(rewards=[*rewards, *more_rewards], **{"reward_workers": 1, **settings})
    return RewardPool(section, functions)


def reward_inputs(*texts):
    return [RewardInput("a prompt", text, {"completion": "42"}) for text in texts]


def negative_length(prompt, completion, record):
    return -len(completion)


def process_id(completion):
    return os.getpid()


def test_local_imported_and_built_in_rewards_together():
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
        "part": functools.partial(negative_length, "a prompt"),
        "local": lambda completion: os.getpid(),
        "worker": process_id,
    }
    with pool(functions, "exact_match") as rewards:
        scores = rewards.score(reward_inputs("42", "seven"))
    assert [row[:4] for row in scores] == [[2, -1, 1, -2], [5, -1, 0, -5]]
    assert [row[6] for row in scores] == [1, 0]
    assert all(row[4] == os.getpid() != row[5] for row in scores)
    assert seen == [("a prompt", "42", {"completion": "42"}), ("a prompt", "seven", {"completion": "42"})]
    assert [reward.label for reward in rewards.rewards] == [*functions, "exact_match"]


def test_local_rewards_start_no_process(monkeypatch):
    monkeypatch.setattr("whet.rl.rewards.worker_pool.subprocess.Popen", None)
    with pool({"one": lambda completion: 1}) as rewards:
        assert rewards.score(reward_inputs("a", "b")) == [[1], [1]]
        assert rewards.score([]) == []


def test_function_of_unimportable_module_is_called_locally(tmp_path, monkeypatch):
    (tmp_path / "gone_rewards.py").write_text("import os\ndef f(completion):\n    return os.getpid()\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import gone_rewards
    with pool({"f": gone_rewards.f}) as rewards:
        assert rewards.score(reward_inputs("a")) == [[os.getpid()]]
    sys.modules.pop("gone_rewards")


def slow(completion):
    time.sleep(0.3)
    return 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda completion: {}["missing"], "KeyError: 'missing'"),
        (lambda completion: slow(completion) + 1, "it took more than 0.1 s"),
        (lambda completion: float("nan"), "it returned nan"),
        (lambda completion: None, "it returned None, which is not a number"),
        (lambda completion: [slow(completion), 1 / 0], "it took more than 0.1 s"),
    ],
    ids=["raises", "slow", "nan", "none", "slow and raises"],
)
def test_failing_local_reward_raises_or_scores_on_error(function, reason):
    limit = 0.1 if "took" in reason else 30.0
    with pool({"f": function}, reward_timeout=limit) as rewards, pytest.raises(RunError) as caught:
        rewards.score(reward_inputs("text"))
    assert f"the reward f failed: {reason}" in caught.value.message
    assert "completion: 'text'" in caught.value.message
    with pool({"f": function}, reward_timeout=limit, on_error=-0.5) as rewards:
        assert rewards.score(reward_inputs("a", "b")) == [[-0.5], [-0.5]]
        assert rewards.pop_failure_count() == 2


def test_keyboard_interrupt_in_reward_propagates():
    def interrupted(completion):
        raise KeyboardInterrupt

    with pool({"f": interrupted}, on_error=0.0) as rewards, pytest.raises(KeyboardInterrupt):
        rewards.score(reward_inputs("a"))


def test_reward_cannot_change_records():
    record = {"answer": {"number": 1}}

    def mutating(completion, record):
        record["answer"]["number"] += 1
        return record["answer"]["number"]

    with pool({"f": mutating}) as rewards:
        assert rewards.score([RewardInput("", "a", record)] * 2) == [[2], [2]]
    assert record == {"answer": {"number": 1}}


def test_config_arguments_are_bound():
    with pool({"f": lambda completion, bonus=0: bonus}, arguments={"bonus": 3}) as rewards:
        assert rewards.score(reward_inputs("a")) == [[3]]
    with (
        pytest.raises(ConfigError, match="objective.rewards: f cannot be used: its signature is"),
        pool({"f": lambda completion: 1}, arguments={"bonos": 3}),
    ):
        pass


def test_missing_function_is_named():
    section = GRPOObjective(rewards=["python:negative_length:0123456789abcdef"])
    with pytest.raises(
        ConfigError,
        match=r"python:negative_length:0123456789abcdef is a placeholder for a function.*\n.*rewards=\{'negative_length'",
    ):
        RewardPool(section)


PARAMETERS = ("prompt", "completion", "record")


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
        (lambda completion, **rest: (completion, rest), (2, {"prompt": 1, "record": 3})),
        (lambda **everything: everything, {"prompt": 1, "completion": 2, "record": 3}),
        (max, 3),
    ],
)
def test_arguments_are_bound_by_position_or_name(function, expected):
    assert bind_arguments(function, PARAMETERS)(1, 2, 3) == expected


@pytest.mark.parametrize("function", [lambda: 0, lambda text: 0, lambda completion, other: 0])
def test_unbindable_function_error_shows_signature(function):
    with pytest.raises(ValueError, match=r"its signature is \("):
        bind_arguments(function, PARAMETERS)


def test_importable_reference_requires_module_level_function():
    assert find_import_reference(negative_length) == f"{__name__}:negative_length"
    assert find_import_reference(os.path.join) == "posixpath:join"
    local = functools.wraps(negative_length)(lambda *args: 0)  # has the name of another function
    for function in (
        lambda: 0,
        local,
        functools.partial(negative_length),
        print,
        RewardPool.score,
        RewardPool,
    ):
        assert find_import_reference(function) is None
