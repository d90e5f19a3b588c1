"""Objectives on a real model: preferences change the style of SmolLM2, and distillation from it helps a student."""

import pytest

import whet
from styles import style_shares
from whet.config.load_config import load_config, validate_config
from whet.data.synthetic.generators import generate
from whet.runs.teach import store_teacher_logprobs


@pytest.mark.slow
def test_preferences_change_the_style_of_smollm2(tmp_path, smollm2_directory):
    """Run two examples in sequence; measured: 0% spoken and 100% JSON before, 100% and 0% after."""
    here = [f"run.dir={tmp_path}", "run.device=cpu"]
    both = whet.train(load_config("examples/house-styles.yaml", [*here, "data.valid=null"]))
    spoken, json = style_shares(both.directory, count=20)
    overrides = [*here, f"model={both.directory}", "data.valid=synth:house-pairs-valid:20"]
    preferred = whet.train(load_config("examples/dpo-house.yaml", overrides))
    after, json_after = style_shares(preferred.directory, count=20)
    accuracy = preferred.metrics["eval_reward_accuracy"]
    print(f"spoken {spoken:.0%}, JSON {json:.0%}; after DPO {after:.0%} and {json_after:.0%}; {accuracy:.0%}")
    assert json >= 0.7
    assert accuracy >= 0.95
    assert after >= 0.9


def student(tmp_path, name, objective, *, seed):
    """Return the config of a model with 3 million parameters and SmolLM2's tokenizer, on 40,000 characters."""
    return {
        "model": {
            "preset": "nano",
            "tokenizer": "smollm2-135m-instruct",
            "d_model": 64,
            "layers": 2,
            "heads": 4,
            "width": 128,
        },
        "method": {"kind": "full"},
        "objective": objective,
        "data": {
            "train": str(tmp_path / "train.txt"),
            "valid": str(tmp_path / "valid.txt"),
            "max_length": 129,
            "too_long": "split",
        },
        "optim": {"lr": 3e-3, "warmup": 5},
        "run": {
            "name": f"{name}-{seed}",
            "dir": str(tmp_path / "runs"),
            "steps": 80,
            "batch_tokens": 512,
            "seed": seed,
            "device": "cpu",
            "precision": "fp32",
        },
    }


@pytest.mark.slow
def test_distilled_student_beats_plain_student(tmp_path, smollm2_directory, monkeypatch):
    """By at least 0.05 nats per held-out token, with three seeds; teacher log-probabilities are computed once."""
    monkeypatch.setenv("WHET_TOKENS", str(tmp_path / "tokens"))
    text, held_out = (generate(f"synth:python-topics{part}")[0]["text"] for part in ("", "-valid"))
    (tmp_path / "train.txt").write_text(text[:40_000])
    (tmp_path / "valid.txt").write_text(held_out[:12_000])
    soft = {
        "kind": "distill",
        "teacher": "smollm2-135m-instruct",
        "temperature": 2.0,
        "alpha": 0.7,
        "offline": {"top_k": 64},
    }
    store_teacher_logprobs(validate_config(student(tmp_path, "distilled", soft, seed=0)))
    for seed in range(3):
        distilled = whet.train(student(tmp_path, "distilled", soft, seed=seed))
        plain = whet.train(student(tmp_path, "plain", {"kind": "sft"}, seed=seed))
        gain = plain.metrics["eval_loss"] - distilled.metrics["eval_cross_entropy"]
        print(f"seed {seed}: {gain:.3f} nats better than {plain.metrics['eval_loss']:.3f}")
        assert gain >= 0.05
