"""The examples of docs/scale.md."""

import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from distributed.checks import train_or_resume  # noqa: F401 # run_world finds it by name
from distributed.harness import run_world
from whet.cli.app import app
from whet.config.load_config import load_config, to_dict

EXAMPLES = Path(__file__).parents[2] / "examples" / "scale"


def test_config_is_valid():
    assert load_config(EXAMPLES / "fsdp-nano.yaml").parallel.kind == "fsdp"


def test_config_runs_on_two_processes(tmp_path):
    config = to_dict(load_config(EXAMPLES / "fsdp-nano.yaml"))
    config["run"] |= {"dir": str(tmp_path), "steps": 2, "device": "cpu", "precision": "fp32"}
    config["eval"] |= {"every": None, "batches": 1}
    first, second = run_world(2, "train_or_resume", out=tmp_path / "out", timeout=120, config=config)
    assert first["losses"] == second["losses"]
    assert (tmp_path / "fsdp-nano" / "final" / "config.json").is_file()


def commands(text):
    """Yield the words of each torchrun command in a script."""
    for line in text.replace("\\\n", " ").splitlines():
        if "torchrun" in line and "-m whet" in line and not line.lstrip().startswith("#"):
            yield shlex.split(line)


def test_slurm_script_starts_torchrun():
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    (words,) = commands(script.read_text())
    assert words[:2] == ["srun", "torchrun"]
    check_torchrun(words[2:])


def test_kubernetes_job_starts_torchrun():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert pod["subdomain"] == service["metadata"]["name"]  # for pod names such as whet-0.whet
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (script,) = pod["containers"][0]["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (words,) = commands(script)
    check_torchrun(words[words.index("torchrun") + 1 :])


def check_torchrun(words):
    """Check that torchrun accepts every option."""
    from torch.distributed.run import parse_args

    numbers = {"$SLURM_NNODES": "2", "$JOB_COMPLETION_INDEX": "0"}
    for name, number in numbers.items():
        words = [word.replace(name, number) for word in words]
    arguments = parse_args(words)
    assert arguments.module
    assert arguments.training_script == "whet"
    assert arguments.rdzv_backend == "c10d"
    assert arguments.max_restarts == 3


@pytest.mark.parametrize("line", ["train c.yaml --nproc 2 --max-restarts 3", "resume runs/demo --nproc 4"])
def test_commands_exist(line):
    group = typer.main.get_command(app)
    context = group.make_context("whet", line.split())
    name, command, rest = group.resolve_command(context, line.split())
    assert command.make_context(name, rest, parent=context).params["nproc"] > 1
