"""Remote files through fsspec: memory, file and local web servers; formats, positions, globs, credentials."""

import gzip
import http.server
import io
import json
import logging
import threading
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

import whet
from tiny import run_config
from whet.data.sources import remote_files
from whet.data.sources.record_stream import RecordStream
from whet.data.sources.source import open_source
from whet.errors import DataError

TEXTS = [f"text {number} " + "x" * (number % 7) for number in range(50)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet_bytes():
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": TEXTS}), file, row_group_size=9)
    return file.getvalue()


def zstd_bytes():
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(LINES)
    return sink.getvalue().to_pybytes()


FILES = {
    "a.jsonl": lambda: LINES,
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.jsonl.zst": zstd_bytes,
    "a.csv": lambda: "\r\n".join(["text", *TEXTS, ""]).encode(),
    "a.parquet": parquet_bytes,
}


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def list_directory(self, path):
        names = "".join(f'<a href="{each.name}">{each.name}</a>' for each in sorted(Path(path).iterdir()))
        self.send_response(200)
        self.end_headers()
        return io.BytesIO(names.encode())


class _RangeHandler(_Handler):
    """Answers range requests, and fails those that the server is told to fail."""

    def do_GET(self):
        requested, path = self.headers.get("Range"), Path(self.translate_path(self.path))
        if requested is None or not path.is_file():
            super().do_GET()
            return
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
            return
        content = path.read_bytes()
        first, _, last = requested.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content) - 1) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Return a function that starts a local web server of tmp_path/web and returns its address and itself."""
    monkeypatch.delenv("WHET_OFFLINE")
    directory = tmp_path / "web"
    directory.mkdir()
    servers = []

    def start(handler):
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *arguments: handler(*arguments, directory=str(directory))
        )
        server.failures = 0
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}", server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def memory(tmp_path):
    """An empty directory of fsspec's memory file system: its address, and a function that writes a file."""
    system = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}"
    yield f"memory:/{root}", lambda name, content: system.pipe(f"{root}/{name}", content)
    system.rm(root, recursive=True) if system.exists(root) else None


def read(source):
    return [record.fields["text"] for record in source]


def check_all_positions(spec):
    assert read(open_source(spec)) == TEXTS
    for start in (0, 8, 9, 30, 49):
        stream = RecordStream(open_source(spec), seed=None, total_steps=1)
        read(stream.read(start, step=0))
        state = json.loads(json.dumps(stream.state()))
        stream.close()
        resumed = RecordStream(open_source(spec), seed=None, total_steps=1)
        resumed.seek(state)
        assert read(resumed.read(100, step=0)) == TEXTS[start:]
        resumed.close()


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_from_every_kind_of_address(name, memory, serve, tmp_path):
    address, write = memory
    write(name, FILES[name]())
    (tmp_path / "web" / name).write_bytes(FILES[name]())
    check_all_positions(f"{address}/{name}")
    check_all_positions((tmp_path / "web" / name).as_uri())
    check_all_positions(f"{serve(_RangeHandler)[0]}/{name}")
    check_all_positions(f"{serve(_Handler)[0]}/{name}")  # does not answer range requests


def test_globs_match_remote_files(memory, serve, tmp_path):
    address, write = memory
    for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl"):
        write(name, LINES)
        (tmp_path / "web" / Path(name).name).write_bytes(LINES)
    assert len(read(open_source(f"{address}/*.jsonl"))) == 2 * len(TEXTS)
    assert len(read(open_source(f"{address}/**/*.jsonl"))) == 3 * len(TEXTS)
    assert len(read(open_source(f"{serve(_RangeHandler)[0]}/*.jsonl"))) == 3 * len(TEXTS)
    assert len(read(open_source(f"file://{tmp_path}/web/*.jsonl"))) == 3 * len(TEXTS)
    with pytest.raises(DataError, match="no file matches memory://"):
        open_source(f"{address}/*.csv")


def test_origins_are_addresses_and_lines(memory):
    address, write = memory
    write("a.jsonl", LINES)
    assert next(iter(open_source(f"{address}/a.jsonl"))).origin == f"{address}/a.jsonl:1"


