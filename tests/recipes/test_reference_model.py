"""Named reference models of DPO and GRPO."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import whet
from tiny import run_config, write_tiny_model
from whet.config.checks.unread_keys import keys_without_effect
from whet.config.load_config import validate_config
from whet.data.sources.source import open_source
from whet.errors import CheckpointError, ModelError
from whet.planning.plan import plan_run
from whet.runs.assemble import open_assembly
from whet.training.callbacks import Callback, StopRun

METHODS = [{"kind": "full"}, {"kind": "lora", "rank": 4, "dropout": 0.1}]
PAIRS = {"train": "synth:house-pairs:6", "valid": "synth:house-pairs-valid:4", "max_length": 256}


@pytest.fixture
def other(tmp_path):
    """A model of another size with the same vocabulary."""
    write_tiny_model(tmp_path / "other", hidden_size=48, intermediate_size=80)
    return tmp_path / "other"


def dpo_config(model, tmp_path, objective, **sections):
    objective = {"kind": "dpo", "beta": 0.5, **objective}
    sections.setdefault("run", {})
    sections["run"] = {"steps": 3, "batch_size": 3, **sections["run"]}
    return run_config(model, tmp_path, objective=objective, data=PAIRS, **sections)


def grpo_config(model, tmp_path, objective, **sections):
    rewards = [{"function": "length", "arguments": {"longest": 2, "margin": 20}}]
    given = {"kind": "grpo", "rewards": rewards, "group_size": 3, "max_new_tokens": 6, "reward_workers": 1}
    sections["run"] = {"batch_size": 2, "steps": 2, **sections.get("run", {})}
    data = {"train": "synth:sums:10", "valid": None, **sections.pop("data", {})}
    return run_config(model, tmp_path, objective={**given, **objective}, data=data, **sections)


class StopAt(Callback):
    def on_step_end(self, step, metrics):
        return StopRun("stopped by the test", unfinished=True) if step == 1 else None


def losses(result):
    return [row["loss"] for row in result.history if "loss" in row]


def weights(result):
    [file] = (result.directory / "final").glob("*.safetensors")
    return load_file(file)


def chosen_and_rejected(tokenizer, source):
    """Yield the tokens of each pair's two texts, and the position where the completion starts."""
    for record in open_source(source):
        prompt = record.fields["prompt"]
        ask = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for side in ("chosen", "rejected"):
            messages = [*prompt, *record.fields[side]]
            yield tokenizer.apply_chat_template(messages, return_dict=False), len(ask)


def answer_logprob(model, tokens, start):
    """Return the log-probability of a completion, computed by transformers in float64."""
    ids = torch.tensor([tokens])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, ids[0, 1:, None])[start - 1 :].sum())


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
@pytest.mark.parametrize("how", ["precompute", "online"])
def test_loss_matches_the_formula_with_the_named_reference(tiny_directory, other, tmp_path, kind, how):
    objective = {"kind": kind, "reference_model": str(other), "reference": how}
    result = whet.train(dpo_config(tiny_directory, tmp_path, objective, method={"kind": "full"}))
    _, tokenizer = whet.load(tiny_directory)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in (tiny_directory, other)
    )
    with torch.no_grad():
        ratios = [
            answer_logprob(policy, tokens, start) - answer_logprob(reference, tokens, start)
            for tokens, start in chosen_and_rejected(tokenizer, PAIRS["valid"])
        ]
    margins = [better - worse for better, worse in zip(ratios[::2], ratios[1::2], strict=True)]
    expected = [
        -math.log(1 / (1 + math.exp(-0.5 * margin))) if kind == "dpo" else (margin - 1) ** 2
        for margin in margins
    ]
    assert any(abs(margin) > 0.01 for margin in margins), "another model than the policy"
    assert result.history[0]["eval_loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["kind"])
@pytest.mark.parametrize("how", ["precompute", "online"])
def test_naming_the_base_model_as_reference_gives_an_identical_run(tiny_directory, tmp_path, method, how):
    runs = [
        whet.train(
            dpo_config(
                tiny_directory, tmp_path, {"reference": how, **named}, method=method, run={"name": name}
            )
        )
        for name, named in {"plain": {}, "named": {"reference_model": str(tiny_directory)}}.items()
    ]
    if (how, method["kind"]) == ("online", "lora"):  # layers with adapters, switched off, round otherwise
        assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-3, abs=1e-6)
        return
    assert losses(runs[0]) == losses(runs[1])
    first, second = map(weights, runs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_run_and_checkpoint_can_be_references(tiny_directory, tmp_path):
    sft = {"method": {"kind": "lora", "rank": 4}, "run": {"name": "sft", "steps": 2}}
    start = whet.train(run_config(tiny_directory, tmp_path, **sft)).directory
    stored = {}
    for name in (start, start / "checkpoints" / "step-000002"):
        objective = {"reference_model": str(name)}
        result = whet.train(
            dpo_config(tiny_directory, tmp_path, objective, run={"name": f"from-{name.name}"})
        )
        stored[name] = result.history[0]["eval_loss"]
        assert f"reference: {name}" in (result.directory / "log.txt").read_text()
    one, two = stored.values()
    assert one == pytest.approx(two, rel=1e-5)
    assert one != pytest.approx(math.log(2), abs=1e-6), "the reference was trained"


@pytest.mark.parametrize(
    "method", [*METHODS, {"kind": "qlora", "rank": 4}], ids=lambda method: method["kind"]
)
def test_grpo_measures_the_kl_to_the_named_reference(tiny_directory, other, tmp_path, method):
    method = {**method, "dropout": 0.0} if "dropout" in method else method
    objective = {"beta": 0.1, "reference_model": str(other)}
    settings = grpo_config(tiny_directory, tmp_path, objective, method=method, data={"pack": False})
    reference = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float64)
    with open_assembly(validate_config(settings)) as work:
        for batch in next(iter(work.stream)):
            with torch.no_grad():  # padding stands behind the texts, which do not see it
                logprobs = reference(batch.tokens).logits.log_softmax(-1).flatten(0, 1)
            places = batch.supervised_positions
            expected = logprobs[places].gather(1, batch.targets.flatten()[places, None])[:, 0]
            torch.testing.assert_close(
                batch.column("reference_logprobs").double(), expected, rtol=1e-4, atol=1e-4
            )
    if method["kind"] == "full":
        result = whet.train(settings)
        assert losses(result)[0] != 0
        assert result.history[0]["kl"] > 0, "in the first step the policy is not the reference"


