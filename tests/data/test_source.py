"""Sources: files, directories with splits, lists and mixtures; bad records raise an error or are counted."""

import hashlib
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiny import read_records
from whet.config.data import WeightedSource
from whet.data.sources.source import directory_has_split, open_source
from whet.data.synthetic.generators import GENERATORS, generate
from whet.errors import DataError


def write(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts(spec, **settings):
    return [record.fields["text"] for record in open_source(spec, **settings)]


def test_directory_returns_the_requested_split(tmp_path):
    for name, text in (("train.jsonl", "a"), ("validation.json", "b"), ("test.csv", "c"), ("README.md", "d")):
        write(tmp_path / name, text)
    (tmp_path / "test.csv").write_text("text\nc\n")
    assert [texts(str(tmp_path), split=split) for split in ("train", "valid", "test")] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    assert directory_has_split(str(tmp_path), "valid")
    assert not directory_has_split(str(tmp_path / "train.jsonl"), "valid")
    assert open_source(str(tmp_path)).digest() == open_source(str(tmp_path / "train.jsonl")).digest()


def test_digest_of_a_directory_depends_on_the_file_format(tmp_path):
    path = tmp_path / "train.jsonl"
    write(path, "a")
    digests = []
    for name in ("train.txt", "train.json", "train-0-of-1.txt", "train-0-of-1.csv", "train.jsonl"):
        path = path.rename(tmp_path / name)
        digests.append(open_source(str(tmp_path)).digest())
    assert digests[0] == digests[2]
    assert len(set(digests)) == 4


@pytest.mark.parametrize("name", ["valid", "validation", "val", "dev", "eval"])
def test_validation_split_has_several_names(tmp_path, name):
    write(tmp_path / f"{name}.jsonl", "a")
    assert texts(str(tmp_path), split="valid") == ["a"]


def test_split_may_have_several_parts(tmp_path):
    for n, text in ((0, "a"), ("1", "b"), (2, "c")):
        write(tmp_path / f"train-0000{n}-of-00003.jsonl", text)
    assert texts(str(tmp_path)) == ["a", "b", "c"]
    (tmp_path / "train-00001-of-00003.jsonl").unlink()
    with pytest.raises(DataError, match="has 2 of the 3 parts of its train split"):
        open_source(str(tmp_path))


def test_directory_without_split_names_is_one_training_set(tmp_path):
    write(tmp_path / "b.jsonl", "b")
    (tmp_path / "a.txt").write_text("a")
    for name in ("README.txt", ".hidden.jsonl", "dataset_infos.json", "notes.md"):
        (tmp_path / name).write_text("not data")
    assert texts(str(tmp_path)) == ["a", "b"]
    with pytest.raises(DataError, match="has no valid file"):
        open_source(str(tmp_path), split="valid")


def test_glob_reads_matching_files_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.jsonl", "b")
    write(tmp_path / "a.jsonl", "a")
    write(tmp_path / "deep" / "c.jsonl", "c")
    assert texts(f"{tmp_path}/*.jsonl") == ["a", "b"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a", "b", "c"]
    digest = open_source(f"{tmp_path}/*.jsonl").digest()
    assert (
        digest == open_source(f"{tmp_path}/?.jsonl").digest() != open_source(f"{tmp_path}/[a].jsonl").digest()
    )
    with pytest.raises(DataError, match=r"no file matches .*\*\.csv"):
        open_source(f"{tmp_path}/*.csv")
    write(tmp_path / "[x].jsonl", "literal")
    assert texts(f"{tmp_path}/[x].jsonl") == ["literal"]


def test_archive_error_says_to_unpack_it(tmp_path):
    for name in ("a.7z", "a.tar.xz", "a.zip.gz"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match=r"cannot read .*\n.*unpack it"):
            open_source(str(tmp_path / name))


def test_ambiguous_directory_is_rejected(tmp_path):
    write(tmp_path / "data.jsonl", "a")
    write(tmp_path / "valid.jsonl", "a")
    with pytest.raises(
        DataError, match=r"has no train file\n.*it contains data.jsonl, valid.jsonl; add train"
    ):
        open_source(str(tmp_path))
    write(tmp_path / "train.jsonl", "a")
    write(tmp_path / "train.json", "a")
    with pytest.raises(DataError, match=r"has several train files: train.json, train.jsonl"):
        open_source(str(tmp_path))
    (tmp_path / "train.json").rename(tmp_path / "train-00000-of-00001.jsonl")
    with pytest.raises(DataError, match="has several train files"):
        open_source(str(tmp_path))


def test_missing_path_error_suggests_similar_names(tmp_path):
    write(tmp_path / "train.jsonl", "a")
    with pytest.raises(DataError, match=r"trian.jsonl does not exist\n.*did you mean .*train.jsonl\?"):
        open_source(str(tmp_path / "trian.jsonl"))
    with pytest.raises(
        DataError,
        match=r"does not exist\n  hint: relative data paths are resolved against the working directory",
    ):
        open_source(str(tmp_path / "nowhere" / "train.jsonl"))


def test_common_suffix_does_not_make_names_similar(tmp_path):
    for name in ("v12.jsonl", "pref_valid.jsonl", "pref_train.jsonl"):
        write(tmp_path / name, "a")
    with pytest.raises(DataError, match=r"nope.jsonl does not exist\n  hint: relative data paths"):
        open_source(str(tmp_path / "nope.jsonl"))
    with pytest.raises(DataError, match=r"did you mean \S*/v12.jsonl\? relative data paths"):
        open_source(str(tmp_path / "v12.json"))


def test_pipe_is_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="is not a regular file"):
        open_source(str(tmp_path / "a.jsonl"))


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", "a")
    assert texts("~/a.jsonl") == ["a"]


def test_lists_are_concatenated_and_weights_mix(tmp_path):
    one, two = write(tmp_path / "1.jsonl", *"abcd"), write(tmp_path / "2.jsonl", *"xy")
    both = open_source([one, two])
    assert "".join(record.fields["text"] for record in both) == "abcdxy"
    assert both.name == f"{one} + {two}"
    mixed = open_source([WeightedSource(source=one, weight=3), WeightedSource(source=two, weight=1)])
    assert "".join(record.fields["text"] for record in mixed) == "abxcday"  # until both were read completely
    assert mixed.name == f"0.75 {one} + 0.25 {two}"
    assert (
        len({both.digest(), mixed.digest(), open_source([two, one]).digest(), open_source(one).digest()}) == 4
    )
    assert open_source([one, two]).digest() == both.digest()


def test_synthetic_digest_depends_on_spec_and_version():
    digest = open_source("synth:house:400").digest()
    assert (
        digest
        == open_source("synth:house").digest()
        == hashlib.sha256(b"synth:house:400 version 1").hexdigest()
    )
    assert open_source("synth:house:399").digest() != digest


def test_generator_versions_match_their_records():
    """Runs resume if spec and version are equal: a changed generator needs a new version and new digests."""
    digests = {
        name: (
            generator.version,
            hashlib.sha256(json.dumps(generate(f"synth:{name}")).encode()).hexdigest()[:12],
        )
        for name, generator in GENERATORS.items()
        if not name.startswith("python-")  # these and their versions depend on the Python version
    }
    assert digests == {
        "house": ("1", "a9a1d5e2d1e5"),
        "house-valid": ("1", "97aa4a983195"),
        "house-test": ("1", "038f0841ec6f"),
        "house-pairs": ("1", "9aea9c58eb2d"),
        "house-pairs-valid": ("1", "6f657dc18216"),
        "house-styles": ("1", "3ae210d50aa1"),
        "house-styles-valid": ("1", "0540d894f533"),
        "disputes": ("1", "82700bca3961"),
        "disputes-swapped": ("1", "812173976192"),
        "sums": ("1", "152079fbc8e0"),
        "sums-careless": ("1", "8ee9494247e0"),
        "sums-valid": ("1", "f132114725b3"),
        "quality": ("1", "ae61bf0cacfa"),
        "quality-valid": ("1", "a4a0cb27ef71"),
        "regression": ("1", "5e4c6d91615a"),
        "regression-valid": ("1", "1002f0c230f8"),
        "shell-safety": ("3", "4d5ee721caab"),
        "shell-safety-valid": ("3", "2ca2f81e94ab"),
        "shell-faults": ("3", "94fc8adf51ce"),
        "shell-faults-valid": ("3", "a59b65f1d99e"),
    }


def test_bad_records_are_skipped_and_counted_once(tmp_path):
    path = tmp_path / "a.jsonl"
    bad = ['{"text": ', "[]", '{"question": "x"}', '{"text": 3}', '{"messages": []}', "\0", '{"text": NaN}']
    path.write_text("\n".join(['{"text": "a"}', *bad, '{"text": "b"}']))
    with pytest.raises(DataError, match="a.jsonl:2: not valid JSON"):
        read_records(str(path))
    source = open_source(str(path), on_bad="skip")
    for _ in range(2):  # reading again does not count twice
        assert [record.fields["text"] for record in source] == ["a", "b"]
        assert source.skipped.count == len(bad)
    assert [reason.split(": ")[0] for reason in source.skipped.reasons] == [
        f"{path}:{n}" for n in range(2, 9)
    ]
    assert source.skipped.summary().startswith(f"7 bad records skipped ({path}:2: not valid JSON")
    assert source.skipped.summary().endswith("; ...)")
    assert f"{path}:6" in source.skipped.summary()
    assert f"{path}:7" not in source.skipped.summary()
    mixed = open_source(
        [WeightedSource(source=str(path), weight=1), WeightedSource(source="synth:house:50", weight=1)],
        on_bad="skip",
    )
    assert sum(record.record_format == "text" for record in mixed) == 50
    assert mixed.skipped.count == len(bad)


def test_source_with_only_bad_records_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("x\ny\n")
    with pytest.raises(
        DataError, match=r"all 2 records are bad; the first error: .*a.jsonl:1: not valid JSON"
    ):
        list(open_source(str(tmp_path / "a.jsonl"), on_bad="skip"))


def test_explicit_format_is_enforced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}], "text": "a"}\n{"messages": []}\n')
    with pytest.raises(
        DataError,
        match=r"a.jsonl:2: a record with the fields 'messages' lacks the fields that data.format text needs: text",
    ):
        texts(str(path), form="text")
    assert texts(str(path), form="text", on_bad="skip") == ["a"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(
    [
        "messages",
        "conversations",
        "prompt",
        "completion",
        "chosen",
        "rejected",
        "text",
        "input",
        "label",
        "labels",
        "features",
        "target",
        "tools",
        "system",
        "auth_weight",
        "prov_entropy",
        "instruction",
        "output",
    ]
)
roles = st.fixed_dictionaries({}, optional={"role": json_values, "content": json_values, "from": st.text(max_size=5), "value": json_values, "tool_calls": json_values})  # fmt: skip
fuzzed = st.dictionaries(names, json_values | st.lists(roles, max_size=3) | st.text(max_size=8), max_size=5)
lines = (
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | fuzzed.map(lambda value: json.dumps(value).encode())
    | fuzzed.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"))
    | st.just(b'{"text": "good"}')
    | st.just(b'{"text": "' + b"x" * 2**20 + b'"}')
)


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".jsonl.gz", ".jsonl.zst"]
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(lines, max_size=6).map(b"\n".join) | st.binary(max_size=200))
def test_any_content_gives_records_or_errors(tmp_path, suffix, content):
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(content)
    for on_bad in ("error", "skip"):
        try:
            records = list(open_source(str(path), on_bad=on_bad))
        except DataError as error:
            named = str(path) in error.message
        else:
            named = all(record.record_format for record in records)
            json.dumps([record.fields for record in records], allow_nan=False, ensure_ascii=False).encode()
        assert named


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(lines.filter(lambda line: b"\n" not in line and line.strip()), min_size=1, max_size=8))
def test_every_line_is_a_record_or_is_counted(tmp_path, parts):
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + b"\n".join(parts))
    source = open_source(str(path), on_bad="skip")
    records = list(source)
    assert len(records) + source.skipped.count == 1 + len(parts)
    for reason in source.skipped.reasons:
        assert reason.startswith(f"{path}:")
