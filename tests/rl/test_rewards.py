"""Rewards: what the built-in ones say, and what becomes of those that raise, hang, die or talk nonsense."""

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
from whet.rl.rewards.json_schema import is_valid, refuse_unknown_keywords
from whet.rl.rewards.worker_pool import Judged, RewardPool

REWARDS = """
import os, re, time
from beside import factor

def good(prompt, completion, record, bonus=0.0):
    print("rewards may print")
    return factor * len(completion) + bonus

def raises(prompt, completion, record):
    raise KeyError("nothing there")

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
def own(tmp_path):
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    (tmp_path / "beside.py").write_text("factor = 2\n")
    return tmp_path / "own_rewards.py"


def pool(*rewards, **settings):
    return RewardPool(GRPOObjective(rewards=list(rewards), **{"reward_workers": 2, **settings}))


def judged(*texts):
    return [Judged("a prompt", text, {"completion": "42"}) for text in texts]


def test_the_config_names_what_is_built_in():
    assert tuple(BUILTIN) == BUILTIN_REWARDS


def test_exact_and_numeric_match_find_the_answer_of_every_shape():
    assert exact_match("", " 42\n", {"completion": "42"}) == 1
    assert exact_match("", "42.", {"completion": "42"}) == 0
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]}
    assert exact_match("", "yes", chat) == 1
    assert exact_match("", "7", {"answer": "7"}) == 1
    assert exact_match("", "7", {"prompt": "p", "gold": 7}, field="gold") == 1
    with pytest.raises(KeyError, match="holds no answer"):
        exact_match("", "7", {"prompt": "p"})
    assert numeric_match("", "so 3 + 4 is 1,007.0!", {"answer": "#### 1007"}) == 1
    assert numeric_match("", "no idea", {"answer": "7"}) == 0
    assert numeric_match("", "3.14", {"answer": "3.14159"}, tolerance=0.01) == 1
    for wanted, given in (("0.05", "0.06"), ("1e-9", "0"), ("-0.004", "0.004"), ("0", "0.001")):
        assert numeric_match("", given, {"answer": wanted}, tolerance=0.1) == 0
        assert numeric_match("", wanted, {"answer": wanted}, tolerance=0.1) == 1
    assert numeric_match("", "0.0101", {"answer": "0.01"}, tolerance=0.02) == 1
    assert numeric_match("", "0.00", {"answer": "0"}) == 1
    with pytest.raises(ValueError, match="holds no number"):
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
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_a_pattern_and_a_length():
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


def test_schemas_mean_what_jsonschema_says():
    jsonschema = pytest.importorskip("jsonschema")
    for schema, value in itertools.product(SCHEMAS, VALUES):
        refuse_unknown_keywords(schema)
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert is_valid(value, schema) == expected, (schema, value)
    assert json_schema("", ' {"a": 1}\n', {}, schema=SCHEMAS[0]) == 1
    for text in ('{"a": 1} so there', "{", "NaN", "", "[" * 100_000, '{"a": 1.5}'):
        assert json_schema("", text, {}, schema=SCHEMAS[0]) == 0


def test_own_rewards_run_in_other_processes_beside_built_in_ones(own):
    settings = {"function": f"{own}:good", "arguments": {"bonus": 0.5}, "weight": 3}
    with pool(settings, "exact_match", {"function": f"{own}:process"}) as rewards:
        found = rewards.score(judged("42", "seven"))
        assert [row[:2] for row in found] == [[4.5, 1.0], [10.5, 0.0]]
        pids = {row[2] for row in found}
        assert len(pids) == 2
        assert os.getpid() not in pids
        assert all(psutil.pid_exists(int(pid)) for pid in pids)
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_a_module_is_found_as_the_run_would_find_it(own, monkeypatch):
    monkeypatch.syspath_prepend(str(own.parent))
    with pool("own_rewards:good") as rewards:
        assert rewards.score(judged("abc")) == [[6.0]]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "KeyError: 'nothing there'"),
        ("hangs", "it took more than 1 s"),
        ("dies", "it ended its process"),
        ("nan", "it returned nan"),
        ("nothing", "it returned None, which is no number"),
    ],
)
def test_a_reward_that_fails_shows_the_completion_or_counts_as_stated(own, name, why):
    reward, limit = f"{own}:{name}", 1.0 if name == "hangs" else 30.0
    with pool(reward, reward_timeout=limit) as rewards, pytest.raises(RunError) as caught:
        rewards.score(judged("slow"))
    assert f"the reward {name} failed: {why}" in caught.value.message
    assert "completion: 'slow'" in caught.value.message
    assert "objective.on_error" in caught.value.hint
    with pool(reward, "exact_match", reward_timeout=limit, on_error=-0.5) as rewards:
        assert rewards.score(judged("slow", "slow", "42"))[:2] == [[-0.5, 0.0], [-0.5, 0.0]]
        assert rewards.take_failures() >= 2
        # the processes that were killed have been replaced
        assert [row[1] for row in rewards.score(judged("42", "41", "42"))] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nowhere.py:f", "nowhere.py is not a file"),
        ("no_such_module_at_all:f", "No module named 'no_such_module_at_all'"),
        ("{own}:god", "has no function 'god' \\(it has: good, raises"),
        ({"function": "{own}:good", "arguments": {"bonos": 1}}, "unexpected keyword argument 'bonos'"),
        ("regex", "missing a required .*argument: 'pattern'"),
        ({"function": "regex", "arguments": {"pattern": "("}}, "unterminated subpattern"),
        ({"function": "json_schema", "arguments": {"schema": {"minProperties": 1}}}, "'minProperties' is not supported"),
        ({"function": "json_schema", "arguments": {"schema": {"items": {"type": "text"}}}}, "no type 'text'"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_be_used_is_refused_before_anything_is_trained(own, reward, message):
    reward = json.loads(json.dumps(reward).replace("{own}", str(own)))
    with pytest.raises(ConfigError, match=message) as caught, pool(reward):
        pass
    assert "objective.rewards" in caught.value.message


def reward_of_this_file(prompt, completion, record):
    return 1.0


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([reward_of_this_file], "objective.rewards: reward_of_this_file is a Python object.*path/to/file.py:function"),
        ([{"function": len, "weight": 2}], "objective.rewards: len is a Python object.*package.module:function"),
        ([float], "objective.rewards: float is a Python object"),
        (["__main__:rw"], "'__main__:rw' cannot be imported.*your script or notebook.*'rewards.py:rw'"),
    ],
)  # fmt: skip
def test_functions_that_no_other_process_can_import_are_refused_with_what_to_write(rewards, message):
    config = {
        "model": "nano",
        "objective": {"kind": "grpo", "rewards": rewards},
        "data": {"train": "synth:house:8"},
        "run": {"name": "x", "steps": 1, "batch_size": 2},
    }
    with pytest.raises(ConfigError, match=message):
        whet.train(config)


def test_a_reward_that_lets_nothing_else_run_has_a_time_limit_too(own):
    """It reads no further calls, which are more than a pipe holds."""
    calls = [Judged("a prompt" * 10_000, text, {}) for text in ("slow", *["fast"] * 20)]
    with pool(f"{own}:backtracks", reward_timeout=1.0, on_error=-0.5, reward_workers=1) as rewards:
        assert rewards.score(calls) == [[-0.5], *[[1.0]] * 20]


def test_an_answer_in_time_counts_also_when_it_is_read_late(own, monkeypatch):
    """As after Ctrl-Z and fg, or on a machine that is too busy."""
    select, stopped_s = selectors.DefaultSelector.select, itertools.count(step=100)

    def select_and_stop(self, timeout=None):
        clock.now = next(stopped_s)
        return select(self, 10)

    clock = SimpleNamespace(now=0)
    clock.monotonic = lambda: clock.now
    with pool(f"{own}:good", on_error=-0.5, reward_workers=1) as rewards:
        monkeypatch.setattr(selectors.DefaultSelector, "select", select_and_stop)
        monkeypatch.setattr(reward_pool, "time", clock)
        assert rewards.score(judged("1")) == [[2.0]]


def test_a_process_that_cannot_be_started_later_on_says_so(own):
    with pool(f"{own}:good") as rewards:
        own.write_text("import no_such_module_at_all\n")
        with pytest.raises(RunError, match="one of 2 processes .*No module named 'no_such_module_at_all'"):
            rewards.score(judged("1"))
        own.write_text("import os\nos._exit(1)\n")
        with pytest.raises(RunError, match="one of 2 processes .*its process ended"):
            rewards.score(judged("1"))
        own.write_text(REWARDS)
        assert rewards.score(judged("1", "22")) == [[2.0], [4.0]]


@pytest.mark.parametrize("name", ["hangs", "backtracks"])
def test_no_process_is_left_behind_when_the_run_is_killed(own, name):
    """Not even one in the middle of a reward that hangs."""
    script = f"""
import sys
from whet.config.objectives.grpo import GRPOObjective
from whet.rl.rewards.worker_pool import Judged, RewardPool
pool = RewardPool(GRPOObjective(rewards=[{f"{own}:{name}"!r}], reward_workers=2, reward_timeout=50)).__enter__()
print("started", flush=True)
pool.score([Judged("", "slow", {{}})] * 2)
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
def test_what_is_too_large_for_a_number_is_no_json(text, kind):
    assert json_schema("", text, {}, schema={"type": kind}) == 0
    assert json_schema("", f'{{"a": {text}}}', {}, schema={"properties": {"a": {"type": kind}}}) == 0
