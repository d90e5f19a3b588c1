"""The built-in rewards, and rewards that raise, hang, die or return invalid values."""

import itertools
import json
import os
import selectors
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

import whet
from whet.config.objectives.grpo import BUILTIN_REWARDS, GRPOObjective
from whet.errors import ConfigError, RunError
from whet.rl.rewards import worker_pool as reward_pool
from whet.rl.rewards.builtin import (
    BUILTIN,
    exact_match,
    json_schema,
    last_number,
    length,
    numeric_match,
    regex,
)
from whet.rl.rewards.json_schema import check_schema, is_valid
from whet.rl.rewards.worker_pool import RewardInput, RewardPool

REWARDS = """
import os, re, time
from beside import factor

def good(prompt, completion, record, bonus=0.0):
    print("rewards may print")
    return factor * len(completion) + bonus

def raises(prompt, completion, record):
    raise KeyError("missing")

def hangs(prompt, completion, record):
    time.sleep(60 if completion == "slow" else 0)
    return 1

def backtracks(prompt, completion, record):
    return bool(re.match("^(a+)+$", "a" * 64 + "!" if completion == "slow" else "a"))

def dies(prompt, completion, record):
    os._exit(3)

def nan(prompt, completion, record):
    return float("nan")

def nothing(prompt, completion, record):
    return None

def process(prompt, completion, record):
    time.sleep(0.2)
    return os.getpid()
"""


@pytest.fixture
def rewards_file(tmp_path):
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    (tmp_path / "beside.py").write_text("factor = 2\n")
    return tmp_path / "own_rewards.py"


def pool(*rewards, **settings):
    return RewardPool(GRPOObjective(rewards=list(rewards), **{"reward_workers": 2, **settings}))


def reward_inputs(*texts):
    return [RewardInput("a prompt", text, {"completion": "42"}) for text in texts]


def test_config_lists_all_built_in_rewards():
    assert tuple(BUILTIN) == BUILTIN_REWARDS


def test_exact_and_numeric_match_for_all_record_formats():
    assert exact_match("", " 42\n", {"completion": "42"}) == 1
    assert exact_match("", "42.", {"completion": "42"}) == 0
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]}
    assert exact_match("", "yes", chat) == 1
    assert exact_match("", "7", {"answer": "7"}) == 1
    assert exact_match("", "7", {"prompt": "p", "gold": 7}, field="gold") == 1
    with pytest.raises(KeyError, match="contains no expected answer"):
        exact_match("", "7", {"prompt": "p"})
    assert numeric_match("", "so 3 + 4 is 1,007.0!", {"answer": "#### 1007"}) == 1
    assert numeric_match("", "no idea", {"answer": "7"}) == 0
    assert numeric_match("", "3.14", {"answer": "3.14159"}, tolerance=0.01) == 1
    for answer, completion in (("0.05", "0.06"), ("1e-9", "0"), ("-0.004", "0.004"), ("0", "0.001")):
        assert numeric_match("", completion, {"answer": answer}, tolerance=0.1) == 0
        assert numeric_match("", answer, {"answer": answer}, tolerance=0.1) == 1
    assert numeric_match("", "0.0101", {"answer": "0.01"}, tolerance=0.02) == 1
    assert numeric_match("", "0.00", {"answer": "0"}) == 1
    with pytest.raises(ValueError, match="contains no number"):
        numeric_match("", "3", {"answer": "pi"})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 5, b -3", -3),
        ("1,234.5", 1234.5),
        ("2e3", 2000),
        (".5", 0.5),
        ("x", None),
        ("10,20", 20),
        ("7.", 7),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_regex_and_length():
    assert regex("", "<a>\n</a>", {}, pattern="^<a>.*</a>$") == 1
    assert regex("", "a", {}, pattern="^b") == 0
    assert [length("", "x" * size, {}, longest=10, margin=5) for size in (0, 10, 12, 15, 99)] == [
        0,
        0,
        -0.4,
        -1,
        -1,
    ]
    assert [length("", "x" * size, {}, longest=10, shortest=4) for size in (3, 4, 11)] == [-1, 0, -1]


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, "x", None, True]}, "minItems": 1, "maxItems": 2},
    {"type": ["string", "null"], "minLength": 1, "maxLength": 3, "pattern": "^a"},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 2},
    {"exclusiveMinimum": 0, "maximum": 2},
    {"anyOf": [{"type": "string"}, {"const": 1}], "not": {"const": "no"}},
    {"oneOf": [{"type": "integer"}, {"minimum": 1}]},
    {"allOf": [{"type": "object"}, {"required": ["b"]}]},
    {"properties": {"a": True}, "additionalProperties": {"type": "string"}},
    {"const": {"a": [1, True]}},
    {},
]  # fmt: skip
VALUES = [
    0, 1, 1.0, 2, 1.5, -3, True, False, None, "", "a", "abc", "abcd", "b", "no", [], [1], [True], [1.0], ["x", None],
    [1, 1, 1], {}, {"a": 1}, {"a": 1.0}, {"a": "x"}, {"a": 1, "b": 2}, {"b": "x"}, {"a": [1, True]}, {"a": [1.0, 1]},
]  # fmt: skip


