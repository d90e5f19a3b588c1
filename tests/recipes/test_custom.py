"""Custom objectives in a config: when they are imported, and errors for those that cannot be used."""

import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

import whet
from tiny import run_commands, run_config
from whet.config.load_config import load_config, to_dict, to_yaml, validate_config
from whet.config.objectives.custom import CustomObjective
from whet.errors import CheckpointError, ConfigError
from whet.given.given import Given, collect_given
from whet.recipes.custom import load_custom
from whet.recipes.recipe import Recipe
from whet.recipes.registry import recipe_for
from whet.recipes.sft import SFTRecipe
from whet.runs.run import resume, train
from whet.training.callbacks import Callback, StopRun


class Smoothed(whet.Objective):
    """Next-token loss with label smoothing; without smoothing it equals SFT."""

    likelihood = True

    def __init__(self, smoothing=0.0):
        self.smoothing = smoothing

    def weights(self, batch):
        return {"loss": float(batch.supervised)}

    def loss(self, model, batch):
        hidden = model.hidden(batch.tokens, batch.positions, batch.layout()).flatten(0, 1)
        chosen = batch.supervised_positions
        logits = model.logits(hidden[chosen]).float()
        targets = batch.targets.flatten()[chosen]
        summed = F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction="sum")
        return whet.Loss({"loss": summed})


class OwnRecipe(SFTRecipe):
    pass


class StopAt(Callback):
    def on_step_end(self, step, metrics):
        return StopRun("stopped by the test", unfinished=True) if step == 2 else None


def section(kind, **keys):
    return CustomObjective(kind=kind, **keys)


def losses(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_config_keeps_custom_keys_and_imports_nothing(tmp_path):
    keys = {"strength": 0.5, "layers": [1, 2], "nested": {"deep": None, "on": True}}
    objective = {"kind": "no_such_package.module:Objective", **keys}
    config = validate_config(
        {
            "model": "nano",
            "data": {"train": "synth:house:4"},
            "objective": objective,
            "run": {"name": "x", "steps": 1, "batch_size": 1},
        }
    )
    assert isinstance(config.objective, CustomObjective)
    assert config.objective.arguments == keys
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "config.yaml", ["objective.strength=0.25"])
    assert again.objective.arguments == {**keys, "strength": 0.25}
    assert to_dict(config)["objective"] == objective


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"kind": "package:"}, "'package:' does not name a class"),
        (
            {"kind": "__main__:Smoothed"},
            r"put the class in a file, or pass it as an argument, whet.train\(config, objective=",
        ),
        (
            {"kind": "a:B", "f": len},
            "objective: f is <built-in function len>: a config can only contain strings",
        ),
        ({"kind": "a:B", "f": [{"g": object}]}, "objective: f.0.g is"),
        ({"kind": "a:B", "f": {3: 4}}, "objective: f is 3: a config can only contain strings"),
        ({"kind": "stf"}, "unknown kind 'stf', did you mean 'sft'"),
        ({"kind": "dpo", "bata": 1}, "unknown key 'objective.bata', did you mean 'beta'"),
        ({"strength": 1}, "objective: kind is missing"),
    ],
)
def test_non_objectives_are_rejected(objective, message):
    config = {"model": "nano", "data": {"train": "a"}, "run": {"name": "x", "steps": 1, "batch_size": 1}}
    with pytest.raises(ConfigError, match=message):
        validate_config({**config, "objective": objective})


HERE = f"{__name__}:"


