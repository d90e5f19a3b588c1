"""Every example runs: configs are valid, and the demo does what it says, on a model small enough to test with."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from tiny import run_config
from whet.config.load import load_config

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_configs_are_valid(path):
    load_config(path)


def test_the_demo_runs_twice_and_says_how_to_go_on(tiny_directory, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    config = run_config(tiny_directory, tmp_path, run={"steps": 2, "name": "demo"})
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(demo, "CONFIG", tmp_path / "demo.yaml")
    monkeypatch.setattr(demo, "TEST", "synth:house-test:10")
    for directory in ("demo", "demo-2"):
        demo.main()
        said = capsys.readouterr().out
        assert said.count("exact match on 10 test commands") == 2
        assert f"whet chat {tmp_path}/runs/{directory}" in said
        assert (tmp_path / "runs" / directory / "final" / "adapter_model.safetensors").is_file()
