"""GRPO runs: metrics rows, samples, evaluations, exact resume, and errors."""

import json

import psutil
import pytest
import torch
from safetensors.torch import load_file

import whet
from tiny import run_config
from whet.errors import CheckpointError, ConfigError, DataError, RunError
from whet.rl import rollouts
from whet.rl.rollouts import RolloutStream, completion_seed
from whet.training.callbacks import Callback, StopRun

SHORT = {"function": "length", "arguments": {"longest": 2, "margin": 20}}
METHODS = {
    "lora": {"method": {"kind": "lora", "rank": 4}},
    "full": {"method": {"kind": "full"}, "optim": {"lr": 1e-3}},
}


@pytest.fixture
def before():
    """The child processes that exist before the test, such as those of other tests."""
    return set(psutil.Process().children())


def grpo_config(tiny_directory, tmp_path, **sections):
    """Return a config with a reward for short completions, in which even a random model varies."""
    objective = {
        "kind": "grpo",
        "rewards": [SHORT],
        "group_size": 3,
        "max_new_tokens": 6,
        "reward_workers": 1,
    }
    sections["objective"] = {**objective, **sections.get("objective", {})}
    sections["data"] = {"train": "synth:sums:10", "valid": None, **sections.get("data", {})}
    sections["run"] = {"batch_size": 2, **sections.get("run", {})}
    return run_config(tiny_directory, tmp_path, **sections)