def test_objective_class_is_constructed_and_recipe_class_is_not():
    built = load_custom(section(f"{HERE}Smoothed", smoothing=0.2), Given())
    assert (type(built), built.smoothing) == (Smoothed, 0.2)
    assert load_custom(section(f"{HERE}OwnRecipe", any_key=1), Given()) is OwnRecipe
    own = Smoothed(0.3)
    assert load_custom(section("python:Smoothed"), Given(objective=own)) is own
    built = load_custom(section("python:Smoothed", smoothing=0.4), Given(objective=Smoothed))
    assert built.smoothing == 0.4
    assert issubclass(load_custom(section("python:OwnRecipe"), Given(objective=OwnRecipe)), Recipe)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("no_such_module_at_all:X", {}, "objective.kind no_such_module_at_all:X cannot be used: .*No module"),
        ("nowhere.py:X", {}, "nowhere.py is not a file"),
        (f"{HERE}Nothing", {}, r"has no class 'Nothing' \(it has: .*Smoothed"),
        (f"{HERE}Smoothed", {"smooting": 1}, r"does not accept its keys \(smooting\): TypeError: .*'smooting'"),
        (f"{HERE}StopAt", {}, "is neither an objective nor a recipe: StopAt"),
        ("math:floor", {}, "is neither an objective nor a recipe"),
        ("python:Smoothed", {}, r"is a placeholder for a Python object, and no object was passed\n.*objective=\.\.\."),
    ],
)  # fmt: skip
def test_unusable_kinds_raise_clear_errors(kind, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_custom(section(kind, **keys), Given())


def test_keys_for_an_objective_instance_are_rejected():
    with pytest.raises(ConfigError, match=r"is an object, not a class, and cannot accept keys \(smoothing\)"):
        load_custom(section("python:Smoothed", smoothing=1), Given(objective=Smoothed()))


def test_custom_recipe_runs_the_config(tiny_directory, tmp_path):
    config = validate_config(run_config(tiny_directory, tmp_path, objective={"kind": f"{HERE}OwnRecipe"}))
    assert type(recipe_for(config)) is OwnRecipe


def test_custom_loss_equal_to_sft_gives_the_same_run_and_resumes(tiny_directory, tmp_path):
    plain = whet.train(run_config(tiny_directory, tmp_path / "sft"))
    named = {"kind": f"{HERE}Smoothed", "smoothing": 0.0}
    by_name = whet.train(run_config(tiny_directory, tmp_path / "named", objective=named))
    assert losses(by_name.directory) == pytest.approx(losses(plain.directory), rel=1e-5)
    config = run_config(tiny_directory, tmp_path / "given")
    uninterrupted = train(config, given=collect_given(objective=Smoothed(0.1)))
    assert losses(uninterrupted.directory) != pytest.approx(losses(plain.directory), rel=1e-3)
    config = run_config(tiny_directory, tmp_path / "parts")
    first = train(config, [StopAt()], given=collect_given(objective=Smoothed(0.1)))
    with pytest.raises(CheckpointError, match="objective 'Smoothed' has changed") as caught:
        resume(first.directory, given=collect_given(objective=Smoothed(0.2)))
    assert caught.value.hint.endswith("objective=Smoothed(...))")
    second = resume(first.directory, given=collect_given(objective=Smoothed(0.1)))
    resumed_weights, expected_weights = (
        load_file(r.directory / "final" / "adapter_model.safetensors") for r in (second, uninterrupted)
    )
    assert all(torch.equal(resumed_weights[name], expected_weights[name]) for name in expected_weights)


def test_custom_run_is_loaded_reported_and_listed_without_its_code(tiny_directory, tmp_path):
    """The module raises when it is imported, so a passing test shows that nothing imports it."""
    run = whet.train(run_config(tiny_directory, tmp_path)).directory
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "custom_trap.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise RuntimeError('imported')\n"
    )
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["objective"] = {"kind": "custom_trap:Objective", "strength": 1}
    values["eval"]["metrics"] = {"rate": "custom_trap:rate"}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    run_commands(
        ["report", run],
        ["runs", run.parent],
        ["export", run, "--to", "hf"],
        ["generate", run, "2+2=", "--max-tokens", "2"],
        ["eval", run, "--data", "synth:house-test:2"],
        cwd=trap,
    )
    assert "custom_trap:Objective" in (run / "report.html").read_text()
    whet.load(run, device="cpu")
    assert not (tmp_path / "imported").exists()
