"""Effects of objectives: preferences change the style of completions, and a teacher helps more than text."""

import pytest

import whet
from styles import style_shares
from tiny import run_config, write_tiny_model
from whet.data.synthetic.generators import generate


def test_preferences_change_the_style_of_generated_text(tmp_path):
    """A model that answers mostly in JSON, like three quarters of its records, learns to prefer the other style."""
    write_tiny_model(tmp_path / "tiny", initializer_range=0.05)
    both = [{"source": "synth:house:200", "weight": 1}, {"source": "synth:house-styles:200", "weight": 1}]
    size = {"batch_size": 16, "micro_batch_tokens": 4096}
    start = whet.train(
        run_config(
            tmp_path / "tiny", tmp_path,
            method={"kind": "full"},
            data={"train": both, "valid": None},
            run={"name": "both", "steps": 60, **size},
        )
    )  # fmt: skip
    spoken, json = style_shares(start.directory)
    assert json >= 0.9
    preferred = whet.train(
        run_config(
            start.directory, tmp_path,
            method={"kind": "full"},
            objective={"kind": "dpo", "beta": 0.1},
            data={"train": "synth:house-pairs:60", "valid": "synth:house-pairs-valid:40"},
            optim={"lr": 1e-3},
            run={"name": "dpo", "steps": 20, **size, "batch_size": 8},
        )
    )  # fmt: skip
    assert preferred.metrics["eval_reward_accuracy"] >= 0.95
    after, json_after = style_shares(preferred.directory)
    print(f"spoken {spoken:.0%}, JSON {json:.0%}; after DPO {after:.0%} and {json_after:.0%}")
    assert after >= 0.9


def student(tmp_path, name, objective, *, seed):
    """Train a small model on little text with the given objective."""
    return {
        "model": {"preset": "nano", "d_model": 32, "layers": 1, "heads": 4, "width": 64},
        "method": {"kind": "full"},
        "objective": objective,
        "data": {
            "train": str(tmp_path / "short.txt"),
            "valid": str(tmp_path / "valid.txt"),
            "max_length": 65,
            "too_long": "split",
        },
        "optim": {"lr": 1e-2, "warmup": 5},
        "run": {
            "name": f"{name}-{seed}",
            "dir": str(tmp_path / "runs"),
            "steps": 60,
            "batch_tokens": 512,
            "seed": seed,
            "device": "cpu",
            "precision": "fp32",
        },
    }


@pytest.fixture
def taught(tmp_path):
    """Return a teacher trained on much text, and little text for its students."""
    text, held_out = (generate(f"synth:python-topics{part}")[0]["text"] for part in ("", "-valid"))
    for name, content in (("long", text[:200_000]), ("short", text[:3000]), ("valid", held_out[:8000])):
        (tmp_path / f"{name}.txt").write_text(content)
    config = student(tmp_path, "teacher", {"kind": "sft"}, seed=0)
    config["model"] |= {"d_model": 64, "layers": 2, "width": 128}
    config["data"] |= {"train": str(tmp_path / "long.txt")}
    config["optim"] |= {"lr": 5e-3}
    config["run"] |= {"steps": 120, "batch_tokens": 1024}
    return whet.train(config).directory


def test_distilled_student_beats_a_student_without_teacher(tmp_path, taught):
    """By at least 0.05 nats per token of held-out text, for each of three seeds; measured: 0.12 to 0.15."""
    for seed in range(3):
        soft = {"kind": "distill", "teacher": str(taught), "temperature": 2.0, "alpha": 0.7}
        distilled = whet.train(student(tmp_path, "distilled", soft, seed=seed))
        plain = whet.train(student(tmp_path, "plain", {"kind": "sft"}, seed=seed))
        gain = plain.metrics["eval_loss"] - distilled.metrics["eval_cross_entropy"]
        print(f"seed {seed}: {gain:.3f} nats better")
        assert gain >= 0.05
