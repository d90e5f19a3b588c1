"""Hidden-state matching: the formula, projections in checkpoints, and unsupported models."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import whet
from tiny import random_examples, run_config, write_tiny_model
from whet.config.load_config import validate_config
from whet.data.batches import make_batch
from whet.errors import ConfigError
from whet.objectives.distill import Distillation
from whet.objectives.hidden_matching import HiddenMatching, layer_outputs
from whet.training.callbacks import Callback, StopRun
from whet.training.checkpoint import checkpoint_path


@pytest.fixture
def teacher_directory(tmp_path):
    write_tiny_model(tmp_path / "teacher", hidden_size=48, intermediate_size=80, num_hidden_layers=3)
    return tmp_path / "teacher"


def states(directory, tokens):
    """Return the output of each layer, counted from 1, of the transformers model."""
    model, seen = LlamaForCausalLM.from_pretrained(directory).double(), {}
    for number, layer in enumerate(model.model.layers, start=1):
        layer.register_forward_hook(
            lambda _, __, out, number=number: seen.__setitem__(
                number, out if torch.is_tensor(out) else out[0]
            )
        )
    model(tokens)
    return {number: actual[0] for number, actual in seen.items()}


@pytest.mark.parametrize("kind", ["mse", "cosine"])
@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_distance_matches_the_formula(tiny_directory, teacher_directory, kind, projected, checkpointed):
    where = teacher_directory if projected else tiny_directory
    student, _ = whet.load(tiny_directory, dtype=torch.float64, device="cpu")
    teacher, _ = whet.load(where, dtype=torch.float64, device="cpu")
    student.requires_grad_(True)
    student.grad_checkpoint = checkpointed
    layers = {1: 2} if projected else {1: 2, 2: 1}
    matching = HiddenMatching(student, teacher, layers, kind=kind, weight=3.0)
    assert (matching.projections is not None) == projected
    if projected:
        matching.projections.double()
    objective = Distillation([(teacher, 1.0)], temperature=2.0, alpha=0.6, matching=matching)
    assert objective.coefficients["hidden_loss"] == 3.0
    examples = random_examples(3, seed=5)
    batch = make_batch([examples])
    result = objective.loss(student, batch)
    result.sums["hidden_loss"].backward()
    expected = 0.0
    for example in examples:
        tokens = torch.tensor([example.tokens[:-1]])
        ours, theirs = states(tiny_directory, tokens), states(where, tokens)
        for own, other in layers.items():
            actual, wanted = ours[own], theirs[other]
            if projected:
                actual = actual @ matching.projections[f"after-{own}"].weight.detach().T
            for place in range(1, len(example.tokens)):
                if example.supervised[place]:
                    a, b = actual[place - 1], wanted[place - 1]
                    if kind == "mse":
                        each = ((a - b) ** 2).sum() / len(a)
                    else:
                        each = 1 - a @ b / (a.norm() * b.norm())
                    expected += each.item() / len(layers)
    assert result.sums["hidden_loss"].item() == pytest.approx(expected, rel=1e-6)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert student.layers[0].mlp.down_proj.weight.grad.norm() > 0
    if projected:
        assert student.layers[1].mlp.down_proj.weight.grad is None  # it comes after the layer that is matched
        assert matching.projections["after-1"].weight.grad.norm() > 0


def distilled(tiny_directory, tmp_path, teacher_directory, name, **hidden):
    return run_config(
        tiny_directory, tmp_path,
        objective={
            "kind": "distill", "teacher": str(teacher_directory), "alpha": 0.5,
            "hidden": {"layers": {1: 1, 2: 3}, **hidden},
        },
        optim={"lr": 1e-2},
        run={"name": name, "steps": 6, "batch_size": 6},
    )  # fmt: skip


@pytest.mark.parametrize("method", [{"kind": "lora", "rank": 4}, {"kind": "full"}])
def test_projections_are_trained_and_resumed_but_not_saved_in_the_final_model(
    tiny_directory, tmp_path, teacher_directory, method
):
    class StopAt(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 3 else None

    def config(name):
        return distilled(tiny_directory, tmp_path, teacher_directory, name) | {"method": method}

    whole = whet.train(config("whole"))
    assert whole.metrics["eval_hidden_loss"] < whole.history[0]["eval_hidden_loss"]
    names = load_file(checkpoint_path(whole.directory, 6) / "weights.safetensors").keys()
    assert {"heads.after-1.weight", "heads.after-2.weight"} <= names
    for file in (whole.directory / "final").glob("*.safetensors"):
        assert not [name for name in load_file(file) if "after-" in name]
    whet.load(whole.directory)
    part = whet.train(config("part"), [StopAt()])
    rest = whet.resume(part.directory)
    losses = [row["loss"] for row in whole.history if "loss" in row]
    assert [row["loss"] for row in (*part.history, *rest.history) if "loss" in row] == losses
    one, other = (
        load_file(checkpoint_path(run.directory, 6) / "weights.safetensors") for run in (whole, rest)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradient_does_not_depend_on_the_micro_batches(tiny_directory, tmp_path, teacher_directory):
    actual = []
    for name, micro in (("one", 4096), ("many", 200)):
        config = distilled(tiny_directory, tmp_path, teacher_directory, name, kind="cosine")
        config["run"] |= {"micro_batch_tokens": micro, "steps": 1}
        actual.append(whet.train(config).history[1])
    assert actual[0]["grad_norm"] == pytest.approx(actual[1]["grad_norm"], rel=1e-5)


def test_unsupported_models_and_layers_are_errors(tiny_directory, tmp_path, teacher_directory):
    config = distilled(tiny_directory, tmp_path, teacher_directory, "run", layers={1: 4})
    with pytest.raises(ConfigError, match=r"teacher has no layer 4, only 1 to 3"):
        whet.train(config)
    for change in ({"offline": {"top_k": 4}}, {"teacher": [{"model": "a"}, {"model": "b"}]}):
        wrong = copy.deepcopy(config)
        wrong["objective"] |= change
        with pytest.raises(ConfigError, match="hidden needs a single teacher that runs in each step"):
            validate_config(wrong)
    wrong = distilled(tiny_directory, tmp_path, teacher_directory, "run", layers={0: 1})
    with pytest.raises(ConfigError, match="greater than 0"):
        validate_config(wrong)
    student, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="compiled"), layer_outputs(student, [1]):
        pass  # no hook was called
