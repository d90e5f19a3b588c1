"""TKP1 files: a hand-written golden file, round trips, and invalid files."""

import contextlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config.quality import Quality
from whet.errors import CheckpointError
from whet.recipes.quality.tabular_model import QualitySpec, new_quality_model
from whet.recipes.quality.tkp1 import (
    Tkp1Record,
    read_tkp1,
    restore_tkp1,
    tkp1_names,
    tkp1_records,
    write_tkp1,
)

CONFIG = b'{"seed":42,"size":"nano","steps":50}'


def golden():
    """Return a file with two parameters, the second with a gradient, byte by byte as specified."""
    parts = [b"TKP1", struct.pack("<IIII", 1, 50, 2, len(CONFIG)), CONFIG]
    parts += [struct.pack("<I", 14), b"router.param_0"]
    parts += [struct.pack("<I3f", 3, 1.0, -2.5, 0.125)]
    parts += [struct.pack("<I3f", 3, 0.1, 0.2, 0.3), struct.pack("<I3f", 3, 4.0, 5.0, 6.0)]
    parts += [struct.pack("<IB", 50, 0)]
    parts += [struct.pack("<I", 16), b"expert_0.param_1"]
    parts += [struct.pack("<I1f", 1, 7.0), struct.pack("<I", 0), struct.pack("<I", 0)]
    parts += [struct.pack("<IB", 49, 1), struct.pack("<I1f", 1, -1.0)]
    return b"".join(parts)


def records():
    def floats(*values):
        return np.array(values, dtype="<f4")

    yield Tkp1Record("router.param_0", floats(1, -2.5, 0.125), floats(0.1, 0.2, 0.3), floats(4, 5, 6), 50)
    yield Tkp1Record("expert_0.param_1", floats(7), floats(), floats(), 49, floats(-1))


def test_write_produces_the_golden_file(tmp_path):
    path = tmp_path / "checkpoint.tkp1"
    config = {"size": "nano", "seed": 42, "steps": 50}
    write_tkp1(path, step=50, config=config, count=2, records=records())
    assert path.read_bytes() == golden()


def test_golden_file_is_read(tmp_path):
    path = tmp_path / "checkpoint.tkp1"
    path.write_bytes(golden())
    actual = read_tkp1(path)
    assert (actual.step, actual.config) == (50, {"seed": 42, "size": "nano", "steps": 50})
    for one, other in zip(actual.records, records(), strict=True):
        assert (one.name, one.step) == (other.name, other.step)
        for part in ("weight", "m", "v"):
            np.testing.assert_array_equal(getattr(one, part), getattr(other, part))
    assert actual.records[0].grad is None
    assert actual.records[1].grad.tolist() == [-1.0]


@pytest.mark.parametrize("arm", ["softmax", "dense"])
def test_model_round_trip(arm, tmp_path):
    spec = QualitySpec.from_config(Quality(quality="nano", arm=arm))
    model, other = (new_quality_model(spec, seed=seed) for seed in (0, 1))
    moments = {
        id(p): {"exp_avg": torch.full_like(p, 0.5), "exp_avg_sq": torch.full_like(p, 0.25)}
        for p in model.parameters()
    }
    path = tmp_path / "checkpoint.tkp1"
    write_tkp1(
        path,
        step=20,
        config={},
        count=spec.tensor_count(),
        records=tkp1_records(model, lambda p: moments[id(p)], step=19),
    )
    names = list(tkp1_names(model).values())
    overhead = sum(4 + len(name) + 12 + 5 for name in names)
    assert path.stat().st_size == 20 + len("{}") + overhead + 12 * spec.parameter_count()
    actual = read_tkp1(path)
    assert [record.name for record in actual.records] == names
    if arm == "softmax":
        assert names[:3] == ["router.param_0", "router.param_1", "expert_0.param_0"]
        assert names[-1] == "expert_3.param_13"
    assert {float(record.m[0]) for record in actual.records} == {0.5}
    assert {float(record.v[-1]) for record in actual.records} == {0.25}
    restore_tkp1(other, actual)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_sgd_momentum_is_stored_in_m(tmp_path):
    model = new_quality_model(QualitySpec("nano", "softmax"), seed=0)
    record = next(tkp1_records(model, lambda p: {"momentum_buffer": torch.ones_like(p)}, step=1))
    assert record.m.min() == record.m.max() == 1
    assert not record.v.any()
    assert record.v.shape == record.weight.shape


def test_checkpoint_of_another_model_is_rejected(tmp_path):
    model = new_quality_model(QualitySpec("nano", "softmax"), seed=0)
    (tmp_path / "golden").write_bytes(golden())
    with pytest.raises(CheckpointError, match="does not fit this model: expert_0.param_0"):
        restore_tkp1(model, read_tkp1(tmp_path / "golden"))


@settings(deadline=None)
@given(st.integers(0, len(golden()) - 1))
def test_truncated_file_raises_one_clear_error(tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "cut.tkp1"
    path.write_bytes(golden()[:length])
    with pytest.raises(CheckpointError, match="cut.tkp1"):
        read_tkp1(path)


@settings(deadline=None)
@given(st.data())
def test_flipped_byte_never_crashes(tmp_path_factory, data):
    damaged = bytearray(golden())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.tkp1"
    path.write_bytes(bytes(damaged))
    with contextlib.suppress(CheckpointError):
        read_tkp1(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"TKP2", "is not a TKP1 checkpoint"),
        (4, struct.pack("<I", 2), "version 2"),
        (12, struct.pack("<I", 2**32 - 1), "too short for 4294967295 records"),
        (12, struct.pack("<I", 1), "bytes follow its last record"),
        (16, struct.pack("<I", 2**32 - 1), "ends within its config"),
        (20, b"[", "config is not JSON"),
        (20 + len(CONFIG), struct.pack("<I", 2**32 - 1), "a name has 4294967295 bytes"),
        (24 + len(CONFIG), b"\xff", "not UTF-8"),
        (24 + len(CONFIG) + 14, struct.pack("<I", 2**31), "ends within weight of 'router.param_0'"),
    ],
)
def test_invalid_lengths_are_detected_before_allocation(place, value, message, tmp_path):
    lying = bytearray(golden())
    lying[place : place + len(value)] = value
    path = tmp_path / "lying.tkp1"
    path.write_bytes(bytes(lying))
    with pytest.raises(CheckpointError, match=message):
        read_tkp1(path)


def test_missing_file_raises_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tkp1(tmp_path / "none.tkp1")