def test_an_unreachable_server_is_not_a_missing_file(serve):
    address, server = serve(_RangeHandler)
    with pytest.raises(DataError, match=r"a\.jsonl does not exist"):
        next(iter(open_source(f"{address}/a.jsonl")))
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"b\.jsonl cannot be read: Client\w*Error"):
        next(iter(open_source(f"{address}/b.jsonl")))


def test_identity_is_size_and_version_without_a_download(memory, serve, tmp_path):
    address, write = memory
    write("a.jsonl", LINES)
    before = open_source(f"{address}/a.jsonl").digest()
    assert open_source(f"{address}/a.jsonl").digest() == before
    write("a.jsonl", LINES[:-1])
    assert open_source(f"{address}/a.jsonl").digest() != before
    web, server = serve(_RangeHandler)
    (tmp_path / "web" / "a.jsonl").write_bytes(LINES)
    server.failures = 10**6  # every request for content fails
    assert open_source(f"{web}/a.jsonl").identity()


def test_a_failing_connection_is_tried_again(serve, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(remote_files, "_PAUSE_S", 0.0)
    (tmp_path / "web" / "a.jsonl").write_bytes(LINES)
    web, server = serve(_RangeHandler)
    server.failures = 3
    with caplog.at_level(logging.WARNING):
        assert read(open_source(f"{web}/a.jsonl")) == TEXTS
    assert caplog.text.count("reading again") == 3
    server.failures = 4
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read: ClientResponseError: 503"):
        read(open_source(f"{web}/a.jsonl"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("memory://missing/a.jsonl", "memory://missing/a.jsonl does not exist"),
        ("memory://missing/a", "cannot read files without a suffix"),
        ("ftp://host/a.jsonl", r"ftp:// is not a source.*\n.*supported: s3://"),
    ],
)
def test_wrong_addresses(spec, message):
    with pytest.raises(DataError, match=message):
        read(open_source(spec))


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_missing_package_names_the_extra(scheme, monkeypatch):
    monkeypatch.delenv("WHET_OFFLINE")
    monkeypatch.setitem(__import__("sys").modules, remote_files.SCHEMES[scheme], None)
    with pytest.raises(
        DataError, match=rf'{scheme}://b/a.jsonl needs \w+\n  hint: pip install "whet\[remote\]"'
    ):
        open_source(f"{scheme}://b/a.jsonl")


def test_offline_machines_do_not_open_connections(monkeypatch):
    monkeypatch.setenv("WHET_OFFLINE", "1")
    with pytest.raises(DataError, match="WHET_OFFLINE is set"):
        open_source("https://example.com/a.jsonl")


@pytest.mark.parametrize(
    "address",
    [
        "https://user:hunter2@example.com/a.jsonl",
        "https://hunter2@example.com/a.jsonl",
        "s3://KEY:hunter2@bucket/a.jsonl",
        "https://example.com/a.jsonl?X-Amz-Signature=hunter2",
        "https://account.blob.core.windows.net/c/a.jsonl?sv=1&sig=hunter2",
        "https://example.com/a.jsonl?access_token=hunter2",
    ],
)
def test_credentials_in_addresses_are_refused_without_repeating_them(
    address, tiny_directory, tmp_path, caplog, capsys
):
    config = run_config(tiny_directory, tmp_path, data={"train": address, "stream": True, "max_length": 100})
    for _ in range(2):
        with pytest.raises(DataError, match="contains credentials") as raised:
            whet.train(config)
        config["data"]["stream"] = False
    output = capsys.readouterr()
    assert "hunter2" not in f"{raised.value}{caplog.text}{output.out}{output.err}"
    assert not list(tmp_path.rglob("config.yaml"))


def test_azure_containers_and_plain_queries_are_not_credentials():
    for address in ("abfss://container@account.dfs.core.windows.net/a.jsonl", "https://h/a.jsonl?download=1"):
        assert remote_files.check_address(address)


@pytest.mark.parametrize("stream", [True, False])
def test_runs_read_remote_files(stream, tiny_directory, tmp_path, memory):
    address, write = memory
    write("a.jsonl", LINES)
    write("b.parquet", parquet_bytes())
    data = {"train": f"{address}/*", "valid": None, "max_length": 64, "stream": stream and {"buffer": 20}}
    result = whet.train(run_config(tiny_directory, tmp_path, data=data), verbose=0)
    assert result.steps == 4
