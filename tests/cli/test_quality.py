"""The commands of the quality task."""

import json
import re

import pytest
import yaml

from whet.reporting.progress import RunProgress
from whet.training.callbacks import StopRun


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "quality.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"quality": "nano"},
                "data": {"train": "synth:quality:64", "valid": "synth:quality-valid:32"},
                "run": {
                    "name": "q",
                    "dir": str(tmp_path / "runs"),
                    "steps": 3,
                    "batch_size": 32,
                    "device": "cpu",
                },
            }
        )
    )
    return path


FIELDS = ["model_size", "total_params", "final_loss", "steps_run", "time_elapsed_sec", "throughput_steps_per_sec",
          "last_router_entropy", "checkpoint", "arch", "fingerprint"]  # fmt: skip


def fields_of(out):
    [line] = [line for line in out.splitlines() if line.startswith("SUMMARY: ")]
    return dict(part.split("=", 1) for part in line.removeprefix("SUMMARY: ").split(" "))


def test_quality_run_prints_summary_line(cli, config):
    code, out, err = cli("train", config)
    assert code == 0, err
    fields = fields_of(out)
    assert set(FIELDS) <= set(fields)
    assert (fields["model_size"], fields["total_params"], fields["steps_run"]) == ("nano", "195540", "3")
    assert len(fields["final_loss"].split(".")[1]) == 6
    assert len(fields["last_router_entropy"].split(".")[1]) == 4
    assert "whet chat" not in out
    assert "3 steps, 96 rows in" in out
    assert "rows/s" in err
    assert re.search(r"step 3/3  loss \d\.\d{4}  grad norm \d+\.\d{4}  router entropy \d\.\d{4}  lr", err)
    assert fields["arch_path"] == fields["arch"]


def test_quiet_run_prints_only_the_result(cli, config, tmp_path):
    code, out, err = cli("train", config, "--quiet")
    assert (code, err) == (0, "")
    assert fields_of(out)["steps_run"] == "3"
    assert "precision" in (tmp_path / "runs" / "q" / "log.txt").read_text(), "the log is whole"


def test_eval_finished_quality_run(cli, config, tmp_path, monkeypatch):
    assert cli("train", config)[0] == 0
    monkeypatch.chdir(tmp_path)
    for name in ("runs/q", tmp_path / "runs" / "q", "./runs/q/final"):
        code, out, err = cli("eval", name, "--data", "synth:quality-valid:32", "--json")
        assert code == 0, err
        assert json.loads(out)["eval_loss"] > 0
    code, out, err = cli("eval", "runs/q", "--data", "synth:regression:8")
    assert (code, "eval loss" in out, "eval router entropy mean" in out) == (0, True, True)
    code, out, err = cli("eval", "runs/q", "--data", "synth:house:4")
    assert (code, out) == (2, "")
    assert "synth:house:4#1" in err


def test_language_model_commands_reject_quality_run(cli, config, tmp_path, monkeypatch):
    assert cli("train", config)[0] == 0
    monkeypatch.chdir(tmp_path)
    for command, *options in (
        ("generate", "hi"),
        ("chat",),
        ("export", "--to", "hf"),
    ):
        for name in ("runs/q", tmp_path / "runs" / "q", "./runs/q/final"):
            code, out, err = cli(command, name, *options)
            assert (code, out) == (2, "")
            assert "final is a quality model for rows of numbers, not a language model" in err
            assert "load_quality" in err


def test_quality_dry_run_matches_run_without_model(cli, config, tmp_path):
    code, out, err = cli("train", config, "model.quality=tiny", "--dry-run")
    assert code == 0, err
    fields = fields_of(out)
    assert (fields["total_params"], fields["last_router_entropy"]) == ("84984276", "nan")
    assert (tmp_path / "runs" / "q-dry-run" / "final" / "checkpoint.tkp1").is_file()


@pytest.mark.parametrize("size", ["nano", "tiny", "medium", "full"])
@pytest.mark.parametrize("arm", ["softmax", "sheaf-padic", "dense"])
def test_plan_shows_quality_sizes_without_allocating(cli, config, size, arm, monkeypatch):
    monkeypatch.setattr("torch.nn.Linear.__init__", lambda *_, **__: pytest.fail("a layer was built"))
    code, out, err = cli("plan", config, f"model.quality={size}", f"model.arm={arm}", "--json")
    assert code == 0, err
    costs = json.loads(out)
    assert costs["bytes"]["total"] > 16 * costs["param_count"]
    assert costs["architecture"]["size"] == size
    assert len(costs["fingerprint"]) == 64
    code, out, err = cli("plan", config, f"model.quality={size}")
    assert "parameters" in out


