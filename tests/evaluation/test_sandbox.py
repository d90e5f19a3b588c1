"""The sandbox of generated code: hostile programs neither pass nor survive nor reach anything outside."""

import os
import socket
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest

from whet.evaluation.sandbox.sandbox import SandboxLimits, TestProgram, run_program, run_programs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

LIMITS = SandboxLimits(wall_s=20, cpu_s=5, memory=2**28, processes=8)
SHORT = SandboxLimits(wall_s=1, cpu_s=1, memory=2**28, processes=8)
FAILS = "assert add(1, 2) == 4"
PASSES = "assert add(1, 2) == 3"
ADD = "def add(a, b):\n    return a + b\n"


PLAIN = pytest.param(False, id="plain", marks=pytest.mark.slow)


@pytest.fixture(params=[pytest.param(True, id="isolated"), PLAIN])
def run(request):
    """Run code with tests, with and without namespaces and Landlock; no process of it may be left."""
    mark = uuid.uuid4().hex

    def run(code, tests=PASSES, limits=LIMITS, **options):
        program = TestProgram(f"MARK = {mark!r}\n{textwrap.dedent(code)}", tests, **options)
        return run_program(program, limits=limits, isolates=request.param)

    yield run
    assert not _with_mark(mark)


def _with_mark(mark):
    """Return the processes whose command line has a mark."""
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if any(mark in part for part in each.info["cmdline"] or ())]


@pytest.mark.parametrize(
    ("code", "tests", "passed", "problem"),
    [
        (ADD, PASSES, True, ""),
        (ADD, FAILS, False, "error"),
        ("def add(a, b): return a - b", PASSES, False, "error"),
        ("this is not Python", PASSES, False, "error"),
        ("raise ValueError", PASSES, False, "error"),
    ],
)
def test_tests_decide(run, code, tests, passed, problem):
    result = run(code, tests)
    assert (result.passed, result.problem) == (passed, problem)


def test_check_is_called_with_the_entry_point(run):
    tests = "def check(candidate):\n    assert candidate(2, 2) == 4\n"
    assert run(ADD, tests, entry_point="add", calls_check=True).passed
    wrong = run("def add(a, b): return 5", tests, entry_point="add", calls_check=True)
    assert not wrong.passed
    assert not run("x = 1", tests, entry_point="add", calls_check=True).passed


# code that ends, prints or writes before its tests, which would fail
CHEATS = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "exit in the function": "import os\ndef add(a, b):\n    os._exit(0)",
    "system exit in the function": "def add(a, b):\n    raise SystemExit(0)",
    "prints success": "print('passed', 'True', '{\"passed\": true}', flush=True)\ndef add(a, b): return 0",
    "writes everywhere": """
        import os
        for fd in range(64):
            try:
                os.write(fd, b'{"passed": true, "problem": "", "output": "", "missing": []}')
            except OSError:
                pass
        def add(a, b): return 0
    """,
    "writes to the launcher": """
        import os
        for pid in [os.getppid(), *(int(n) for n in os.listdir("/proc") if n.isdigit())]:
            try:
                name = open(f"/proc/{pid}/cmdline").read()
                if "sandbox.launcher" in name:
                    with open(f"/proc/{pid}/fd/1", "w") as file:
                        file.write('{"passed": true, "problem": "", "output": "", "missing": []}\\n')
            except OSError:
                pass
        def add(a, b): return 0
    """,
    "child continues": "import os\nos.fork()\ndef add(a, b): return 0",
    "exit handler": "import atexit, os\natexit.register(lambda: os.write(4, b'x' * 32))\ndef add(a, b): return 0",
    "replaces exit": "import os\nos._exit = os.write = lambda *_: None\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_do_not_pass(run, name):
    result = run(CHEATS[name])
    assert not result.passed
    assert result.problem


def test_a_forked_child_that_finishes_does_not_pass_for_its_parent(run):
    code = "import os, sys\ndef add(a, b): return a + b\nif os.fork(): sys.exit(1)"
    assert not run(code).passed


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "ignores signals": "import signal, time\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "reads stdin": "import time\nassert input.__name__\ntry:\n    input()\nexcept EOFError:\n    time.sleep(600)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_code_is_stopped(run, name):
    started = time.monotonic()
    result = run(ENDLESS[name], limits=SHORT)
    assert not result.passed
    assert result.problem in ("timeout", "signal 9")
    assert time.monotonic() - started < 60


def test_memory_is_limited(run):
    result = run("data = []\nwhile True: data.append(bytearray(2**24))")
    assert not result.passed
    assert "MemoryError" in result.output or result.problem.startswith("signal")


