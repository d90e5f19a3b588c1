"""Archives give the records of the same files unpacked; hostile and damaged ones give an error."""

import contextlib
import gzip
import io
import json
import random
import stat
import tarfile
import zipfile

import pyarrow
import pyarrow.parquet
import pytest

from tiny import read_records
from whet.data.sources import archives
from whet.data.sources.source import open_source
from whet.errors import DataError

ROWS = [{"prompt": f"question {n}, Grüße", "completion": f"answer {n}"} for n in range(12)]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue()


def csv(rows):
    return b"prompt,completion\n" + "".join(f'"{r["prompt"]}",{r["completion"]}\n' for r in rows).encode()


MEMBERS = {
    "parts/part-0.jsonl": jsonl(ROWS[:2]),
    "parts/part-1.csv": csv(ROWS[2:4]),
    "part-2.json": json.dumps(ROWS[4:6]).encode(),
    "part-3.parquet": parquet(ROWS[6:8]),
    "part-4.jsonl.gz": gzip.compress(jsonl(ROWS[8:10])),
    "part-5.jsonl.zst": pyarrow.compress(jsonl(ROWS[10:11]), codec="zstd", asbytes=True),
    "part-6.json": json.dumps(ROWS[11]).encode(),
}
OTHER = {
    "README.md": b"#",
    "LICENSE": b"x",
    ".hidden.jsonl": b"{",
    "__MACOSX/._part.jsonl": b"\0",
    "image.png": b"\x89",
    "dataset_info.json": b"{}",
}
ORIGINS = [
    "parts/part-0.jsonl:1", "parts/part-0.jsonl:2", "parts/part-1.csv:2", "parts/part-1.csv:3", "part-2.json#1", "part-2.json#2",
    "part-3.parquet#1", "part-3.parquet#2", "part-4.jsonl.gz:1", "part-4.jsonl.gz:2", "part-5.jsonl.zst:1", "part-6.json#1",
]  # fmt: skip


def write_tar(path, members, infos=(), mode="w"):
    with tarfile.open(path, mode) as archive:
        for info in infos:
            archive.addfile(info)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_tar_zst(path, members, infos=()):
    write_tar(path.with_suffix(""), members, infos)
    path.write_bytes(pyarrow.compress(path.with_suffix("").read_bytes(), codec="zstd", asbytes=True))
    return path


def write_zip(path, members, infos=()):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("parts")
        for info in infos:
            archive.writestr(info, b"x")
        for name, content in members.items():
            archive.writestr(name, content)
    return path


WRITERS = {
    ".tar": write_tar,
    ".tar.gz": lambda path, members, infos=(): write_tar(path, members, infos, "w:gz"),
    ".tgz": lambda path, members, infos=(): write_tar(path, members, infos, "w:gz"),
    ".tar.zst": write_tar_zst,
    ".zip": write_zip,
}


@pytest.fixture(params=WRITERS)
def write(request, tmp_path):
    """Writes an archive of each kind."""
    return lambda members, infos=(): WRITERS[request.param](
        tmp_path / f"shards{request.param}", members, infos
    )


def rows_of(spec, **options):
    return [
        {name: record.fields[name] for name in ("prompt", "completion")}
        for record in open_source(str(spec), **options)
    ]


def test_records_and_origins_equal_those_of_the_files(write):
    path = write({**OTHER, **MEMBERS})
    source = open_source(str(path))
    for _ in range(2):  # every pass reads from the start
        records = list(source)
        assert [record.origin for record in records] == [f"{path}/{origin}" for origin in ORIGINS]
        assert rows_of(path) == ROWS
    digest = source.digest()
    assert digest == open_source(str(path)).digest() != open_source(str(path), split="test").digest()
    path.unlink()
    write({**MEMBERS, "part-6.json": b'{"text": "x"}'})
    assert open_source(str(path)).digest() != digest


def test_columns_and_text(write):
    path = write({"a.csv": b"question,answer\n1,2\n", "b.jsonl": b'{"question": "3", "answer": "4"}\n'})
    columns = {"prompt": "question", "completion": "answer"}
    assert rows_of(path, columns=columns) == [
        {"prompt": "1", "completion": "2"},
        {"prompt": "3", "completion": "4"},
    ]
    path.unlink()
    path = write({"a.txt": b"one text\nof two lines\n"})
    assert [record.fields for record in read_records(str(path))] == [{"text": "one text\nof two lines\n"}]


def test_shards_of_a_pattern(tmp_path):
    """As in WebDataset: many archives, each with one small file per record."""
    for shard in range(3):
        samples = {f"{n:06}.json": json.dumps(ROWS[4 * shard + n]).encode() for n in range(4)}
        write_tar(tmp_path / f"shard-{shard:03}.tar", samples)
    assert rows_of(tmp_path / "shard-*.tar") == ROWS
    assert next(iter(open_source(f"{tmp_path}/*.tar"))).origin == f"{tmp_path}/shard-000.tar/000000.json#1"


