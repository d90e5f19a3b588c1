"""Objectives of one's own in a config: nothing is imported before a run, and what cannot be used is named."""

import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

import whet
from tiny import run_commands, run_config
from whet.config.load_config import load_config, make_config, to_dict, to_yaml
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
    """Next-token loss with label smoothing; with none it is whet's own."""

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
        return StopRun("the test says so", unfinished=True) if step == 2 else None


def section(kind, **keys):
    return CustomObjective(kind=kind, **keys)


def losses(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_config_keeps_the_keys_and_imports_nothing(tmp_path):
    keys = {"strength": 0.5, "layers": [1, 2], "nested": {"deep": None, "on": True}}
    objective = {"kind": "no_such_package.module:Objective", **keys}
    config = make_config(
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
def test_what_is_no_objective_is_refused(objective, message):
    config = {"model": "nano", "data": {"train": "a"}, "run": {"name": "x", "steps": 1, "batch_size": 1}}
    with pytest.raises(ConfigError, match=message):
        make_config({**config, "objective": objective})


HERE = f"{__name__}:"


def test_a_class_is_built_with_its_keys_and_a_recipe_is_not():
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
        (f"{HERE}Smoothed", {"smooting": 1}, r"refuses its keys \(smooting\): TypeError: .*'smooting'"),
        (f"{HERE}StopAt", {}, "is neither an objective nor a recipe: StopAt"),
        ("math:floor", {}, "is neither an objective nor a recipe"),
        ("python:Smoothed", {}, r"stands for an object that is passed from Python.*\n.*objective=\.\.\."),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(kind, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_custom(section(kind, **keys), Given())


def test_keys_for_an_object_that_is_built_already_are_refused():
    with pytest.raises(ConfigError, match=r"is built already: it takes no keys \(smoothing\)"):
        load_custom(section("python:Smoothed", smoothing=1), Given(objective=Smoothed()))


def test_a_recipe_of_ones_own_runs_the_config(tiny_directory, tmp_path):
    config = make_config(run_config(tiny_directory, tmp_path, objective={"kind": f"{HERE}OwnRecipe"}))
    assert type(recipe_for(config)) is OwnRecipe


def test_a_run_is_that_of_sft_where_the_loss_is_and_is_resumed_with_the_same_object(tiny_directory, tmp_path):
    plain = whet.train(run_config(tiny_directory, tmp_path / "sft"))
    named = {"kind": f"{HERE}Smoothed", "smoothing": 0.0}
    by_name = whet.train(run_config(tiny_directory, tmp_path / "named", objective=named))
    assert losses(by_name.directory) == pytest.approx(losses(plain.directory), rel=1e-5)
    config = run_config(tiny_directory, tmp_path / "given")
    whole = train(config, given=collect_given(objective=Smoothed(0.1)))
    assert losses(whole.directory) != pytest.approx(losses(plain.directory), rel=1e-3)
    config = run_config(tiny_directory, tmp_path / "parts")
    first = train(config, [StopAt()], given=collect_given(objective=Smoothed(0.1)))
    with pytest.raises(CheckpointError, match="objective 'Smoothed' has changed") as caught:
        resume(first.directory, given=collect_given(objective=Smoothed(0.2)))
    assert caught.value.hint.endswith("objective=Smoothed(...))")
    second = resume(first.directory, given=collect_given(objective=Smoothed(0.1)))
    mine, theirs = (load_file(r.directory / "final" / "adapter_model.safetensors") for r in (second, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_custom_run_is_opened_reported_and_listed_without_its_code(tiny_directory, tmp_path):
    """Its module raises when it is imported: nothing imports it."""
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
