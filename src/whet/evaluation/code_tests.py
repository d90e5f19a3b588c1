"""pass@k: the chance that at least one of k generated programs passes the tests of its record."""

import ast
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.data.tokens.prompts import Prompt
from whet.errors import ConfigError, DataError
from whet.evaluation.sandbox.sandbox import ProgramResult, SandboxLimits, TestProgram, run_programs
from whet.generation.engine import complete, strip_stop_token
from whet.generation.sampling import Sampling, row_seeds
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens

log = logging.getLogger("whet")

TEST_FIELDS = ("tests", "test", "test_list")  # whet's own, HumanEval's and MBPP's
_SETUP_FIELDS = ("test_setup_code", "test_imports")  # MBPP's
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_CHECK = re.compile(r"^def check\(", re.MULTILINE)
_BATCH_SIZE = 64  # completions decoded as one batch


@dataclass(frozen=True)
class CodeSettings:
    """How programs are generated and run.

    Args:
        n: the number of programs per prompt.
        k: the values of k; None: 1 and n.
        temperature: of sampling; 0 is greedy, for n = 1.
        max_tokens: the largest number of tokens per answer.
        seed: determines the samples.
        limits: the limits of one program.
    """

    n: int = 1
    k: tuple[int, ...] | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int = 0
    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"n must be at least 1, not {self.n}")
        if self.n > 1 and self.temperature <= 0:
            raise ConfigError(
                f"{self.n} greedy answers to one prompt are all the same",
                hint="set a temperature, such as --temperature 0.8, or leave out --n",
            )
        if wrong := [k for k in self.k or () if not 1 <= k <= self.n]:
            raise ConfigError(f"k={wrong[0]} must be between 1 and n={self.n}")

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k to report, without repetitions."""
        return tuple(dict.fromkeys(self.k or (1, self.n)))


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n - passed, k) / C(n, k) (arXiv 2107.03374).

    It is the chance that k programs, drawn from the n without replacement, include one that passes.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def evaluate_code(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    prompts: Sequence[Prompt],
    settings: CodeSettings,
    *,
    samples: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:  # Any: numbers, and a count of each problem
    """Generate programs, run them with the tests of their records, and return pass@k.

    Args:
        model: generates the programs.
        tokenizer: its tokenizer.
        prompts: the prompts, with records that have tests.
        settings: how programs are generated and run.
        samples: the number of prompts to log with a program and its result.
        progress: called with what is done, the number of programs, and their total.

    Returns:
        pass@K and pass@K_stderr for each k, `problems`, `samples` per problem, and `failures`: how often
        programs failed, by reason.

    Raises:
        DataError: a record has no tests.
    """
    builders = [_ProgramBuilder(prompt) for prompt in prompts]  # reports records without tests first
    answers = _generate(model, tokenizer, prompts, settings, progress)
    programs = [
        builder.build(answer) for builder, group in zip(builders, answers, strict=True) for answer in group
    ]
    results: list[ProgramResult] = []
    size = max(1, _BATCH_SIZE // 4)
    for start in range(0, len(programs), size):
        results += run_programs(programs[start : start + size], limits=settings.limits)
        progress("tested programs", len(results), len(programs))
    for index, prompt in enumerate(prompts[:samples]):
        result = results[index * settings.n]
        log.info(
            "  prompt   %s\n  program  %s\n  result   %s\n",
            *(prompt.question.text, programs[index * settings.n].code),
            "passed" if result.passed else f"{result.problem}: {result.output.strip()[-200:]}",
        )
    return _metrics(results, settings)


def _metrics(results: Sequence[ProgramResult], settings: CodeSettings) -> dict[str, Any]:  # Any: as above
    n = settings.n
    passed = [sum(each.passed for each in results[start : start + n]) for start in range(0, len(results), n)]
    metrics: dict[str, Any] = {}
    for k in settings.ks:
        values = [pass_at_k(n, count, k) for count in passed]
        mean = math.fsum(values) / len(values)
        metrics[f"pass@{k}"] = mean
        if len(values) > 1:
            variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
            metrics[f"pass@{k}_stderr"] = math.sqrt(variance / len(values))
    failures = Counter(result.problem for result in results if not result.passed)
    return {**metrics, "problems": len(passed), "samples": n, "failures": dict(failures.most_common())}


def _generate(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    prompts: Sequence[Prompt],
    settings: CodeSettings,
    progress: Callable[[str, int, int], None],
) -> list[list[str]]:
    """Return n answers to each prompt; the samples do not depend on the size of batches."""
    ends = stop_tokens(model, tokenizer)
    rows = [index for index in range(len(prompts)) for _ in range(settings.n)]
    seeds = row_seeds(len(rows), seed=settings.seed)
    answers: list[list[str]] = [[] for _ in prompts]
    for start in range(0, len(rows), _BATCH_SIZE):
        chunk = rows[start : start + _BATCH_SIZE]
        completions = complete(
            model,
            [prompts[index].tokens for index in chunk],
            max_tokens=settings.max_tokens,
            stop_tokens=ends,
            sampling=Sampling(temperature=settings.temperature),
            seeds=seeds[start : start + len(chunk)],
        )
        for index, completion in zip(chunk, completions, strict=True):
            tokens = strip_stop_token(completion, ends)
            answers[index].append(tokenizer.decode(tokens, skip_special_tokens=True))
        progress("generated programs", start + len(chunk), len(rows))
    return answers


class _ProgramBuilder:
    """Builds the programs of one record: its prompt where that is code, the answer, and the tests."""

    def __init__(self, prompt: Prompt) -> None:
        fields, origin = prompt.fields, prompt.question.origin
        self.tests = _tests(fields, origin)
        entry_point = fields.get("entry_point")
        self.entry_point = entry_point if isinstance(entry_point, str) and entry_point else None
        raw = fields.get("prompt")
        # a prompt that is code itself, as in HumanEval: imports and the head of the function
        self.stub = raw if isinstance(raw, str) and self.entry_point and _is_python(raw) else ""

    def build(self, answer: str) -> TestProgram:
        code = extract_code(answer)
        if self.stub and not re.search(rf"^\s*def\s+{re.escape(self.entry_point or '')}\b", code, re.M):
            code = f"{self.stub}{_function_body(code)}"  # the answer continues the prompt
        elif self.stub:
            code = f"{self.stub}\n{code}"  # the later definition counts; the imports may be needed
        calls_check = self.entry_point is not None and _CHECK.search(self.tests) is not None
        return TestProgram(code, self.tests, self.entry_point, calls_check)


def _tests(fields: Mapping[str, Any], origin: str) -> str:  # Any: JSON values
    tests = next((fields[name] for name in TEST_FIELDS if fields.get(name)), None)
    if isinstance(tests, list) and all(isinstance(line, str) for line in tests):
        tests = "\n".join(tests)
    if not isinstance(tests, str) or not tests.strip():
        raise DataError(
            f"{origin}: the record has no tests",
            hint="python_tests needs a field tests: Python code, or a list of assert statements",
        )
    setup = [fields.get(name) for name in _SETUP_FIELDS]
    lines = [line for value in setup for line in (value if isinstance(value, list) else [value]) if line]
    return "\n".join([*map(str, lines), tests])


def extract_code(answer: str) -> str:
    """Return the first fenced block of Python in an answer, else its first fenced block, else the answer."""
    blocks = _FENCE.findall(answer)
    python = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    return next(iter([*python, *(code for _, code in blocks)]), answer)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _function_body(text: str) -> str:
    """Return a continued function up to the first line at the left margin, where another thing starts."""
    lines = text.splitlines(keepends=True)
    if not lines:
        return ""
    rest = [index for index, line in enumerate(lines[1:], start=1) if line.strip() and not line[0].isspace()]
    return "".join(lines[: rest[0]] if rest else lines)