def test_splits_of_an_archive_are_kept_apart(write, tmp_path):
    members = {
        "set/train-00000-of-00002.jsonl": jsonl(ROWS[:2]),
        "set/train-00001-of-00002.jsonl": jsonl(ROWS[2:4]),
        "set/test/a.jsonl": jsonl(ROWS[4:5]),
        "set/notes.txt": b"neither",
    }
    path = write(members)
    assert rows_of(path) == ROWS[:4]
    assert rows_of(path, split="test") == ROWS[4:5]
    with pytest.raises(DataError, match=r"has no valid files\n.*test, train"):
        list(open_source(str(path), split="valid"))
    with pytest.raises(DataError, match="has files of several splits: test, train"):
        list(open_source(f"{tmp_path}/shard[s]*{path.suffix}"))


# --- hostile and damaged archives


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zip_link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    ("infos", "words"),
    [
        ([link("a.jsonl", "/etc/passwd")], "a.jsonl is a link or a device"),
        ([link("a.jsonl", "b.jsonl", tarfile.LNKTYPE)], "a.jsonl is a link or a device"),
        ([link("a.jsonl", "", tarfile.CHRTYPE)], "a.jsonl is a link or a device"),
        ([link("a.jsonl", "", tarfile.FIFOTYPE)], "a.jsonl is a link or a device"),
        ([tarfile.TarInfo("../a.jsonl")], "outside of the archive"),
        ([tarfile.TarInfo("/etc/a.jsonl")], "outside of the archive"),
        ([tarfile.TarInfo("b/../../a.jsonl")], "outside of the archive"),
        ([tarfile.TarInfo("inner.tar.gz")], "archive inside an archive"),
        ([tarfile.TarInfo("x.jsonl"), tarfile.TarInfo("x.jsonl")], "two files named x.jsonl"),
    ],
)
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_hostile_tar(tmp_path, infos, words, suffix):
    path = WRITERS[suffix](tmp_path / f"a{suffix}", MEMBERS, infos)
    with pytest.raises(DataError, match=words):
        list(open_source(str(path), on_bad="skip"))


@pytest.mark.parametrize(
    ("infos", "words"),
    [
        ([zip_link("a.jsonl")], "a.jsonl is a link or a device"),
        ([zipfile.ZipInfo("../a.jsonl")], "outside of the archive"),
        ([zipfile.ZipInfo("..\\a.jsonl")], "outside of the archive"),
        ([zipfile.ZipInfo("C:/a.jsonl")], "outside of the archive"),
        ([zipfile.ZipInfo("/a.jsonl")], "outside of the archive"),
        ([zipfile.ZipInfo("inner.zip")], "archive inside an archive"),
    ],
)
def test_hostile_zip(tmp_path, infos, words):
    path = write_zip(tmp_path / "a.zip", MEMBERS, infos)
    with pytest.raises(DataError, match=words):
        list(open_source(str(path), on_bad="skip"))


def test_encrypted_zip(tmp_path):
    content = bytearray(write_zip(tmp_path / "a.zip", {"a.jsonl": jsonl(ROWS)}).read_bytes())
    for mark, offset in (
        (b"PK\x03\x04", 6),
        (b"PK\x01\x02", 8),
    ):  # the flags of the last local and central header
        content[content.rindex(mark) + offset] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match="a.jsonl is encrypted"):
        list(open_source(str(tmp_path / "a.zip")))


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz", ".tar.zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz"])
def test_decompression_is_limited(tmp_path, suffix, name, monkeypatch):
    """A small archive with a large content ends with an error, also if bad records are skipped."""
    monkeypatch.setattr(archives, "MIN_LIMIT", 2**16)
    content = b'{"text": "%s"}\n' % (b"a" * 1000) * 6000
    content = gzip.compress(content) if name.endswith(".gz") else content
    path = WRITERS[suffix](tmp_path / f"bomb{suffix}", {name: content})
    assert path.stat().st_size < len(content) / 250 or name.endswith(".gz")
    with pytest.raises(DataError, match="cannot be read: the archive decompresses to more than"):
        for _ in open_source(str(path), on_bad="skip"):
            pass


def test_large_members_of_formats_that_need_several_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_BUFFERED", 100)
    path = write_zip(tmp_path / "a.zip", {"a.json": json.dumps(ROWS).encode()})
    with pytest.raises(DataError, match=r"a.json has more than 100 bytes"):
        list(open_source(str(path)))


def test_truncated_and_damaged_archives(write):
    path = write(MEMBERS)
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        if rng.random() < 0.3:
            damaged = damaged[: rng.randrange(len(damaged))]
        for _ in range(rng.randint(0, 4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):  # any other exception fails the test
            list(open_source(str(path), on_bad="skip"))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="shards"):
        list(open_source(str(path), on_bad="skip"))


def test_tar_that_ends_between_two_files(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.jsonl": jsonl(ROWS[:1]), "b.jsonl": jsonl(ROWS[1:2])})
    path.write_bytes(path.read_bytes()[:1024])  # header and content of the first file
    with pytest.raises(DataError, match="is truncated"):
        list(open_source(str(path)))


def test_archives_without_data(write):
    path = write({"README.md": b"x", "image.png": b"y"})
    with pytest.raises(DataError, match=r"contains no data files\n.*it holds README.md, image.png"):
        list(open_source(str(path)))


def test_bad_records_in_an_archive_name_the_member(write):
    path = write({"a.jsonl": b'{"text": "x"}\nnot json\n'})
    with pytest.raises(DataError, match=r"shards\S*/a.jsonl:2: not valid JSON"):
        list(open_source(str(path)))
    source = open_source(str(path), on_bad="skip")
    assert len(list(source)) == 1
    assert source.skipped.count == 1