def test_schemas_agree_with_jsonschema():
    jsonschema = pytest.importorskip("jsonschema")
    for schema, value in itertools.product(SCHEMAS, VALUES):
        check_schema(schema)
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert is_valid(value, schema) == expected, (schema, value)
    assert json_schema("", ' {"a": 1}\n', {}, schema=SCHEMAS[0]) == 1
    for text in ('{"a": 1} so there', "{", "NaN", "", "[" * 100_000, '{"a": 1.5}'):
        assert json_schema("", text, {}, schema=SCHEMAS[0]) == 0


def test_user_rewards_run_in_worker_processes(rewards_file):
    settings = {"function": f"{rewards_file}:good", "arguments": {"bonus": 0.5}, "weight": 3}
    with pool(settings, "exact_match", {"function": f"{rewards_file}:process"}) as rewards:
        scores = rewards.score(reward_inputs("42", "seven"))
        assert [row[:2] for row in scores] == [[4.5, 1.0], [10.5, 0.0]]
        pids = {row[2] for row in scores}
        assert len(pids) == 2
        assert os.getpid() not in pids
        assert all(psutil.pid_exists(int(pid)) for pid in pids)
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_workers_use_the_import_path_of_the_run(rewards_file, monkeypatch):
    monkeypatch.syspath_prepend(str(rewards_file.parent))
    with pool("own_rewards:good") as rewards:
        assert rewards.score(reward_inputs("abc")) == [[6.0]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'missing'"),
        ("hangs", "it took more than 1 s"),
        ("dies", "its worker process exited"),
        ("nan", "it returned nan"),
        ("nothing", "it returned None, which is not a number"),
    ],
)
def test_failing_reward_raises_or_scores_on_error(rewards_file, name, reason):
    reward, limit = f"{rewards_file}:{name}", 1.0 if name == "hangs" else 30.0
    with pool(reward, reward_timeout=limit) as rewards, pytest.raises(RunError) as caught:
        rewards.score(reward_inputs("slow"))
    assert f"the reward {name} failed: {reason}" in caught.value.message
    assert "completion: 'slow'" in caught.value.message
    assert "objective.on_error" in caught.value.hint
    with pool(reward, "exact_match", reward_timeout=limit, on_error=-0.5) as rewards:
        assert rewards.score(reward_inputs("slow", "slow", "42"))[:2] == [[-0.5, 0.0], [-0.5, 0.0]]
        assert rewards.pop_failure_count() >= 2
        # the killed workers have been replaced
        assert [row[1] for row in rewards.score(reward_inputs("42", "41", "42"))] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nowhere.py:f", "nowhere.py is not a file"),
        ("no_such_module_at_all:f", "No module named 'no_such_module_at_all'"),
        ("{rewards_file}:god", "has no function 'god' \\(it has: good, raises"),
        ({"function": "{rewards_file}:good", "arguments": {"bonos": 1}}, "unexpected keyword argument 'bonos'"),
        ("regex", "missing a required .*argument: 'pattern'"),
        ({"function": "regex", "arguments": {"pattern": "("}}, "unterminated subpattern"),
        ({"function": "json_schema", "arguments": {"schema": {"minProperties": 1}}}, "'minProperties' is not supported"),
        ({"function": "json_schema", "arguments": {"schema": {"items": {"type": "text"}}}}, "unknown type 'text'"),
    ],
)  # fmt: skip
def test_invalid_reward_is_rejected_before_training(rewards_file, reward, message):
    reward = json.loads(json.dumps(reward).replace("{rewards_file}", str(rewards_file)))
    with pytest.raises(ConfigError, match=message) as caught, pool(reward):
        pass
    assert "objective.rewards" in caught.value.message


