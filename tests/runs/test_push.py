"""whet push against a small hub on this machine: what is uploaded, what is refused, and how it fails."""

import base64
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

import whet
from tiny import run_config
from whet.cli.app import app
from whet.errors import ConfigError, ModelError, RunError

REPOSITORY = "alice/model"


class FakeHub(ThreadingHTTPServer):
    """The requests of create_repo and create_commit; large files are those of more than 10,000 bytes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}  # committed, by name
        self.stored = {}  # uploaded large files, by hash
        self.requests = []
        self.failures = {}  # part of a path: a status, or "drop" to close the connection
        self.is_private = None  # None: there is no repository

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.respond()

    def do_POST(self):
        self.respond()

    def do_PUT(self):
        self.respond()

    def respond(self):
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append((self.command, self.path, self.headers.get("Authorization")))
        failure = next((value for part, value in hub.failures.items() if part in self.path), None)
        if failure == "drop":
            self.close_connection = True
            return
        status, answer = (failure, {"error": "no"}) if failure else (200, self.answer(hub, body))
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "application/vnd.git-lfs+json" if "lfs" in self.path else "application/json"
        )
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, hub, body):
        if self.path == "/api/repos/create":
            if hub.is_private is None:
                hub.is_private = json.loads(body).get("visibility") == "private"
            return {"url": f"{hub.url}/{REPOSITORY}"}
        if self.path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in self.path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] > 10_000 else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return {"files": files}
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/store/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        if self.path.startswith("/store/"):
            hub.stored[self.path.removeprefix("/store/")] = body
            return {}
        if "/commit/" in self.path:
            for line in body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.stored[value["oid"]]
            return {"commitUrl": f"{hub.url}/{REPOSITORY}/commit/1", "commitOid": "1"}
        return {"id": REPOSITORY, "private": hub.is_private, "siblings": []}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for name in ("WHET_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def trained(tiny_directory, tmp_path_factory):
    config = run_config(tiny_directory, tmp_path_factory.mktemp("push"), method={"kind": "full"})
    return whet.train(config, verbose=0).directory


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


# --- uploads


def test_final_model_is_uploaded_in_one_commit(hub, run):
    result = whet.push(run, REPOSITORY)
    assert result.url == f"{hub.url}/{REPOSITORY}/commit/1"
    assert hub.is_private is False
    assert hub.files.keys() == {path.name for path in (run / "final").iterdir()}
    for name, content in hub.files.items():
        if name != "README.md":
            assert (
                hashlib.sha256(content).digest()
                == hashlib.sha256((run / "final" / name).read_bytes()).digest()
            )
    assert len(hub.stored) == 1, "the weights are a large file"
    card = hub.files["README.md"].decode()
    assert f'name = "{REPOSITORY}"' in card
    assert "path/to" not in card
    ModelCard(card)
    assert sum(path.endswith("/commit/main") for _, path, _ in hub.requests) == 1
    assert {token for _, path, token in hub.requests if path.startswith("/api/models")} == {"Bearer hf_test"}


def test_export_and_gguf_file_are_uploaded(hub, run):
    whet.export(run, to="hf")
    whet.push(run, REPOSITORY, what="export/hf", private=True)
    assert hub.is_private is True
    assert "model.safetensors" in hub.files
    hub.files.clear()
    path = whet.export(run, to="gguf")
    whet.push(run, REPOSITORY, what=path.relative_to(run))
    assert hub.files.keys() == {path.name}


def test_adapter_of_a_local_base_needs_the_name_of_its_base(hub, tiny_directory, tmp_path):
    run = whet.train(run_config(tiny_directory, tmp_path), verbose=0).directory
    with pytest.raises(ModelError, match="names its base model by a path on this machine") as error:
        whet.push(run, REPOSITORY)
    assert "--base-model" in error.value.hint
    assert hub.requests == []
    whet.push(run, REPOSITORY, base_model="org/base")
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.base_model == "org/base"
    assert 'from_pretrained("org/base")' in card.text
    assert not any(str(tmp_path).encode() in content for content in hub.files.values())
    stored = json.loads((run / "final" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(tiny_directory), "the local file is unchanged"


def test_paths_in_json_files_are_not_uploaded(hub, run):
    path = run / "final" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "/home/bob/models/base"}))
    (run / "final" / "trained_on.json").write_text('{"directory": "/home/bob/models/base"}')
    result = whet.push(run, REPOSITORY)
    assert json.loads(hub.files["config.json"])["_name_or_path"] == "base"
    assert "trained_on.json" not in hub.files
    assert result.left_out == ["trained_on.json"]


# --- dry run


def test_dry_run_lists_files_and_uses_no_network(hub, run, monkeypatch):
    monkeypatch.setenv("WHET_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN")
    completed = CliRunner().invoke(app, ["push", str(run), REPOSITORY, "--dry-run"], catch_exceptions=False)
    assert completed.exit_code == 0
    final = sorted((run / "final").iterdir())
    lines = completed.stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(final)]] == [path.name for path in final]
    plan = whet.push(run, REPOSITORY, dry_run=True)
    assert {file.name: file.size for file in plan.files if file.content is None} == {
        path.name: path.stat().st_size for path in final if path.name != "README.md"
    }
    assert plan.size == sum(file.size for file in plan.files)
    assert lines[len(final)].startswith(f"{len(final)} files")
    assert "nothing was uploaded" in lines[-1]
    assert hub.requests == []


# --- refusals


def test_offline_refuses(hub, run, monkeypatch):
    monkeypatch.setenv("WHET_OFFLINE", "1")
    with pytest.raises(ConfigError, match="WHET_OFFLINE"):
        whet.push(run, REPOSITORY)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.safetensors", "not part of a model: optimizer.safetensors"),
        ("weights.safetensors", "not part of a model: weights.safetensors"),
        ("train.jsonl", "not part of a model: train.jsonl"),
        ("tokens.bin", "not part of a model: tokens.bin"),
        ("credentials.json", "not part of a model: credentials.json"),
        ("modeling.py", "not part of a model: modeling.py"),
        ("checkpoints/", "is a directory"),
        ("model-00001-of-00002.safetensors@", "is a link"),
    ],
)
def test_other_files_are_refused(hub, run, tmp_path, name, message):
    path = run / "final" / name.rstrip("/@")
    if name.endswith("/"):
        path.mkdir()
    elif name.endswith("@"):
        (tmp_path / "secret").write_text("secret")
        path.symlink_to(tmp_path / "secret")
    else:
        path.write_text("{}")
    with pytest.raises(ModelError, match=message):
        whet.push(run, REPOSITORY)
    assert hub.requests == []


def test_hidden_files_are_left_out(hub, run):
    (run / "final" / ".env").write_text("HF_TOKEN=hf_secret")
    assert whet.push(run, REPOSITORY).left_out == [".env"]
    assert ".env" not in hub.files


def test_other_folders_are_refused(hub, run, tmp_path):
    checkpoint = next((run / "checkpoints").iterdir())
    (tmp_path / "link").symlink_to(run / "final")
    (tmp_path / "empty").mkdir()
    for target, what, message in (
        (checkpoint, "final", "is a checkpoint"),
        (run, checkpoint.relative_to(run), "is a checkpoint"),
        (run, "checkpoints", "is a directory"),
        (run, ".", "is a directory"),
        (run, "../link", "is a link"),
        (tmp_path / "link", "final", "is a link"),
        (tmp_path / "empty", "final", "contains no weights"),
        (run, "export/hf", "does not exist"),
        (tmp_path / "nowhere", "final", "does not exist"),
        (run, "config.yaml", "not part of a model"),
    ):
        with pytest.raises(ModelError, match=message):
            whet.push(target, REPOSITORY, what=what)
    for repository in ("model", "a/b/c", "../x", "a/..", ""):
        with pytest.raises(ConfigError, match="is not a repository"):
            whet.push(run, repository)
    with pytest.raises(ConfigError, match="--what does not apply"):
        whet.push(run / "final", REPOSITORY, what="export/hf")
    assert hub.requests == []


def test_private_upload_to_a_public_repository_is_refused(hub, run):
    hub.is_private = False
    with pytest.raises(RunError, match="exists and is public, so nothing was uploaded"):
        whet.push(run, REPOSITORY, private=True)
    assert hub.files == {}


# --- failures


def test_no_token(hub, run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RunError, match="no token") as error:
        whet.push(run, REPOSITORY)
    assert "hf auth login" in error.value.hint
    assert hub.requests == []


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"/api/repos/create": 401, "/api/models": 401}, "rejected the token"),
        ({"/api/repos/create": 403, "/api/models": 404}, "no write access to alice/model"),
        ({"/preupload/": 403}, "no write access to alice/model"),
        ({"/commit/": 500}, "answered 500"),
        ({"/commit/": "drop"}, "was interrupted"),
        ({"/store/": 403}, "no write access"),
    ],
)
def test_failed_uploads_commit_nothing(hub, run, failures, message):
    hub.failures = failures
    with pytest.raises(RunError, match=message) as error:
        whet.push(run, REPOSITORY)
    assert error.value.hint
    assert hub.files == {}


def test_unreachable_hub(hub, run, monkeypatch):
    hub.server_close()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(RunError, match=r"127\.0\.0\.1:1 cannot be reached"):
        whet.push(run, REPOSITORY)


def test_command_reports_errors_in_one_line(hub, run):
    hub.failures = {"/api/repos/create": 401, "/api/models": 401}
    completed = CliRunner().invoke(app, ["push", str(run), REPOSITORY])
    assert isinstance(completed.exception, RunError)
