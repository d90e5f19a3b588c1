"""Synthetic rows and their statistics, batches of rows, and one source divided between splits."""

import numpy as np
import pytest
import torch

from whet.data.packing import StepSettings
from whet.data.sources.source import open_source
from whet.data.synthetic.generators import generate
from whet.errors import CheckpointError, DataError
from whet.recipes.quality.row_batches import RowStream, read_rows, row_batches
from whet.recipes.quality.synthetic_rows import CATEGORIES, INPUTS, OUTPUTS, regression_weights


def table(spec):
    records = generate(spec)
    return (np.array([record[key] for record in records]) for key in ("features", "target"))


def rows_of(spec):
    return read_rows(open_source(spec), inputs=INPUTS, outputs=OUTPUTS)


def test_quality_rows_have_the_documented_statistics():
    features, targets = table("synth:quality:800")
    assert (INPUTS, OUTPUTS, sum(CATEGORIES)) == (96, 20, 74)
    start, neighbours = 0, 0
    for size in CATEGORIES:
        block = features[:, start : start + size]
        assert set(np.unique(block)) <= {0.0, 0.7, 1.0}
        assert ((block == 1.0).sum(1) == 1).all()
        beside = (block == 0.7).sum(1)
        assert beside.max() == 1
        for row in np.flatnonzero(beside):
            assert abs(int(block[row].argmax()) - int((block[row] == 0.7).argmax())) == 1
        neighbours += beside.sum()
        start += size
    assert 0.25 < neighbours / (800 * len(CATEGORIES)) < 0.35
    assert features[:, 74:].min() >= 0
    assert features[:, 74:].max() <= 1
    np.testing.assert_allclose(targets[:, :12].sum(1), 1)
    assert targets.min() >= 0
    assert targets[:, 12:].max() <= 1
    # worth learning: no outcome is constant, and no class is always the likeliest
    assert targets.std(0).min() > 0.03
    assert len(set(targets[:, :12].argmax(1))) > 6


@pytest.mark.parametrize("name", ["quality", "regression"])
def test_fewer_rows_are_a_prefix_and_valid_rows_differ(name):
    few, _ = table(f"synth:{name}:20")
    many, _ = table(f"synth:{name}:300")
    valid, _ = table(f"synth:{name}-valid:300")
    np.testing.assert_array_equal(few, many[:20])
    assert not {row.tobytes() for row in many} & {row.tobytes() for row in valid}


def test_regression_weights_are_recovered_in_closed_form():
    features, targets = table("synth:regression:2000")
    weights, *_ = np.linalg.lstsq(features, targets, rcond=None)
    assert np.abs(weights - regression_weights()).max() < 0.01
    residual = targets - features @ weights
    assert 0.009 < residual.std() < 0.011
    assert (features.min(), features.max()) == pytest.approx((-0.5, 0.5), abs=1e-4)


def test_every_row_occurs_once_per_epoch_in_a_new_order():
    rows = rows_of("synth:quality:50")
    stream = RowStream(rows, StepSettings(16, None, None, pack=True), seed=3)
    assert stream.steps_in(0) == 4
    epochs = []
    for _ in range(3):
        places = [batch.tokens.flatten().tolist() for _ in range(4) for batch in next(stream)]
        epochs.append([place for step in places for place in step])
        assert sorted(epochs[-1]) == list(range(50))
        assert [len(step) for step in places] == [16, 16, 16, 2]
    steps = [frozenset(epoch[:16]) for epoch in epochs]
    assert len(set(steps)) == 3  # other rows together, not only another order
    again = RowStream(rows, StepSettings(16, None, None, pack=True), seed=3)
    again.seek(stream.state())
    one, other = next(stream), next(again)
    assert torch.equal(one[0].column("features"), other[0].column("features"))


def test_batch_contains_the_requested_rows():
    rows = rows_of("synth:quality:9")
    [batch] = row_batches(rows, [7, 2, 5], StepSettings(3, None, None, pack=True))
    places = batch.tokens.flatten()
    assert sorted(places.tolist()) == [2, 5, 7]
    assert torch.equal(batch.column("features"), rows.features[places])
    assert torch.equal(batch.column("outcomes"), rows.outcomes[places])
    assert batch.origins == tuple(f"synth:quality:9#{place + 1}" for place in places.tolist())
    assert (batch.supervised, batch.real_tokens) == (3, 3)
    halves = list(row_batches(rows, range(9), StepSettings(9, None, 4, pack=True)))
    assert [half.supervised for half in halves] == [4, 4, 1]