def test_create_and_check_ledgers(cli, tmp_path):
    code, out, err = cli("ledger", "create", tmp_path / "l", "--rows", 40)
    assert (code, "36 joined" in out) == (0, True), err
    code, out, err = cli("ledger", "check", tmp_path / "l")
    assert (code, "40 decisions" in out) == (0, True)
    code, out, err = cli("ledger", "create", tmp_path / "l")
    assert (code, "already exists" in err) == (2, True)
    (tmp_path / "file").touch()
    code, out, err = cli("ledger", "create", tmp_path / "file")
    assert (code, "file cannot be created: File exists" in err) == (2, True)
    (tmp_path / "l" / "quality_outcomes.db").write_bytes(b"broken" * 1000)
    code, out, err = cli("ledger", "check", tmp_path / "l")
    assert code == 2
    assert err.count("error:") == 1
    assert "quality_outcomes.db cannot be read as a ledger" in err


def test_ablation_trains_every_arm_once(cli, config, tmp_path):
    command = ("ablate", config, "run.steps=2", "--seeds", 2)
    code, out, err = cli(*command)
    assert code == 0, err
    assert out.count("do not differ significantly") + out.count("is significantly better than") == 3
    stored = json.loads((tmp_path / "runs" / "q" / "ablation.json").read_text())
    assert list(stored["arms"]) == ["softmax", "sheaf-padic", "dense"]
    assert [run["reused"] for run in stored["runs"]] == [False] * 6
    data = set()
    for run in stored["runs"]:
        directory = tmp_path / "runs" / "q" / f"{run['arm']}-seed-{run['seed']}"
        data.add(json.dumps(json.loads((directory / "provenance.json").read_text())["data_sha256"]))
        state = json.loads((directory / "checkpoints" / "step-000002" / "state.json").read_text())
        data.add(f"{run['seed']} {state['data']}")
    assert len(data) == 1 + 2  # the same rows for all, the same order for all arms of a seed
    assert len({run["value"] for run in stored["runs"]}) == 6
    code, second_out, err = cli(*command)
    assert code == 0, err
    assert second_out.split("written")[0] == out.split("written")[0]
    stored = json.loads((tmp_path / "runs" / "q" / "ablation.json").read_text())
    assert [run["reused"] for run in stored["runs"]] == [True] * 6
    code, _, err = cli(*command, "optim.lr=0.5")
    assert code == 2
    assert "optim.lr: 0.01 became 0.5" in err
    for changed in ("run.steps=4", "eval.batches=1"):
        code, _, err = cli("ablate", config, "run.steps=2", changed, "--seeds", 3)
        assert code == 2
        assert f"was started with a different {changed.partition('=')[0]} than the other runs" in err
    assert not (tmp_path / "runs" / "q" / "dense-seed-2").exists(), "checked before anything is trained"


def test_interrupted_ablation_resumes(cli, config, tmp_path, monkeypatch):
    command = ("ablate", config, "run.steps=2", "checkpoint.every=1", "--seeds", 2, "--arms", "softmax,dense")
    steps = []

    class StopOnce(RunProgress):
        def on_step_end(self, step, metrics):
            steps.append(step)
            return StopRun("interrupted", unfinished=True) if len(steps) == 3 else None

    monkeypatch.setattr("whet.reporting.progress.RunProgress", StopOnce)
    code, out, err = cli(*command)
    assert (code, "rerun the same command to resume" in err) == (3, True)
    code, out, err = cli(*command)
    assert code == 0, err
    assert len(steps) == 8  # no step was repeated
    stored = json.loads((tmp_path / "runs" / "q" / "ablation.json").read_text())
    assert [run["reused"] for run in stored["runs"]] == [True, False, False, False]


def test_ctrl_c_before_first_step_of_ablation_is_reported(cli, config, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt("nothing to save")

    monkeypatch.setattr("whet.studies.sweep.train", interrupted)
    code, _, err = cli("ablate", config, "--seeds", 2)
    assert code == 130
    assert "nothing to save" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "softmax,sparse"], "unknown arm 'sparse'"),
        (["--arms", "softmax"], "a comparison needs at least two arms"),
        (["data.valid=null"], "eval_loss, which needs data.valid"),
    ],
)
def test_ablation_rejects_invalid_configs(cli, config, arguments, message):
    code, _, err = cli("ablate", config, *arguments)
    assert code == 2
    assert message in err


def test_data_rejects_quality_runs(cli, config):
    code, _, err = cli("data", config)
    assert code == 2
    assert "needs a language model" in err


def test_dry_run_rejects_flop_budget_of_quality_run(cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{quality: nano}}\nrun: {{dir: {tmp_path / 'runs'}, budget: {{flops: 1e9}}}}\n")
    for options in ((), ("--dry-run",)):
        code, _, err = cli("train", path, *options)
        assert code == 2
        assert "run.budget.flops: whet cannot count the FLOPs of this model" in err