def rows(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("stopped by the test", unfinished=True) if step == self.step else None


def test_metrics_rows_samples_and_evaluations(tiny_directory, tmp_path, before):
    sections = {
        "data": {"valid": "synth:sums-valid:5", "test": "synth:sums-valid:4"},
        "objective": {
            "rewards": [SHORT, {"function": "exact_match", "weight": 2.0, "name": "right"}],
            "samples_every": 2,
            "samples": 1,
            "beta": 0.1,
            "inner_epochs": 2,
            "group_size": 8,  # enough that some differ
        },
        "eval": {"every": 2},
    }
    result = whet.train(grpo_config(tiny_directory, tmp_path, **sections))
    written = rows(result.directory)
    steps = [row for row in written if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert row["reward_mean"] == pytest.approx(row["reward_mean_length"] + 2 * row["reward_mean_right"])
        assert row["mismatch"] <= row["mismatch_max"] < 1e-4
        assert row["generation_tokens_per_s"] > 0
        assert row["tokens_per_s"] > 0
        assert 0 <= row["no_signal_fraction"] <= 1
        assert 1 <= row["completion_tokens"] <= 6
        assert row["kl"] >= 0
        assert {
            "reward_std",
            "reward_std_right",
            "entropy",
            "clip_fraction",
            "truncated_fraction",
        } <= row.keys()
    assert [row["log_ratio"] < 1e-5 for row in steps] == [True, False, True, False]
    assert steps[0]["kl"] < 1e-9  # the adapters have done nothing yet
    evaluations = [row for row in written if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    for row in evaluations:
        assert row["eval_reward_right"] == row["exact_match"]
        assert "eval_loss" not in row
    assert result.best["metric"] == "eval_reward"
    test = written[-1]["summary"]["test"]
    assert test["reward"] == pytest.approx(test["reward_length"] + 2 * test["reward_right"])
    samples = rows(result.directory, "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1, 2, 4]
    assert samples[0]["rewards"].keys() == {"length", "right"}
    assert samples[0]["prompt"].endswith("=")
    assert set(psutil.Process().children()) <= before


# rollouts of two steps, twice over: 3 and 5 are inside one, 4 between two
@pytest.mark.parametrize(("method", "pack"), [("lora", True), ("full", False)])
def test_resumed_run_is_bit_identical_to_uninterrupted_run(tiny_directory, tmp_path, method, pack):
    sections = {
        **METHODS[method],
        "data": {"pack": pack},
        "objective": {
            "inner_epochs": 2,
            "minibatches": 2,
            "beta": 0.05,
            "temperature": 1.3,
            "samples_every": 1,
        },
        "run": {"steps": 7, "micro_batch_tokens": 64},
    }
    uninterrupted = whet.train(grpo_config(tiny_directory, tmp_path / "whole", **sections))
    first = whet.train(grpo_config(tiny_directory, tmp_path / "parts", **sections), [StopAt(3)])
    assert first.unfinished
    assert whet.resume(first.directory, [StopAt(4)]).unfinished
    assert whet.resume(first.directory, [StopAt(5)]).unfinished
    last = whet.resume(first.directory)
    assert last.steps == 7
    name = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    expected, actual = (
        load_file(uninterrupted.directory / "final" / name),
        load_file(last.directory / "final" / name),
    )
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
    timed = ("step_s", "elapsed_s", "peak_gib", "generation_s", "reward_s")
    for a, b in zip(rows(uninterrupted.directory)[:-1], rows(last.directory)[:-1], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == b[key] or key in timed or key.endswith("_per_s"), key
    assert rows(uninterrupted.directory, "samples.jsonl") == rows(last.directory, "samples.jsonl")


def test_samples_after_the_checkpoint_are_moved_aside(tiny_directory, tmp_path):
    sections = {"objective": {"samples_every": 1, "samples": 1}}
    first = whet.train(grpo_config(tiny_directory, tmp_path, **sections), [StopAt(2)])
    with (first.directory / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prompt": "lost"}\n')
    whet.resume(first.directory)
    assert [row["step"] for row in rows(first.directory, "samples.jsonl")] == [1, 2, 3, 4]
    assert "lost" in (first.directory / "samples.superseded.jsonl").read_text()


def test_resume_with_changed_rewards_is_rejected(tiny_directory, tmp_path):
    first = whet.train(grpo_config(tiny_directory, tmp_path), [StopAt(2)])
    path = first.directory / "config.yaml"
    path.write_text(path.read_text().replace("margin: 20", "margin: 10"))
    with pytest.raises(CheckpointError, match="objective.rewards"):
        whet.resume(first.directory)


def stream_of(monkeypatch, tiny_directory, tmp_path, **sections):
    """Return the stream of a run that is stopped before its first step."""
    seen = {}

    def remember(stream):
        seen["stream"] = stream
        raise RunError("seen")

    monkeypatch.setattr(RolloutStream, "_sample_rollout", remember)
    with pytest.raises(RunError, match="seen"):
        whet.train(grpo_config(tiny_directory, tmp_path, **sections))
    return seen["stream"]


def test_every_prompt_occurs_once_per_epoch_and_steps_are_counted(monkeypatch, tiny_directory, tmp_path):
    sections = {"objective": {"minibatches": 2, "inner_epochs": 3}, "run": {"steps": None, "epochs": 3}}
    stream = stream_of(monkeypatch, tiny_directory, tmp_path, **sections)
    asked = []
    for stream.rollout_index in range(5):  # of four prompts each
        asked += stream._next_prompts()
    assert sorted(asked[:10]) == sorted(asked[10:]) == list(range(10))
    assert asked[:10] != asked[10:]
    # 30 prompts are 8 rollouts of 4: 3 begin in the first epoch, 2 in the second, 3 in the third
    assert [stream.steps_in(epoch) for epoch in range(3)] == [18, 12, 18]


def test_every_completion_has_its_seed():
    seeds = {
        completion_seed(seed, rollout, row) for seed in range(3) for rollout in range(3) for row in range(3)
    }
    assert len(seeds) == 27


def test_first_step_trains_on_complete_sampled_groups(tiny_directory, tmp_path, monkeypatch):
    """Tokens, masks and advantages of a batch belong to the same completion, for every micro-batch size."""
    seen = []
    original = RolloutStream.__next__

    def spy(stream):
        batches = original(stream)
        seen.append((stream.current, batches, stream))
        return batches

    monkeypatch.setattr(RolloutStream, "__next__", spy)
    sections = {"objective": {"minibatches": 2}, "run": {"steps": 1, "micro_batch_tokens": 40}}
    whet.train(grpo_config(tiny_directory, tmp_path, **sections))
    [(rollout, batches, stream)] = seen
    by_tokens = {}
    for index, completion in enumerate(rollout.completions):
        prompt = stream.prompts[rollout.prompts[index // 3]]
        by_tokens[(*prompt.tokens, *completion)] = index
    learned = []
    for batch in batches:
        assert batch.tokens.shape[1] <= 40
        owners = batch.examples.tolist()
        flat, targets = batch.tokens.flatten().tolist(), batch.targets.flatten().tolist()
        for example in range(len(batch.origins)):
            places = [
                p
                for p, owner in zip(batch.supervised_positions.tolist(), owners, strict=True)
                if owner == example
            ]
            answer = [targets[place] for place in places]
            index = next(
                i
                for tokens, i in by_tokens.items()
                if list(tokens[-len(answer) :]) == answer and flat[places[0]] == tokens[-len(answer) - 1]
            )
            assert rollout.completions[index] == answer
            assert batch.column("lengths")[example] == len(answer)
            assert batch.column("advantages")[example].item() == pytest.approx(rollout.advantages[index])
            chosen = batch.column("old_logprobs")[torch.tensor(owners) == example]
            assert chosen.tolist() == pytest.approx(rollout.old_logprobs[rollout.kept.index(index)])
            learned.append(index)
    assert len(learned) == 6  # two of the four groups
    assert len({index // 3 for index in learned}) == 2


@pytest.mark.parametrize("advantage", ["group", "reinforce"])
def test_reachable_reward_increases(tiny_directory, tmp_path, advantage):
    """A random model learns to write more digits."""
    (tmp_path / "digits.py").write_text(
        "def digits(prompt, completion, record):\n    return sum(c.isdigit() for c in completion) / 6\n"
    )
    sections = {
        "objective": {
            "rewards": [f"{tmp_path}/digits.py:digits"],
            "advantage": advantage,
            "group_size": 16,
        },
        "optim": {"lr": 2e-2, "warmup": 0, "schedule": "constant"},
        "run": {"steps": 12, "batch_size": 4},
    }
    history = whet.train(grpo_config(tiny_directory, tmp_path, **sections)).history
    assert history[0]["reward_mean"] < 0.15
    assert history[-1]["reward_mean"] > history[0]["reward_mean"] + 0.25


def test_truncated_completions_are_masked_if_configured(tiny_directory, tmp_path):
    sections = {"objective": {"mask_truncated": True, "max_new_tokens": 1}}
    with pytest.raises(
        RunError, match="none of the 6 completions of rollout 1 ended within .*max_new_tokens=1"
    ) as caught:
        whet.train(grpo_config(tiny_directory, tmp_path, **sections))
    assert "mask_truncated to false" in caught.value.hint
    seen = []
    original = RolloutStream._compute_logprobs

    def spy(stream, examples):
        seen.append(len(examples))
        return original(stream, examples)

    sections = {
        "objective": {"mask_truncated": True, "max_new_tokens": 6, "group_size": 8},
        "run": {"steps": 2, "name": "some"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutStream, "_compute_logprobs", spy)
        patch.setattr("whet.rl.rollout_sampler.stop_tokens", lambda *_: set(range(40)))
        result = whet.train(grpo_config(tiny_directory, tmp_path, **sections))
    for count, row in zip(seen, result.history, strict=True):
        assert count == round(16 * (1 - row["truncated_fraction"])) < 16


def test_sampler_that_differs_from_the_policy_raises(tiny_directory, tmp_path, monkeypatch):
    original = rollouts.RolloutSampler.complete

    def other(sampler, *args, **kwargs):
        actual = original(sampler, *args, **kwargs)
        for completion in actual:
            completion.logprobs[:] = [value - 0.1 for value in completion.logprobs]
        return actual

    monkeypatch.setattr(rollouts.RolloutSampler, "complete", other)
    with pytest.raises(
        RunError, match="the sampler's and the trainer's log-probabilities .* differ by 0.1 on"
    ):
        whet.train(grpo_config(tiny_directory, tmp_path))
    loose = {"objective": {"mismatch_tolerance": 0.2}, "run": {"name": "loose"}}
    assert whet.train(grpo_config(tiny_directory, tmp_path, **loose)).metrics["mismatch"] == pytest.approx(
        0.1, rel=0.01
    )


def test_policy_that_changes_between_passes_raises(tiny_directory, tmp_path, monkeypatch):
    original = RolloutStream._compute_logprobs

    def off(stream, examples):
        old, reference, plain = original(stream, examples)
        return [[value + 0.1 for value in values] for values in old], reference, plain

    monkeypatch.setattr(RolloutStream, "_compute_logprobs", off)
    with pytest.raises(RunError, match="step 1: the trainer's log-probabilities differ by 0.1 from those it"):
        whet.train(grpo_config(tiny_directory, tmp_path, objective={"temperature": 0.9}))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"objective": {"group_size": 1}}, ConfigError, "a group of 1 has no other completion to compare with"),
        ({"objective": {"rewards": ["exact_mach"]}}, ConfigError, "'exact_mach' is not a reward: did you mean 'exact_match'"),
        ({"objective": {"rewards": []}}, ConfigError, "objective.rewards: List should have at least 1 item"),
        ({"objective": {"rewards": ["regex"]}}, ConfigError, "regex cannot be used: .*'pattern'"),
        ({"objective": {"rewards": [SHORT, SHORT]}}, ConfigError, "two rewards are named 'length'"),
        ({"objective": {"group_sise": 4}}, ConfigError, "unknown key 'objective.group_sise', did you mean 'group_size'"),
        ({"data": {"train": "{tmp}/empty.jsonl"}}, DataError, "empty.jsonl contains no records"),
        ({"data": {"max_length": 12}}, DataError, "synth:sums:10#1: a prompt of 9 tokens and objective.max_new_tokens=6 exceed data.max_length of 12 tokens"),
        ({"objective": {"max_new_tokens": 510}, "data": {"max_length": 2048}}, DataError, "=510 exceed the model's context of 512 tokens"),
        ({"run": {"micro_batch_tokens": 12}}, DataError, "do not fit run.micro_batch_tokens=12"),
        ({"run": {"batch_size": None, "batch_tokens": 64}}, ConfigError, "counts a step in prompts: set run.batch_size"),
        ({"method": {"dropout": 0.1}}, ConfigError, "method.dropout must be 0"),
        ({"data": {"curriculum": {"kind": "length"}}}, ConfigError, "does not support data.curriculum"),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected_with_one_message(
    tiny_directory, tmp_path, sections, error, message, before
):
    (tmp_path / "empty.jsonl").write_text("")
    sections = json.loads(json.dumps(sections).replace("{tmp}", str(tmp_path)))
    with pytest.raises(error, match=message):
        whet.train(grpo_config(tiny_directory, tmp_path, **sections))
    assert not (tmp_path / "runs" / "test").exists(), "nothing was begun"
    assert set(psutil.Process().children()) <= before


def test_too_long_prompts_can_be_dropped(tiny_directory, tmp_path, caplog):
    long, short = ({"prompt": text, "completion": "x"} for text in ("y" * 300, "hi"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (long, short)))
    sections = {"data": {"train": f"{tmp_path}/prompts.jsonl", "too_long": "drop"}, "run": {"steps": 1}}
    assert whet.train(grpo_config(tiny_directory, tmp_path, **sections)).steps == 1
    assert "1 prompts are too long and are left out" in caplog.text


def test_failing_reward_stops_the_run_and_shows_the_completion(tiny_directory, tmp_path, before):
    (tmp_path / "bad.py").write_text("def bad(prompt, completion, record):\n    return 1 / 0\n")
    sections = {"objective": {"rewards": [f"{tmp_path}/bad.py:bad"]}}
    with pytest.raises(RunError, match="the reward bad failed: ZeroDivisionError(.|\n)*completion: "):
        whet.train(grpo_config(tiny_directory, tmp_path, **sections))
    assert set(psutil.Process().children()) <= before
    sections = {"objective": {**sections["objective"], "on_error": -1.0}, "run": {"name": "counted"}}
    row = whet.train(grpo_config(tiny_directory, tmp_path, **sections)).history[0]
    assert (row["reward_mean"], row["reward_errors"], row["no_signal_fraction"]) == (-1.0, 6, 1.0)
    sections |= {"data": {"valid": "synth:house-valid:5"}, "eval": {"every": 1}, "run": {"name": "evaluated"}}
    history = whet.train(grpo_config(tiny_directory, tmp_path, **sections)).history
    assert {row["reward_errors"] for row in history if "reward_errors" in row} == {6}
    assert {row["eval_reward_errors"] for row in history if "eval_reward_errors" in row} == {5}


def test_prompts_with_reference_answers_report_exact_match_by_group(tiny_directory, tmp_path):
    path = tmp_path / "questions.jsonl"
    records = [{"question": f"{n}+1?", "answer": str(n + 1), "group": "sums"} for n in range(4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"train": str(path), "valid": str(path), "format": "prompt"}
    objective = {"rewards": [SHORT, "exact_match"]}
    result = whet.train(
        grpo_config(tiny_directory, tmp_path, data=data, objective=objective, run={"steps": 1})
    )
    assert result.metrics["exact_match"] == result.metrics["eval_reward_exact_match"]
    assert result.metrics["exact_match_sums"] == result.metrics["exact_match"]