def test_stream_rejects_the_position_of_another():
    rows = rows_of("synth:quality:9")
    stream = RowStream(rows, StepSettings(3, None, None, pack=True), seed=0)
    other = RowStream(rows, StepSettings(4, None, None, pack=True), seed=0)
    with pytest.raises(CheckpointError, match="have changed"):
        other.seek(stream.state())


def test_shared_source_is_divided_between_splits_consistently():
    rows, more = rows_of("synth:quality:400"), rows_of("synth:quality:800")
    among = ["train", "valid", "test"]
    parts = {part: set(rows.select_split(part, splits=among).keys) for part in among}
    assert set.union(*parts.values()) == set(rows.keys)
    assert sum(map(len, parts.values())) == 400
    assert 20 < len(parts["valid"]) < 60
    assert 20 < len(parts["test"]) < 60
    for part in among:
        assert parts[part] <= set(more.select_split(part, splits=among).keys)
    both = rows.select_split("train", splits=["train", "valid"])
    assert set(both.keys) == parts["train"] | parts["test"]


def test_non_tabular_or_short_records_are_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"features": [1, 2], "target": [1]}\n')
    with pytest.raises(DataError, match="rows.jsonl:1: 2 features, but the model has 96"):
        read_rows(open_source(str(path)), inputs=96, outputs=20)
    path.write_text('{"features": [1, 2], "target": 1}\n')
    with pytest.raises(DataError, match="rows.jsonl:1: 1 targets, but the model has 20"):
        read_rows(open_source(str(path)), inputs=2, outputs=20)
    with pytest.raises(DataError, match="a messages record"):
        read_rows(open_source("synth:house:3"), inputs=96, outputs=20)
    path.write_text('{"features": [1, "x"], "target": [1]}\n')
    with pytest.raises(DataError, match="feature 2 must be a number"):
        read_rows(open_source(str(path)), inputs=2, outputs=1)
    path.write_text('{"features": [1], "target": [NaN]}\n')
    with pytest.raises(DataError, match="rows.jsonl:1"):
        read_rows(open_source(str(path)), inputs=1, outputs=1)


@pytest.mark.parametrize("name", ["quality", "quality-valid", "regression", "regression-valid"])
def test_seed_draws_other_rows_of_the_same_task(name):
    features, targets = table(f"synth:{name}:200:7")
    again, _ = table(f"synth:{name}:300:7")
    assert np.array_equal(again[:200], features), "fewer rows are the first of more"
    other, _ = table(f"synth:{name}:200:8")
    plain, _ = table(f"synth:{name}:200")
    large, _ = table(f"synth:{name}:200:{2**64 - 1}")
    tables = [features, other, plain, large]
    assert all(not np.array_equal(a, b) for i, a in enumerate(tables) for b in tables[:i])
    digests = {open_source(f"synth:{name}:200{seed}").digest() for seed in ("", ":7", ":8")}
    assert len(digests) == 3


def test_targets_do_not_depend_on_the_seed():
    features, targets = table("synth:regression:2000:3")
    weights = np.linalg.lstsq(features, targets, rcond=None)[0]
    assert np.abs(weights - regression_weights()).max() < 0.01
    (train, _), (valid, _) = table("synth:quality:50:3"), table("synth:quality-valid:50:3")
    assert not np.array_equal(train, valid)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("synth:quality:8:x", "the seed must be an integer from 0"),
        (f"synth:quality:8:{2**64}", "the seed must be an integer from 0"),
        ("synth:quality:8:1:2", "the seed must be an integer from 0"),
        ("synth:quality::1", "the number of records must be"),
        ("synth:house:8:1", "house does not accept a seed"),
    ],
)
def test_invalid_seeds_are_reported(spec, message):
    with pytest.raises(DataError, match=message):
        list(open_source(spec))