def test_grpo_with_the_base_model_as_reference_is_the_same_run(tiny_directory, tmp_path):
    runs = [
        whet.train(
            grpo_config(
                tiny_directory,
                tmp_path,
                {"beta": 0.1, **named},
                method={"kind": "full"},
                run={"name": name},
            )
        )
        for name, named in {"plain": {}, "named": {"reference_model": str(tiny_directory)}}.items()
    ]
    assert losses(runs[0]) == losses(runs[1])


@pytest.mark.parametrize("make", [dpo_config, grpo_config])
def test_reference_with_another_vocabulary_is_rejected(tiny_directory, tmp_path, make):
    write_tiny_model(tmp_path / "larger", vocab_size=300)
    objective = {"beta": 0.1, "reference_model": str(tmp_path / "larger")}
    with pytest.raises(ModelError, match="larger has a vocabulary of 300, but .*: both must have the same"):
        whet.train(make(tiny_directory, tmp_path, objective))
    write_tiny_model(tmp_path / "short", max_position_embeddings=4)
    objective["reference_model"] = str(tmp_path / "short")
    with pytest.raises(ModelError, match="short supports at most 4 tokens, but the longest text has"):
        whet.train(make(tiny_directory, tmp_path, objective))


@pytest.mark.parametrize(
    ("make", "how"), [(dpo_config, "precompute"), (dpo_config, "online"), (grpo_config, None)]
)
def test_run_does_not_resume_with_another_reference(tiny_directory, other, tmp_path, make, how):
    objective = {"beta": 0.1, "reference_model": str(other), **({"reference": how} if how else {})}
    settings = make(tiny_directory, tmp_path, objective)
    part = whet.train(settings, [StopAt()])
    assert part.unfinished
    stored = json.loads((part.directory / "provenance.json").read_text())
    assert list(stored["other_models"]) == [str(other)]
    original = other.rename(tmp_path / "kept")
    write_tiny_model(other, hidden_size=32)
    with pytest.raises(CheckpointError, match="started with a different version of .*other"):
        whet.resume(part.directory)
    for path in other.iterdir():
        path.unlink()
    other.rmdir()
    original.rename(other)
    assert not whet.resume(part.directory).unfinished


def test_distillation_run_does_not_resume_with_another_teacher(tiny_directory, other, tmp_path):
    objective = {"kind": "distill", "teacher": str(other)}
    part = whet.train(run_config(tiny_directory, tmp_path, objective=objective), [StopAt()])
    write_tiny_model(other, hidden_size=48, intermediate_size=80, initializer_range=0.3)
    with pytest.raises(CheckpointError, match="started with a different version of .*other"):
        whet.resume(part.directory)


def test_old_runs_without_a_recorded_reference_resume(tiny_directory, tmp_path):
    part = whet.train(dpo_config(tiny_directory, tmp_path, {}), [StopAt()])
    path = part.directory / "provenance.json"
    stored = json.loads(path.read_text())
    del stored["other_models"]
    path.write_text(json.dumps(stored))
    assert not whet.resume(part.directory).unfinished


def test_unused_reference_is_reported(tmp_path):
    objective = {"reference_model": "other"}
    for given, choice in (
        ({"kind": "orpo"}, "objective.kind: orpo"),
        ({"kind": "simpo"}, "objective.kind: simpo"),
    ):
        config = validate_config(dpo_config("tiny", tmp_path, {**objective, **given}))
        assert keys_without_effect(config)["objective.reference_model"] == choice
    config = validate_config(grpo_config("tiny", tmp_path, {**objective, "beta": 0.0}))
    assert keys_without_effect(config) == {"objective.reference_model": "objective.beta: 0"}
    assert (
        keys_without_effect(validate_config(grpo_config("tiny", tmp_path, {**objective, "beta": 0.1}))) == {}
    )


def test_plan_includes_the_reference(tiny_directory, other, tmp_path):
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(other).parameters()) * 4
    run = {"device": "cpu", "precision": "fp32"}

    def planned(make, objective, method):
        return plan_run(
            validate_config(make(tiny_directory, tmp_path, objective, method=method, run=run)), suggest=False
        )

    named, lora = {"beta": 0.1, "reference_model": str(other)}, {"kind": "lora", "rank": 4}
    online = {**named, "reference": "online"}
    plain = planned(dpo_config, {"reference": "online"}, lora).memory
    with_reference = planned(dpo_config, online, lora).memory
    assert (plain.other_models, with_reference.other_models) == (0, size)
    assert with_reference.peak >= plain.peak + 0.9 * size
    before = planned(dpo_config, named, lora).memory  # asked before the first step, then dropped
    assert before.other_models == size
    assert plain.weights + size <= before.peak < with_reference.peak
    assert planned(grpo_config, named, {"kind": "full"}).memory.other_models == size
