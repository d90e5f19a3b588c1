"""Files that a library cannot read are invalid input: exit code 2 and one message that names the file."""

import json
import os
import pty
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

import whet
from tiny import run_config
from whet.error_boundary import escape_control_characters, escape_to_one_line
from whet.errors import DataError, RunError

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m"


@pytest.fixture
def directory(tiny_directory, tmp_path):
    return shutil.copytree(tiny_directory, tmp_path / "model")


def edited(path, change):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content)))


def nested(levels):
    return "[" * levels + "]" * levels


TOKENIZERS = {
    "without a model": lambda path: edited(path, lambda t: {k: t[k] for k in t if k != "model"}),
    "bad merges": lambda path: edited(path, lambda t: t | {"model": t["model"] | {"merges": [["a", "nothing"]]}}),
    "merges of numbers": lambda path: edited(path, lambda t: t | {"model": t["model"] | {"merges": [3]}}),
    "a list": lambda path: path.write_text("[1, 2]"),
    "5,000 levels deep": lambda path: path.write_text('{"model": ' + nested(5000) + "}"),
    "a bad regex": lambda path: edited(
        path,
        lambda t: t | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    ),
    "empty": lambda path: path.write_bytes(b""),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_unreadable_tokenizer(cli, directory, name):
    TOKENIZERS[name](directory / "tokenizer.json")
    code, _, err = cli("generate", directory, "hi", "--max-tokens", 1)
    assert code == 2
    err = err[err.index("error: ") :]
    assert err.startswith(f"error: the tokenizer in {directory} cannot be read: ")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("config.json", {"hidden_size": 10**30}),
        ("config.json", {"num_hidden_layers": -1}),
        ("config.json", {"rope_parameters": "x"}),
        ("config.json", {"model_type": "gpt_neox", "dtype": "evil"}),
        ("config.json", {"model_type": "gpt_neox", "hidden_size": 10**30}),
        ("config.json", {"model_type": ["llama"]}),
        ("generation_config.json", ["a list"]),
    ],
    ids=str,
)
def test_unusable_setting(cli, directory, file, keys):
    edited(directory / file, lambda config: config | keys if isinstance(keys, dict) else keys)
    code, _, err = cli("generate", directory, "hi", "--max-tokens", 1)
    assert code == 2, err
    assert str(directory) in err or "config.json" in err
    assert "unexpected" not in err
    assert "Exception raised from" not in err  # torch's C++ frames


def test_tokenizer_hint_names_all_files(cli, directory):
    edited(directory / "config.json", lambda config: config | {"dtype": "evil"})
    code, _, err = cli("generate", directory, "hi", "--max-tokens", 1)
    assert code == 2
    assert " config.json" in err


def test_adapter_with_itself_as_base(cli, directory, tmp_path):
    for name in ("a", "b"):
        whet.save_adapter(whet.attach_lora(whet.load(directory, device="cpu")[0], rank=2), tmp_path / name)
    edited(
        tmp_path / "a" / "adapter_config.json", lambda c: c | {"base_model_name_or_path": str(tmp_path / "b")}
    )
    edited(
        tmp_path / "b" / "adapter_config.json", lambda c: c | {"base_model_name_or_path": str(tmp_path / "a")}
    )
    for command in (
        ["generate", tmp_path / "a", "hi"],
        ["export", tmp_path / "a", "--to", "hf", "--out", tmp_path / "out"],
    ):
        code, _, err = cli(*command)
        assert code == 2
        assert "is its own base model" in err


