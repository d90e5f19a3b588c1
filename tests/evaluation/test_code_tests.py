"""pass@k against brute force, and generated programs of several record shapes."""

import itertools
import json
import math
import sys

import pytest

import whet
from whet.cli.app import main
from whet.data.tokens.prompts import Prompt
from whet.data.tokens.tokenize import Question
from whet.errors import ConfigError, DataError
from whet.evaluation import code_tests
from whet.evaluation.code_tests import CodeSettings, _ProgramBuilder, extract_code, pass_at_k
from whet.evaluation.sandbox.sandbox import run_program

COMBINATIONS = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]


@pytest.mark.parametrize(("n", "passed", "k"), COMBINATIONS)
def test_pass_at_k_equals_brute_force(n, passed, k):
    """The share of the subsets of k programs that contain one of those that pass."""
    programs = [index < passed for index in range(n)]
    subsets = list(itertools.combinations(programs, k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "passed", "k"), [(200, 3, 10), (1000, 1, 100), (50, 0, 5), (20, 15, 10)])
def test_pass_at_k_equals_the_product_form(n, passed, k):
    fails = math.prod((n - passed - i) / (n - i) for i in range(k)) if n - passed >= k else 0.0
    assert pass_at_k(n, passed, k) == pytest.approx(1 - fails, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("    return a + b\n", "    return a + b\n"),
    ],
)
def test_code_is_extracted(answer, code):
    assert extract_code(answer) == code


HUMAN_EVAL = {
    "prompt": 'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """Add."""\n',
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}
MBPP = {"prompt": "Add two numbers.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
OWN = {"prompt": "Add two numbers.", "tests": "assert add(1, 2) == 3"}
GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a * b\n"


def build(record, answer):
    return _ProgramBuilder(Prompt(Question([1], record["prompt"], "", "x:1"), record)).build(answer)


@pytest.mark.parametrize(
    ("record", "answer", "passes"),
    [
        (OWN, GOOD, True),
        (OWN, f"Here it is:\n```python\n{GOOD}```", True),
        (OWN, BAD, False),
        (OWN, "I cannot do that.", False),
        (MBPP, GOOD, True),
        (MBPP, BAD, False),
        ({**MBPP, "test_setup_code": "import math\nLIMIT = math.pi"}, GOOD, True),
        (HUMAN_EVAL, "    return a + b\n", True),  # the answer continues the prompt
        (HUMAN_EVAL, "    return a + b\n\n\nprint(undefined)\n", True),
        (HUMAN_EVAL, "    return a * b\n", False),
        (HUMAN_EVAL, f"```python\n{GOOD}```", True),  # the answer repeats the function
        (HUMAN_EVAL, "def add(a, b) -> List[int]:\n    return a + b\n", True),  # with imports of the prompt
        (HUMAN_EVAL, f"```python\n{BAD}```", False),
    ],
)
def test_programs_of_known_shapes(record, answer, passes):
    assert run_program(build(record, answer)).passed == passes


@pytest.mark.parametrize("tests", [None, "", [], [1], {"a": 1}])
def test_records_without_tests_are_rejected(tests):
    with pytest.raises(DataError, match="x:1: the record has no tests"):
        build({"prompt": "p", "tests": tests}, "")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n": 0}, "n must be"),
        ({"n": 3}, "all the same"),
        ({"n": 3, "temperature": 1.0, "k": (4,)}, "k=4"),
        ({"k": (0,)}, "k=0"),
    ],
)
def test_invalid_settings_are_rejected(keys, message):
    with pytest.raises(ConfigError, match=message):
        CodeSettings(**keys)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (OWN, MBPP, HUMAN_EVAL)))
    return path


def test_metrics_are_means_over_problems(tiny, data, monkeypatch):
    """The model is replaced by fixed answers: 2, 0 and 1 of 4 programs pass."""
    answers = [[GOOD, BAD, GOOD, BAD], [BAD] * 4, ["    return a + b\n", "    while True: pass\n", "", BAD]]
    monkeypatch.setattr(code_tests, "_generate", lambda *_: answers)
    metrics = whet.evaluate_code(
        tiny, data, n=4, k=[1, 2], temperature=0.8, timeout=2, allow_code_execution=True
    )
    values = {1: [0.5, 0.0, 0.25], 2: [1 - 1 / 6, 0.0, 1 - 3 / 6]}
    for k, each in values.items():
        mean = sum(each) / 3
        assert metrics[f"pass@{k}"] == pytest.approx(mean)
        stderr = math.sqrt(sum((value - mean) ** 2 for value in each) / 2 / 3)
        assert metrics[f"pass@{k}_stderr"] == pytest.approx(stderr)
    assert (metrics["problems"], metrics["samples"]) == (3, 4)
    assert sum(metrics["failures"].values()) == 9
    assert metrics["failures"]["timeout"] == 1


def test_samples_differ_and_do_not_depend_on_batches(tiny, data, monkeypatch):
    seen = []

    def record(programs, **_):
        seen.append([program.code for program in programs])
        return [code_tests.ProgramResult(False, "error")] * len(programs)

    monkeypatch.setattr(code_tests, "run_programs", record)
    for size in (64, 2):
        monkeypatch.setattr(code_tests, "_BATCH_SIZE", size)
        options = {"n": 3, "temperature": 1.0, "max_tokens": 6, "allow_code_execution": True}
        assert whet.evaluate_code(tiny, data, **options)["pass@3"] == 0
        seen.append("end")
    split = seen.index("end")
    first = [code for part in seen[:split] for code in part]
    second = [code for part in seen[split + 1 : -1] for code in part]
    assert first == second
    assert len(set(first[:3])) > 1


def test_code_is_not_run_without_permission(tiny, data, monkeypatch):
    monkeypatch.setattr(code_tests, "run_programs", lambda *_, **__: pytest.fail("code was run"))
    with pytest.raises(ConfigError, match="runs code that the model writes") as info:
        whet.evaluate_code(tiny, data)
    assert "allow_code_execution" in info.value.hint


def run_command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["whet", "eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as info:
        main()
    output = capsys.readouterr()
    return info.value.code or 0, output.out, output.err


def test_the_command_prints_pass_at_k(tiny_directory, data, monkeypatch, capsys):
    monkeypatch.setattr(code_tests, "_generate", lambda *_: [[GOOD, BAD], [GOOD, GOOD], [BAD, BAD]])
    arguments = [tiny_directory, "--data", data, "--check", "python_tests"]
    options = ["--n", "2", "--temperature", "0.8", "--allow-code-execution"]
    code, out, _ = run_command(monkeypatch, capsys, *arguments, *options)
    assert code == 0
    assert "pass@1 0.5000 ± 0.2887" in out
    assert "pass@2 0.6667" in out
    code, out, _ = run_command(monkeypatch, capsys, *arguments, *options, "--json")
    assert json.loads(out)["pass@1"] == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--check", "python_tests"], "--allow-code-execution"),
        (["--check", "python_tests", "--check", "json_valid", "--allow-code-execution"], "on its own"),
        (["--n", "2"], "--check python_tests"),
        (["--temperature", "0.5"], "--check python_tests"),
    ],
)
def test_wrong_options_are_reported(tiny_directory, data, monkeypatch, capsys, options, message):
    code, _, err = run_command(monkeypatch, capsys, tiny_directory, "--data", data, *options)
    assert code == 2
    assert message in err