def local_reward(prompt, completion, record):
    return 1.0


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([local_reward], "objective.rewards: local_reward is a Python object.*path/to/file.py:function"),
        ([{"function": len, "weight": 2}], "objective.rewards: len is a Python object.*package.module:function"),
        ([float], "objective.rewards: float is a Python object"),
        (["__main__:rw"], "'__main__:rw' cannot be imported.*your script or notebook.*'rewards.py:rw'"),
    ],
)  # fmt: skip
def test_function_objects_in_config_are_rejected_with_hint(rewards, message):
    config = {
        "model": "nano",
        "objective": {"kind": "grpo", "rewards": rewards},
        "data": {"train": "synth:house:8"},
        "run": {"name": "x", "steps": 1, "batch_size": 2},
    }
    with pytest.raises(ConfigError, match=message):
        whet.train(config)


def test_timeout_of_reward_that_holds_the_gil(rewards_file):
    """The worker reads no further calls, and they exceed the capacity of a pipe."""
    calls = [RewardInput("a prompt" * 10_000, text, {}) for text in ("slow", *["fast"] * 20)]
    with pool(f"{rewards_file}:backtracks", reward_timeout=1.0, on_error=-0.5, reward_workers=1) as rewards:
        assert rewards.score(calls) == [[-0.5], *[[1.0]] * 20]


def test_reply_in_time_counts_if_read_late(rewards_file, monkeypatch):
    """As after Ctrl-Z and fg, or on an overloaded machine."""
    select, times_s = selectors.DefaultSelector.select, itertools.count(step=100)

    def select_after_suspension(self, timeout=None):
        clock.now = next(times_s)
        return select(self, 10)

    clock = SimpleNamespace(now=0)
    clock.monotonic = lambda: clock.now
    with pool(f"{rewards_file}:good", on_error=-0.5, reward_workers=1) as rewards:
        monkeypatch.setattr(selectors.DefaultSelector, "select", select_after_suspension)
        monkeypatch.setattr(reward_pool, "time", clock)
        assert rewards.score(reward_inputs("1")) == [[2.0]]


def test_worker_that_cannot_restart_raises(rewards_file):
    with pool(f"{rewards_file}:good") as rewards:
        rewards_file.write_text("import no_such_module_at_all\n")
        with pytest.raises(
            RunError, match="one of 2 worker processes .*No module named 'no_such_module_at_all'"
        ):
            rewards.score(reward_inputs("1"))
        rewards_file.write_text("import os\nos._exit(1)\n")
        with pytest.raises(RunError, match="one of 2 worker processes .*its worker process exited"):
            rewards.score(reward_inputs("1"))
        rewards_file.write_text(REWARDS)
        assert rewards.score(reward_inputs("1", "22")) == [[2.0], [4.0]]


@pytest.mark.parametrize("name", ["hangs", "backtracks"])
def test_workers_end_when_the_run_is_killed(rewards_file, name):
    """Also in the middle of a reward that hangs."""
    script = f"""
import sys
from whet.config.objectives.grpo import GRPOObjective
from whet.rl.rewards.worker_pool import RewardInput, RewardPool
pool = RewardPool(GRPOObjective(rewards=[{f"{rewards_file}:{name}"!r}], reward_workers=2, reward_timeout=50)).__enter__()
print("started", flush=True)
pool.score([RewardInput("", "slow", {{}})] * 2)
"""
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "started\n"
    deadline = time.monotonic() + 20
    while len(workers := psutil.Process(run.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert len(workers) == 2
    assert not alive
    run.stdout.close()


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("text", ["1e999", "-1e999"])
def test_float_overflow_is_invalid_json(text, kind):
    assert json_schema("", text, {}, schema={"type": kind}) == 0
    assert json_schema("", f'{{"a": {text}}}', {}, schema={"properties": {"a": {"type": kind}}}) == 0