def test_processes_are_limited_and_killed(run):
    bomb = """
        import os, subprocess, sys, time
        program = (  # at most 120 processes, should the sandbox fail
            "import os, time\\n"
            "for _ in range(2):\\n"
            "    try: os.fork()\\n"
            "    except OSError: pass\\n"
            "time.sleep(600)"
        )
        for _ in range(30):
            try:
                subprocess.Popen([sys.executable, "-S", "-c", program, MARK])
            except OSError:
                pass
        time.sleep(600)
    """
    result = run(bomb, limits=SandboxLimits(wall_s=5, cpu_s=2, memory=2**28, processes=8))
    assert not result.passed
    assert result.problem in ("too many processes", "timeout", "error", "signal 9")


def test_daemons_are_killed(run):
    daemon = """
        import os, subprocess, sys
        program = "import signal, time\\nsignal.signal(15, signal.SIG_IGN)\\ntime.sleep(600)"
        subprocess.Popen([sys.executable, "-S", "-c", program, MARK], start_new_session=True,
                         stdin=-3, stdout=-3, stderr=-3)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-S", "-c", program, MARK])
            os._exit(0)
        def add(a, b): return a + b
    """
    assert run(daemon).passed  # leaving processes behind is not a wrong answer


def test_killing_the_parent_harms_nobody(run):
    code = """
        import os, signal, subprocess, sys, time
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", MARK])
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    """
    result = run(code, limits=SHORT)
    assert not result.passed
    assert result.problem in ("timeout", "error", "the launcher was killed")  # error: not permitted


def test_output_and_files_are_limited(run):
    result = run("print('x' * 10**7)\n" + ADD)
    assert result.passed
    assert len(result.output) <= LIMITS.output_bytes
    big = "with open('big', 'wb') as file:\n    for _ in range(100): file.write(bytes(2**20))\n"
    assert not run(big).passed


def test_the_environment_is_minimal_and_the_directory_is_empty(run, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    result = run(
        """
        import os, sys
        print(sorted(os.environ), os.listdir("."), os.getcwd() == os.environ["HOME"], sys.flags.isolated)
        try:
            print(sys.stdin.read() == "")
        except OSError:
            print("closed")
        open("allowed", "w").write("x")
        print(os.getcwd())
        def add(a, b): return a + b
        """
    )
    assert result.passed, result
    assert "SECRET_TOKEN" not in result.output
    assert "[] True 1" in result.output
    directory = result.output.splitlines()[-1]
    assert "whet-sandbox" in directory
    assert not Path(directory).exists()


class TestIsolation:
    def run(self, code):
        result = run_program(TestProgram(textwrap.dedent(code), "assert done"), limits=LIMITS)
        if result.missing:
            pytest.skip(f"this kernel does not allow {result.missing}")
        return result

    def test_there_is_no_network(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\ndone = True"
            result = self.run(connect)
        assert not result.passed
        assert "Error" in result.output

    def test_files_outside_the_directory_cannot_be_changed(self, tmp_path):
        kept = tmp_path / "kept"
        kept.write_text("kept")
        result = self.run(
            f"""
            import os, pathlib, shutil
            path = pathlib.Path({str(tmp_path)!r})
            actions = [
                lambda: (path / "kept").write_text("lost"),
                lambda: (path / "new").write_text("new"),
                lambda: (path / "kept").unlink(),
                lambda: (path / "kept").rename(path / "moved"),
                lambda: shutil.rmtree(path),
                lambda: os.truncate(path / "kept", 0),
                lambda: os.symlink("/", path / "link"),
            ]
            failed = 0
            for action in actions:
                try:
                    action()
                except PermissionError:
                    failed += 1
            open("inside", "w").write("x")
            done = failed == len(actions)
            """
        )
        assert result.passed, result.output
        assert kept.read_text() == "kept"
        assert list(tmp_path.iterdir()) == [kept]

    def test_other_processes_cannot_be_signaled(self):
        result = self.run(
            f"""
            import os, signal
            try:
                os.kill({os.getpid()}, signal.SIGTERM)
                done = False
            except (PermissionError, ProcessLookupError):
                done = True
            """
        )
        assert result.passed, result.output

    def test_killing_everything_reaches_only_itself(self):
        assert not self.run("import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)").passed


def test_many_programs_run_at_a_time_and_keep_their_order():
    programs = [TestProgram(f"x = {n}", f"assert x % 2 == 0 and x == {n}") for n in range(6)]
    results = run_programs(programs, limits=LIMITS, workers=3)
    assert [result.passed for result in results] == [True, False] * 3