def test_parquet_with_invalid_column_name(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"], "qqqq": ["b"]}), path)
    path.write_bytes(path.read_bytes().replace(b"qqqq", b"q\xff\xfeq"))
    from whet.data.sources.source import open_source

    with pytest.raises(DataError, match="x.parquet cannot be read"):
        list(open_source(str(path)))


@pytest.fixture
def backtracking(directory):
    """A tokenizer whose expression gives up on many a's, with a panic."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    split = {"type": "Split", "pattern": {"Regex": "^(a+)+$"}, "behavior": "Isolated", "invert": False}
    edited(path, lambda t: t | {"pre_tokenizer": split})
    edited(directory / "tokenizer_config.json", lambda t: t | {"chat_template": None, "eos_token": None})
    (directory / "chat_template.jinja").unlink()
    return directory


def test_failing_tokenizer_regex_prints_one_message(cli, backtracking):
    code, _, err = cli("generate", backtracking, "a" * 60 + "b", "--max-tokens", 1)
    assert code == 2
    err = err[err.index("error: ") :]
    assert err.startswith("error: the tokenizer cannot read this text: PanicException: ")
    assert "retry-limit" in err
    assert len(err.splitlines()) == 2


def test_text_that_fails_to_tokenize_is_a_bad_record(cli, backtracking, tmp_path):
    """In a process of its own: panics are written to the descriptor."""
    data = tmp_path / "x.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["fine", "a" * 60 + "b", "good"]))
    config = tmp_path / "x.yaml"
    config.write_text(
        yaml.safe_dump(run_config(backtracking, tmp_path, data={"train": str(data), "valid": None}))
    )
    done = subprocess.run(
        [sys.executable, "-m", "whet", "train", config],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert f"{data}:2: the tokenizer cannot read this text" in done.stderr
    assert "panicked" not in done.stderr + done.stdout


@pytest.fixture(scope="module")
def finished(tiny_directory, tmp_path_factory):
    return whet.train(run_config(tiny_directory, tmp_path_factory.mktemp("run"))).directory


@pytest.mark.parametrize("step", [None, "x", [1], {}])
def test_resume_ignores_metrics_row_with_invalid_step(finished, tmp_path, step):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "final")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1}) + "\n")
    (run / "checkpoints" / "step-²").mkdir()
    assert whet.resume(run).steps == 4
    assert json.dumps({"step": step, "loss": 1}) in (run / "metrics.superseded.jsonl").read_text()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_hint_names_settings(tiny_directory, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("whet.training.trainer.Trainer.train", fail)
    with pytest.raises(RunError, match="out of memory") as caught:
        whet.train(run_config(tiny_directory, tmp_path))
    for key in ("run.micro_batch_tokens", "run.grad_checkpoint", "data.max_length", "method.kind"):
        assert key in caught.value.hint


def test_cpu_out_of_memory_outside_of_training(cli, directory, monkeypatch):
    def fail(*_, **__):
        torch.empty(2**60)

    monkeypatch.setattr("whet.model_io.load.load", fail)
    code, _, err = cli("generate", directory, "hi")
    assert code == 1
    assert "error: out of memory (" in err
    assert "unexpected" not in err


def test_control_characters_are_escaped():
    assert escape_control_characters("a\x1b[31m\x9b\x7f\r\n\tb\rc") == "a\\x1b[31m\\x9b\\x7f\r\n\tb\\x0dc"
    assert escape_to_one_line("a\nb\tc\x1b") == "a\\nb\\tc\\x1b"


def test_errors_and_names_are_escaped_on_a_terminal(cli, tmp_path, monkeypatch):
    code, _, err = cli("generate", f"{tmp_path}/{ESCAPES}", "hi")
    assert code == 2
    assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m" in err
    assert "\x1b" not in err
    assert "\x9b" not in err


def test_reward_exception_is_escaped(cli, tiny_directory, tmp_path):
    (tmp_path / "own.py").write_text(f"def bad(*_):\n    raise ValueError({ESCAPES + chr(10)!r} 'second')\n")
    config = run_config(
        tiny_directory,
        tmp_path,
        objective={
            "kind": "grpo",
            "rewards": [f"{tmp_path}/own.py:bad"],
            "group_size": 2,
            "max_new_tokens": 4,
        },
        run={"name": f"name {ESCAPES}"},
    )
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=False))
    code, out, err = cli("train", path)
    assert code == 1, err
    assert "\\x1b]0;owned" in err
    assert "\\nsecond" in err
    assert "\x1b" not in out + err


TALKER = """
import sys
from whet.cli import app, generate
import whet.generation.generate, whet.model_io.load
whet.model_io.load.load = lambda name: (None, None)
whet.generation.generate.generate = lambda *a, **k: "says \\x1b[2J\\x9bm\\nand more"
sys.argv = ["whet", "generate", "x", "hi"]
app.main()
"""


def test_generated_text_is_escaped_on_a_terminal_but_not_in_a_pipe():
    done = subprocess.run(
        [sys.executable, "-c", TALKER], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "says \x1b[2J\x9bm\nand more\n"
    reader, writer = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", TALKER], stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    shown = b""
    try:
        while chunk := os.read(reader, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other side has closed it
        pass
    os.close(reader)
    assert process.wait(timeout=120) == 0
    assert shown.decode().splitlines() == ["says \\x1b[2J\\x9bm", "and more"]


WRITES_MEANWHILE = """
import sys, threading
from whet.error_boundary import hide_rust_panics

sys.setswitchinterval(1e-6)
done, failures = threading.Event(), []

def write():
    while not done.is_set():
        try:
            sys.stderr.write("")
        except ValueError as error:
            failures.append(error)

writer = threading.Thread(target=write)
writer.start()
for _ in range(1000):
    with hide_rust_panics():
        pass
done.set()
writer.join()
print(len(failures))
"""


def test_threads_can_write_to_stderr_while_panics_are_hidden():
    done = subprocess.run(
        [sys.executable, "-c", WRITES_MEANWHILE], capture_output=True, text=True, timeout=100, check=True
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
