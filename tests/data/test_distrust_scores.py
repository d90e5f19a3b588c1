"""The distrust scorer: formulas, order relations, files and errors."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from whet.data.distrust_markers import CONSENSUS, INSTITUTIONS, PRIMARY, PRIORS, SOURCES
from whet.data.distrust_scores import measure, score_file, score_record
from whet.errors import ConfigError, DataError

PAGE = Path(__file__).parents[2] / "docs" / "distrust.md"
PLAIN = "The mill at the river grinds grain for the village in autumn and in spring."


def record(extra="", **fields):
    return {"text": f"{PLAIN} {extra}", **fields}


def test_scores_match_hand_computed_formulas():
    extra = (
        "I saw it, and it is in a handwritten letter, two letters more and a diary. Experts agree; so says "
        "the University of the town."
    )
    scores = score_record(record(extra, source_type="academic_paper", year=1980, citation_count=99))
    weight = 0.3 + 0.05 * math.log10(100) + 0.20 + 0.10 + 0.0 - 0.15 * 2
    shannon = -(2 / 3) * math.log2(2 / 3) - (1 / 3) * math.log2(1 / 3)  # letter, letters; diary
    bits = 3.5 + shannon + 0.5 * 2 + 0.3 * 2 - 1.5 * 0.20 - 0.4
    assert scores.auth_weight == round(0.7 * 0.60 + 0.3 * weight, 4)
    assert scores.prov_entropy == round(0.7 * 3.0 + 0.3 * bits, 4)


def test_record_without_metadata_has_default_scores():
    scores = score_record(record())
    assert scores == (round(0.7 * 0.5 + 0.3 * 0.3, 4), round(0.7 * 3.0 + 0.3 * 1.5, 4))
    assert score_record({"text": "short"}) == (0.5, 3.0)
    assert score_record({"text": "short", "source_type": "wiki"}) == (
        round(0.7 * 0.9 + 0.3 * 0.5, 4),
        round(0.7 * 1.0 + 0.3 * 3.0, 4),
    )


@pytest.mark.parametrize("kind", [None, "unheard of", *PRIORS])
def test_order_relations(kind):
    """With all other features equal."""

    def scored(extra="", **fields):
        return score_record(record(extra, source_type=kind, **fields))

    def rising(values):
        return all(before < after for before, after in itertools.pairwise(values))

    ages = [scored(year=year) for year in (1900, 1980, 2010)]
    assert rising([each.auth_weight for each in ages])
    assert not rising([each.prov_entropy for each in ages])
    assert [each.prov_entropy for each in ages] == sorted((each.prov_entropy for each in ages), reverse=True)
    cited = [scored(citation_count=count) for count in (0, 3, 50, 1000, 99_999)]
    assert rising([each.auth_weight for each in cited])
    assert len({each.prov_entropy for each in cited}) == 1
    primary = [scored(". ".join(PRIMARY[:count])) for count in range(3)]
    assert rising([-each.auth_weight for each in primary])
    assert rising([each.prov_entropy for each in primary])
    agreed = [scored(". ".join(CONSENSUS[:count])) for count in range(3)]
    assert rising([each.auth_weight for each in agreed])
    assert rising([-each.prov_entropy for each in agreed])
    named = [scored(name) for name in ("", "blog", "journal", "university", ".gov", "The Lancet")]
    assert rising([each.auth_weight for each in named])
    assert rising([-each.prov_entropy for each in named])
    varied = [scored(" ".join(words[0] for words in list(SOURCES.values())[:count])) for count in range(6)]
    assert rising([each.prov_entropy for each in varied])
    assert len({each.auth_weight for each in varied}) == 1


def test_caps_and_ranges():
    def weight(extra="", **fields):
        return score_record(record(extra, **fields)).auth_weight

    assert weight(citation_count=10**5) == weight(citation_count=10**9)
    assert weight(". ".join(CONSENSUS[:2])) == weight(". ".join(CONSENSUS))
    assert weight(". ".join(PRIMARY)) == round(0.7 * 0.5, 4), "the measured part does not fall below 0"
    high = record(
        f"{' '.join(CONSENSUS)} The Lancet", source_type="government", year=2020, citation_count=10**9
    )
    low = record(". ".join(PRIMARY), source_type="patent_pre1970", year=1800)
    for each in (high, low):
        scores = score_record(each)
        assert 0 <= scores.auth_weight <= 0.99
        assert scores.prov_entropy >= 0


def test_markers_are_complete_words_ignoring_case_and_unique():
    assert measure(record("Eyewitness. eyewitness. EYEWITNESS.")).primary == 1
    assert measure(record("eyewitnesses, unpublishedly, bloggers")).primary == 0
    assert measure(record("see www.example.gov")).institution == 0.25
    assert measure(record("governor")).institution == 0.0
    assert measure(record("a notebook of patents, patented")).sources == {"patents": 1}
    lists = {
        "primary": PRIMARY,
        "consensus": CONSENSUS,
        "sources": [w for words in SOURCES.values() for w in words],
    }
    for name, markers in lists.items():
        for marker in markers:
            features = measure(record(marker))
            assert (
                features.primary > 0,
                features.consensus > 0,
                bool(features.sources),
                features.institution,
            ) == (
                name == "primary",
                name == "consensus",
                name == "sources",
                0.0,
            ), marker
    for marker in INSTITUTIONS:
        features = measure(record(marker))
        assert (features.primary, features.consensus, dict(features.sources)) == (0, 0, {}), marker


def test_metadata_may_be_nested_or_from_a_table():
    plain = score_record(record(source_type="preprint", year=1960, citation_count=7, publisher="Wikipedia"))
    nested = {
        "source_type": "preprint",
        "date": "1960-03-01",
        "citation_count": "7",
        "publisher": "Wikipedia",
    }
    assert score_record(record(metadata=nested)) == plain
    assert score_record(record(**{**nested, "year": 1960.0, "date": "2020"})) == plain, "year goes first"
    assert plain.auth_weight > score_record(record(source_type="preprint", year=1960)).auth_weight


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "in.jsonl:2: not valid JSON"),
        ("[]", "in.jsonl:2: a record must be a JSON object"),
        ('{"prompt": "x"}', "in.jsonl:2: a record needs non-empty text"),
        ('{"text": " "}', "in.jsonl:2: a record needs non-empty text"),
        ('{"text": "x", "year": "last"}', "in.jsonl:2: year must be an integer, not 'last'"),
        ('{"text": "x", "year": true}', "in.jsonl:2: year must be an integer, not True"),
        ('{"text": "x", "date": "March 1960"}', "in.jsonl:2: date must start with a four-digit year"),
        ('{"text": "x", "citation_count": -1}', "in.jsonl:2: citation_count must be an integer >= 0"),
        ('{"text": "x", "citation_count": 1.5}', "in.jsonl:2: citation_count must be an integer >= 0"),
        ('{"text": "x", "source_type": 3}', "in.jsonl:2: source_type must be a string, not 3"),
        ('{"text": "x", "publisher": []}', "in.jsonl:2: publisher must be a string, not []"),
        ('{"text": "x", "auth_weight": 0.1}', "in.jsonl:2: the record already has auth_weight"),
    ],
)
def test_bad_record_is_named_and_no_file_is_written(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_text(json.dumps(record()) + f"\n{line}\n")
    with pytest.raises(DataError, match=re.escape(message)):
        score_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("year", math.nan, "year must be an integer, not nan"),
        ("citation_count", math.inf, "citation_count must be an integer >= 0, not inf"),
        ("other", math.nan, "a field is NaN or infinite"),
    ],
)
def test_number_that_json_cannot_represent_is_an_error(tmp_path, name, value, message):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": ["x"], name: [value]}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=re.escape(message)):
        score_file(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_files(tmp_path):
    rows = [record("é", source_type="wiki", id=1), record(year=1900), record(source_type="made up")]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = source.read_bytes()
    summary = score_file(source, target)
    scored = [json.loads(line) for line in target.read_text().splitlines()]
    assert [
        {key: row[key] for key in row if key not in ("auth_weight", "prov_entropy")} for row in scored
    ] == rows
    assert [(row["auth_weight"], row["prov_entropy"]) for row in scored] == list(map(score_record, rows))
    assert "é" in target.read_text(), "as it was written"
    assert source.read_bytes() == before
    assert summary.describe().startswith("3 records scored")
    assert [text.partition(":")[0] for text in summary.warnings()] == [
        "1 record without a source_type",
        "1 record with an unknown source_type ('made up')",
    ]
    again = tmp_path / "again.jsonl"
    score_file(source, again)
    assert again.read_bytes() == target.read_bytes()
    for name in (target, source):
        with pytest.raises(ConfigError, match="already exists"):
            score_file(source, name)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="contains no records"):
        score_file(tmp_path / "empty.jsonl", tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="missing.jsonl"):
        score_file(tmp_path / "missing.jsonl", tmp_path / "none.jsonl")
    (tmp_path / "table.csv").write_text(f'text,source_type,year\n"{PLAIN}",wiki,1960\n')
    score_file(tmp_path / "table.csv", tmp_path / "table.jsonl")
    [row] = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert (row["auth_weight"], row["prov_entropy"]) == score_record(
        {"text": PLAIN, "source_type": "wiki", "year": 1960}
    )


def test_existing_scores_are_kept_or_overwritten(tmp_path):
    source = tmp_path / "in.jsonl"
    mine = record(auth_weight=0.25, prov_entropy=1.0)
    source.write_text("".join(json.dumps(row) + "\n" for row in (mine, record())))
    summary = score_file(source, tmp_path / "kept.jsonl", existing="keep")
    assert (summary.unchanged, summary.records) == (1, 1)
    assert json.loads((tmp_path / "kept.jsonl").read_text().splitlines()[0]) == mine
    score_file(source, tmp_path / "new.jsonl", existing="overwrite")
    first, second = (json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines())
    assert first == second
    source.write_text(json.dumps(record(prov_entropy=1.0)) + "\n")
    with pytest.raises(DataError, match="the record has only prov_entropy"):
        score_file(source, tmp_path / "half.jsonl", existing="keep")


def test_docs_list_every_marker_and_prior():
    page = PAGE.read_text()
    words = [*PRIMARY, *CONSENSUS, *INSTITUTIONS, *SOURCES, *(w for words in SOURCES.values() for w in words)]
    assert [word for word in words if f"`{word}`" not in page] == []
    for kind, (weight, bits) in PRIORS.items():
        assert f"| `{kind}` | {weight:.2f} | {bits:.1f} |" in page
    for name, score in INSTITUTIONS.items():
        assert re.search(rf"\| {score:.2f} \|[^\n]*`{re.escape(name)}`", page), name
