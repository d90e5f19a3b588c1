"""The muP checks: results on small models, written files, and resuming."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from whet.cli.app import app
from whet.config.load_config import load_config, validate_config
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
    return validate_config(config)


def test_slope_matches_least_squares():
    xs, ys = [1.0, 2.0, 4.0, 7.0], [3.0, 2.5, 4.0, 1.0]
    numpy = pytest.importorskip("numpy")
    assert slope(xs, ys) == pytest.approx(numpy.polyfit(xs, ys, 1)[0])


def test_at_width_scales_all_sizes(tmp_path):
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


# learning rates at which six steps outgrow the initial weights; clipping depends on the width
OPTIMIZERS = {
    "adamw": {"lr": 1e-2},
    "muon": {"lr": 1e-2},
    "sgd": {"lr": 0.3, "clip": None},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_activations_are_flat_only_under_mup(tmp_path, name):
    config = lab_config(tmp_path, optim={"name": name, **OPTIMIZERS[name]})
    check = coordinate_check(config, widths=[32, 64, 128], steps=6, seeds=2)
    mup, standard = check.slopes("mup"), check.slopes("standard")
    assert mup.keys() == {"embedding", "attention 1", "block 1", "logits"}
    # scores divided by d start at d ** -0.5, and grow only as queries and keys align: with Adam they have
    # after six steps, with the other optimizers not yet
    aligned = mup if name == "adamw" else mup.keys() - {"attention 1"}
    assert all(abs(mup[key]) < FLAT for key in aligned), mup
    assert -0.6 < mup["attention 1"] < FLAT
    assert not check.is_flat("standard")
    assert standard["attention 1"] > 1
    assert abs(standard["logits"]) > 0.5


def test_initial_sizes_match_the_initialization(tmp_path):
    """Before the first step, embeddings have their initialization scale at every width."""
    check = coordinate_check(lab_config(tmp_path), widths=[16, 64], steps=1)
    for parametrisation in ("mup", "standard"):
        assert check.sizes[parametrisation]["embedding"].first == pytest.approx([0.02, 0.02], rel=0.1)
    at_base = check.sizes["mup"]["logits"], check.sizes["standard"]["logits"]
    assert at_base[0].last[0] == at_base[1].last[0]  # the same run at the base width
    assert at_base[0].last[1] != at_base[1].last[1]


def test_overflowing_run_has_infinite_slope(tmp_path):
    config = lab_config(tmp_path, optim={"lr": 1e30, "clip": None})
    check = coordinate_check(config, widths=[16, 32], steps=3)
    assert check.slopes("standard")["logits"] == math.inf
    assert not check.is_flat("mup")


def test_lr_transfer_finds_best_rate_and_shift():
    losses = {
        ("mup", 32): [3.0, 2.0, 2.5],
        ("mup", 64): [2.9, 1.9, math.inf],
        ("standard", 32): [3.0, 2.0, 2.5],
        ("standard", 64): [1.8, 2.2, math.inf],
    }
    points = [
        SweepPoint(kind, width, lr, seed, loss + 0.1 * seed)
        for (kind, width), values in losses.items()
        for lr, loss in zip((1e-3, 2e-3, 4e-3), values, strict=True)
        for seed in (0, 1)
    ]
    sweep = LrTransfer(points)
    assert sweep.best("mup") == {32: 2e-3, 64: 2e-3}
    assert sweep.best("standard") == {32: 2e-3, 64: 1e-3}
    assert (sweep.shift("mup"), sweep.shift("standard")) == (0, -1)
    assert sweep.losses("mup", 32)[1e-3] == pytest.approx(3.05)


def test_width_with_diverged_runs_has_no_best_rate(tmp_path):
    losses = {("mup", 32): 2.0, ("mup", 64): 3.0, ("standard", 32): 2.0}
    sweep = LrTransfer(
        [
            SweepPoint(kind, width, lr, 0, losses.get((kind, width), math.inf) if lr < 2e-3 else math.inf)
            for kind in ("mup", "standard")
            for width in (16, 32, 64)
            for lr in (1e-3, 2e-3)
        ]
    )
    assert (sweep.best("mup"), sweep.best("standard")) == ({32: 1e-3, 64: 1e-3}, {32: 1e-3})
    assert (sweep.shift("mup"), sweep.shift("standard")) == (0, None)
    text = describe_sweep(sweep)
    assert "muP: the best learning rate shifts by a factor of 1 from width 32 to 64" in text
    assert "standard: the shift of the best learning rate is unknown: only width 32 has one" in text
    assert re.findall(r"^(\d+) .* (\S+)$", text, re.MULTILINE) == [
        *(("16", "-"), ("32", "0.001"), ("64", "0.001")),
        *(("16", "-"), ("32", "0.001"), ("64", "-")),
    ]


def test_lr_sweep_with_only_diverged_runs(tmp_path):
    arguments = ["--widths", "16,32", "--lrs", "1e28,1e29,1e30", "--out", str(tmp_path)]
    result = run_lab("lr-sweep", write_config(tmp_path, optim={"clip": None}), *arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count("the shift of the best learning rate is unknown: no width has one") == 2

    def reject_constant(name):
        raise AssertionError(f"{name} is not valid JSON")

    written = json.loads((tmp_path / "lr-sweep.json").read_text(), parse_constant=reject_constant)
    assert written["best"] == {"mup": {}, "standard": {}}
    assert {run["loss"] for run in written["runs"]} == {"inf"}


def test_lr_sweep_trains_every_rate(tmp_path):
    config = lab_config(tmp_path, optim={"clip": None})
    sweep = lr_sweep(config, widths=[16, 32], lrs=[1e-3, 1e-2, 1e30])
    assert len(sweep.points) == 12
    for parametrisation in ("mup", "standard"):
        for width in (16, 32):
            slow, good, diverged = sweep.losses(parametrisation, width).values()
            assert good < slow < diverged == math.inf
    assert sweep.losses("mup", 16) == sweep.losses("standard", 16)  # the base width
    assert sweep.losses("mup", 32) != sweep.losses("standard", 32)


def run_lab(*arguments):
    return CliRunner().invoke(app, ["lab", *arguments], catch_exceptions=True)


def write_config(tmp_path, **sections):
    path = tmp_path / "lab.yaml"
    path.write_text(yaml.safe_dump(lab_config(tmp_path, **sections).model_dump(mode="json", by_alias=True)))
    return str(path)


def test_coord_check_writes_table_json_and_plot(tmp_path):
    result = run_lab("coord-check", write_config(tmp_path), "--widths", "16,32", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "attention 1" in result.output
    assert "standard: not flat; steepest slope" in result.output
    written = json.loads((tmp_path / "lab-coord-check" / "coord-check.json").read_text())
    assert (written["widths"], written["steps"]) == ([16, 32], 2)
    one = written["mup"]["activations"]["logits"]
    expected = math.log(one["last"][1] / one["last"][0]) / math.log(2)
    assert one["slope"] == pytest.approx(expected)
    pytest.importorskip("matplotlib")
    picture = (tmp_path / "lab-coord-check" / "coord-check.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_stopped_lr_sweep_resumes_unless_settings_or_data_change(tmp_path, monkeypatch, caplog):
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
    reran = []
    monkeypatch.setattr(sweeps, "_last_loss", lambda plan: reran.append(1) or original(plan))
    result = run_lab(*arguments)
    assert result.exit_code == 0, result.output
    assert len(reran) == 12 - 4
    assert "muP: the best learning rate shifts by a factor of" in result.output
    written = json.loads((out / "lr-sweep.json").read_text())
    assert len(written["runs"]) == 12
    assert written["best"]["mup"].keys() == {"16", "32"}
    pytest.importorskip("matplotlib")
    assert (out / "lr-sweep.png").read_bytes().startswith(b"\x89PNG")
    reran.clear()
    assert run_lab(*arguments[:3], "16,64", *arguments[4:]).exit_code == 0  # the points at width 32 are kept
    assert len(reran) == 6
    assert len(json.loads((out / "lr-sweep.json").read_text())["runs"]) == 18
    reran.clear()
    monkeypatch.setattr(sweeps, "_last_loss", lambda plan: reran.append(1) or 1.0)
    run_lab("lr-sweep", path, "run.steps=6", *arguments[2:])
    assert len(reran) == 12
    reran.clear()
    run_lab("lr-sweep", path, "run.steps=6", *arguments[2:])
    assert not reran
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, reversed(TEXT))))
    run_lab("lr-sweep", path, "run.steps=6", *arguments[2:])
    assert len(reran) == 12
    assert "has runs with other settings or data: the sweep starts over" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widths", "16"], "at least two widths"),
        (["--widths", "16,x"], "--widths '16,x' is not a list of numbers separated by commas"),
        (["--widths", "0,16"], "every value must be above 0"),
        (["--widths", "16,21"], "at width 21, model.width would not be an integer: 52.5"),
        (["--widths", "16,32", "model.preset=nano", "optim.mup=null"], "set model.preset and optim.mup"),
    ],
)
def test_invalid_comparison_is_rejected(tmp_path, arguments, message):
    overrides = [each for each in arguments if "=" in each]
    options = [each for each in arguments if "=" not in each]
    for command in ("coord-check", "lr-sweep"):
        result = run_lab(command, write_config(tmp_path), *overrides, *options)
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


def test_root_mean_square():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    assert checks.root_mean_square(x) == pytest.approx(2.5)


@pytest.mark.slow
def test_example_activations_are_flat_from_64_to_1024():
    """The figures of docs/mup.md."""
    optim = ["mup.base_width=16", "mup.base_head_dim=16", "lr=1e-2", "warmup=0", "schedule=constant"]
    config = load_config(
        EXAMPLE,
        [f"optim.{each}" for each in optim] + ["model.heads=16", "run.device=cpu", "run.precision=fp32"],
    )
    check = coordinate_check(config, widths=[64, 128, 256, 512, 1024], steps=STEPS, seeds=8)
    assert check.is_flat("mup"), check.slopes("mup")
    assert max(check.slopes("standard").values()) > 1
