"""The checks of muP: what they find on small models, what they write, and how they go on."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from whet.cli.app import app
from whet.config.load_config import load_config, make_config
from whet.errors import ConfigError
from whet.reporting.text.mup_text import describe_sweep
from whet.studies import coordinate_check as checks
from whet.studies import lr_transfer as sweeps
from whet.studies.coordinate_check import FLAT, coordinate_check
from whet.studies.lr_transfer import LrTransfer, SweepPoint, lr_sweep
from whet.studies.mup_widths import at_width, slope

EXAMPLE = Path(__file__).parents[2] / "examples" / "mup-nano.yaml"
STEPS = 12

TEXT = [{"text": f"Line {n}: the cat number {n % 7} sits on mat {n % 5}, and sees {n}."} for n in range(40)]


def lab_config(tmp_path, **sections):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, TEXT)))
    config = {
        "model": {"preset": "nano", "layers": 1, "d_model": 16, "width": 40, "heads": 2},
        "method": {"kind": "full"},
        "data": {"train": str(path), "max_length": 33, "too_long": "split"},
        "optim": {"lr": 1e-2, "schedule": "constant", "mup": {"base_width": 16}},
        "run": {
            **{"name": "lab", "dir": str(tmp_path), "steps": 5, "batch_tokens": 128},
            **{"device": "cpu", "precision": "fp32"},
        },
    }
    for name, keys in sections.items():
        config[name] = {**config[name], **keys}
    return make_config(config)


def test_slope_is_that_of_least_squares():
    xs, ys = [1.0, 2.0, 4.0, 7.0], [3.0, 2.5, 4.0, 1.0]
    numpy = pytest.importorskip("numpy")
    assert slope(xs, ys) == pytest.approx(numpy.polyfit(xs, ys, 1)[0])


def test_everything_grows_with_the_width_and_only_heads_of_a_given_size_stay(tmp_path):
    config = lab_config(tmp_path, optim={"mup": {"base_width": 8}})
    grown = at_width(config, 64, "mup", lr=0.5)
    sizes = grown.model.d_model, grown.model.width, grown.model.heads, grown.model.head_dim
    assert sizes == (64, 160, 2, None)
    assert grown.optim.mup == config.optim.mup
    assert grown.optim.lr == 0.5
    assert at_width(config, 64, "standard").optim.mup is None
    given = lab_config(tmp_path, optim={"mup": {"base_width": 8, "base_head_dim": 8}})
    many = at_width(given, 64, "mup").model
    assert (many.d_model, many.width, many.heads, many.kv_heads) == (64, 160, 8, 8)
    wide_heads = lab_config(tmp_path, model={"head_dim": 12})
    assert at_width(wide_heads, 32, "mup").model.head_dim == 24


# a rate at which six steps outgrow the first weights; clipping by one norm is not the same at every width
OPTIMIZERS = {
    "adamw": {"lr": 1e-2},
    "muon": {"lr": 1e-2},
    "sgd": {"lr": 0.3, "clip": None},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_activations_are_as_large_at_every_width_under_mup_and_only_there(tmp_path, name):
    config = lab_config(tmp_path, optim={"name": name, **OPTIMIZERS[name]})
    check = coordinate_check(config, widths=[32, 64, 128], steps=6, seeds=2)
    mup, standard = check.slopes("mup"), check.slopes("standard")
    assert mup.keys() == {"embedding", "attention 1", "block 1", "logits"}
    # scores divided by d begin at d ** -0.5, and grow only as queries and keys learn of each other: Adam's
    # have after six steps, the others' not yet
    learned = mup if name == "adamw" else mup.keys() - {"attention 1"}
    assert all(abs(mup[key]) < FLAT for key in learned), mup
    assert -0.6 < mup["attention 1"] < FLAT
    assert not check.is_flat("standard")
    assert standard["attention 1"] > 1
    assert abs(standard["logits"]) > 0.5


def test_first_sizes_are_those_of_the_formula(tmp_path):
    """Before the first step an embedding is as large as it was drawn, at every width."""
    check = coordinate_check(lab_config(tmp_path), widths=[16, 64], steps=1)
    for parametrisation in ("mup", "standard"):
        assert check.sizes[parametrisation]["embedding"].first == pytest.approx([0.02, 0.02], rel=0.1)
    at_base = check.sizes["mup"]["logits"], check.sizes["standard"]["logits"]
    assert at_base[0].last[0] == at_base[1].last[0]  # the same run at the base width
    assert at_base[0].last[1] != at_base[1].last[1]


def test_a_run_that_overflows_is_infinitely_steep(tmp_path):
    config = lab_config(tmp_path, optim={"lr": 1e30, "clip": None})
    check = coordinate_check(config, widths=[16, 32], steps=3)
    assert check.slopes("standard")["logits"] == math.inf
    assert not check.is_flat("mup")


def test_a_sweep_finds_the_lowest_loss_and_how_far_it_moves():
    losses = {
        ("mup", 32): [3.0, 2.0, 2.5],
        ("mup", 64): [2.9, 1.9, math.inf],
        ("standard", 32): [3.0, 2.0, 2.5],
        ("standard", 64): [1.8, 2.2, math.inf],
    }
    points = [
        SweepPoint(kind, width, lr, seed, loss + 0.1 * seed)
        for (kind, width), found in losses.items()
        for lr, loss in zip((1e-3, 2e-3, 4e-3), found, strict=True)
        for seed in (0, 1)
    ]
    sweep = LrTransfer(points)
    assert sweep.best("mup") == {32: 2e-3, 64: 2e-3}
    assert sweep.best("standard") == {32: 2e-3, 64: 1e-3}
    assert (sweep.shift("mup"), sweep.shift("standard")) == (0, -1)
    assert sweep.losses("mup", 32)[1e-3] == pytest.approx(3.05)


def test_a_width_at_which_every_rate_diverges_has_no_best_one(tmp_path):
    found = {("mup", 32): 2.0, ("mup", 64): 3.0, ("standard", 32): 2.0}
    sweep = LrTransfer(
        [
            SweepPoint(kind, width, lr, 0, found.get((kind, width), math.inf) if lr < 2e-3 else math.inf)
            for kind in ("mup", "standard")
            for width in (16, 32, 64)
            for lr in (1e-3, 2e-3)
        ]
    )
    assert (sweep.best("mup"), sweep.best("standard")) == ({32: 1e-3, 64: 1e-3}, {32: 1e-3})
    assert (sweep.shift("mup"), sweep.shift("standard")) == (0, None)
    said = describe_sweep(sweep)
    assert "muP: the best rate moves by a factor of 1 from width 32 to 64" in said
    assert "standard: nothing can be said of how the best rate moves: only width 32 has one" in said
    assert re.findall(r"^(\d+) .* (\S+)$", said, re.MULTILINE) == [
        *(("16", "-"), ("32", "0.001"), ("64", "0.001")),
        *(("16", "-"), ("32", "0.001"), ("64", "-")),
    ]


def test_where_everything_diverges_no_rate_is_the_best(tmp_path):
    arguments = ["--widths", "16,32", "--lrs", "1e28,1e29,1e30", "--out", str(tmp_path)]
    found = run_lab("lr-sweep", write_config(tmp_path, optim={"clip": None}), *arguments)
    assert found.exit_code == 0, found.output
    assert found.output.count("nothing can be said of how the best rate moves: no width has one") == 2

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    written = json.loads((tmp_path / "lr-sweep.json").read_text(), parse_constant=refuse)
    assert written["best"] == {"mup": {}, "standard": {}}
    assert {run["loss"] for run in written["runs"]} == {"inf"}


def test_a_sweep_trains_each_rate_and_one_that_diverges_is_the_worst(tmp_path):
    config = lab_config(tmp_path, optim={"clip": None})
    sweep = lr_sweep(config, widths=[16, 32], lrs=[1e-3, 1e-2, 1e30])
    assert len(sweep.points) == 12
    for parametrisation in ("mup", "standard"):
        for width in (16, 32):
            slow, good, mad = sweep.losses(parametrisation, width).values()
            assert good < slow < mad == math.inf
    assert sweep.losses("mup", 16) == sweep.losses("standard", 16)  # the base width
    assert sweep.losses("mup", 32) != sweep.losses("standard", 32)


def run_lab(*arguments):
    return CliRunner().invoke(app, ["lab", *arguments], catch_exceptions=True)


def write_config(tmp_path, **sections):
    path = tmp_path / "lab.yaml"
    path.write_text(yaml.safe_dump(lab_config(tmp_path, **sections).model_dump(mode="json", by_alias=True)))
    return str(path)


def test_the_check_prints_a_table_and_writes_json_and_a_plot(tmp_path):
    found = run_lab("coord-check", write_config(tmp_path), "--widths", "16,32", "--steps", "2")
    assert found.exit_code == 0, found.output
    assert "attention 1" in found.output
    assert "standard: not flat, the steepest is" in found.output
    written = json.loads((tmp_path / "lab-coord-check" / "coord-check.json").read_text())
    assert (written["widths"], written["steps"]) == ([16, 32], 2)
    one = written["mup"]["activations"]["logits"]
    expected = math.log(one["last"][1] / one["last"][0]) / math.log(2)
    assert one["slope"] == pytest.approx(expected)
    pytest.importorskip("matplotlib")
    picture = (tmp_path / "lab-coord-check" / "coord-check.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_a_stopped_sweep_goes_on_and_other_settings_or_data_begin_anew(tmp_path, monkeypatch, caplog):
    path, out = write_config(tmp_path), tmp_path / "out"
    arguments = ["lr-sweep", path, "--widths", "16,32", "--lrs", "1e-3,1e-2,1e-1", "--out", str(out)]
    original, ran = sweeps._last_loss, []

    def counted(plan):
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.append(plan.optim.lr)
        return original(plan)

    monkeypatch.setattr(sweeps, "_last_loss", counted)
    assert run_lab(*arguments).exit_code != 0
    assert len(json.loads((out / "lr-sweep.json").read_text())["runs"]) == 4
    again = []
    monkeypatch.setattr(sweeps, "_last_loss", lambda plan: again.append(1) or original(plan))
    found = run_lab(*arguments)
    assert found.exit_code == 0, found.output
    assert len(again) == 12 - 4
    assert "muP: the best rate moves by a factor of" in found.output
    written = json.loads((out / "lr-sweep.json").read_text())
    assert len(written["runs"]) == 12
    assert written["best"]["mup"].keys() == {"16", "32"}
    pytest.importorskip("matplotlib")
    assert (out / "lr-sweep.png").read_bytes().startswith(b"\x89PNG")
    again.clear()
    assert run_lab(*arguments[:3], "16,64", *arguments[4:]).exit_code == 0  # what is known of 32 is kept
    assert len(again) == 6
    assert len(json.loads((out / "lr-sweep.json").read_text())["runs"]) == 18
    again.clear()
    monkeypatch.setattr(sweeps, "_last_loss", lambda plan: again.append(1) or 1.0)
    run_lab("lr-sweep", path, "run.steps=6", *arguments[2:])
    assert len(again) == 12
    again.clear()
    run_lab("lr-sweep", path, "run.steps=6", *arguments[2:])
    assert not again
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, reversed(TEXT))))
    run_lab("lr-sweep", path, "run.steps=6", *arguments[2:])
    assert len(again) == 12
    assert "has runs with other settings or data: they are run again" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widths", "16"], "at least two widths"),
        (["--widths", "16,x"], "--widths '16,x' is not a list of numbers with commas"),
        (["--widths", "0,16"], "each must be above 0"),
        (["--widths", "16,21"], "at a width of 21, model.width would be 52.5"),
        (["--widths", "16,32", "model.preset=nano", "optim.mup=null"], "it needs model.preset and optim.mup"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, arguments, message):
    overrides = [each for each in arguments if "=" in each]
    options = [each for each in arguments if "=" not in each]
    for command in ("coord-check", "lr-sweep"):
        found = run_lab(command, write_config(tmp_path), *overrides, *options)
        assert isinstance(found.exception, ConfigError)
        assert message in str(found.exception)


def test_sizes_are_root_mean_squares():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    assert checks.scale_of(x) == pytest.approx(2.5)


@pytest.mark.slow
def test_activations_of_the_example_are_flat_from_64_to_1024():
    """The figures of docs/mup.md."""
    optim = ["mup.base_width=16", "mup.base_head_dim=16", "lr=1e-2", "warmup=0", "schedule=constant"]
    config = load_config(
        EXAMPLE,
        [f"optim.{each}" for each in optim] + ["model.heads=16", "run.device=cpu", "run.precision=fp32"],
    )
    check = coordinate_check(config, widths=[64, 128, 256, 512, 1024], steps=STEPS, seeds=8)
    assert check.is_flat("mup"), check.slopes("mup")
    assert max(check.slopes("standard").values()) > 1
