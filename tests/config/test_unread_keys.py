"""Keys that another kind would read are named, and only those."""

import pytest

from tiny import run_config
from whet.config.checks.unread_keys import unread_lines
from whet.config.load_config import make_config, to_dict

FULL = {"kind": "full"}


@pytest.mark.parametrize(
    ("sections", "key", "choice"),
    [
        ({"method": {**FULL, "rank": 4}}, "method.rank", "method.kind: full"),
        ({"method": {**FULL, "targets": "attention"}}, "method.targets", "method.kind: full"),
        ({"method": {**FULL, "lr_ratio": 4}}, "method.lr_ratio", "method.kind: full"),
        ({"objective": {"kind": "ipo", "label_smoothing": 0.1}}, "objective.label_smoothing", "objective.kind: ipo"),
        ({"objective": {"kind": "simpo", "reference": "online"}}, "objective.reference", "objective.kind: simpo"),
        ({"objective": {"kind": "dpo", "gamma": 0.5}}, "objective.gamma", "objective.kind: dpo"),
        ({"objective": {"kind": "distrust", "alpha": 2.5}}, "objective.alpha", "objective.mode: weight"),
        (
            {"objective": {"kind": "distrust", "mode": "additive", "strength": 0.5}},
            "objective.strength",
            "objective.mode: additive",
        ),
        ({"optim": {"nesterov": True}}, "optim.nesterov", "optim.name: adamw"),
        ({"optim": {"name": "sgd", "betas": [0.8, 0.9]}}, "optim.betas", "optim.name: sgd"),
        ({"optim": {"name": "lion", "eps": 1e-6}}, "optim.eps", "optim.name: lion"),
        ({"optim": {"schedule": "cosine", "decay_every": 5}}, "optim.decay_every", "optim.schedule: cosine"),
        ({"optim": {"schedule": "constant", "min_lr_ratio": 0}}, "optim.min_lr_ratio", "optim.schedule: constant"),
        (
            {"optim": {"schedule": [{"kind": "wsd", "steps": 2}, {"kind": "linear"}], "decay_factor": 0.1}},
            "optim.decay_factor",
            "optim.schedule: wsd, linear",
        ),
        (
            {"data": {"curriculum": {"kind": "length", "score": "grade"}}},
            "data.curriculum.score",
            "data.curriculum.kind: length",
        ),
        (
            {"data": {"curriculum": {"kind": "difficulty", "score": "grade", "stages": 2}}},
            "data.curriculum.stages",
            "data.curriculum.kind: difficulty",
        ),
    ],
)  # fmt: skip
def test_what_the_chosen_kind_does_not_read_is_named(tiny_directory, tmp_path, sections, key, choice):
    config = make_config(clean(tiny_directory, tmp_path, **sections))
    assert unread_lines(config) == [f"{key} has no effect with {choice}"]
    assert unread_lines(make_config(to_dict(config))) == unread_lines(
        config
    )  # with every default written out


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"method": FULL},
        {"method": {"kind": "qlora", "rank": 4, "targets": "qv", "lr_ratio": 2.0}},
        {"method": FULL, "objective": {"kind": "classify", "classes": 2}},  # targets are qv there
        {"objective": {"kind": "dpo", "label_smoothing": 0.1, "reference": "online"}},
        {"objective": {"kind": "simpo", "gamma": 0.5, "beta": 1.0}},
        {"objective": {"kind": "distrust", "strength": 0.5}},
        {"optim": {"name": "sgd", "momentum": 0.5, "nesterov": True}},
        {"optim": {"name": "muon", "betas": [0.8, 0.9], "eps": 1e-6}},
        {"optim": {"schedule": "step", "decay_every": 5, "decay_factor": 0.1, "min_lr_ratio": 0}},
        {"optim": {"schedule": [{"kind": "constant", "steps": 2}, {"kind": "wsd"}], "decay_fraction": 0.2}},
        {"data": {"curriculum": {"kind": "length", "stages": 2, "steps": 3, "shortest": 8}}},
        {"data": {"curriculum": {"kind": "difficulty", "hard": "a", "ramp": 0.2}}},
    ],
)
def test_what_is_read_is_not(tiny_directory, tmp_path, sections):
    config = make_config(clean(tiny_directory, tmp_path, **sections))
    assert unread_lines(config) == []
    assert unread_lines(make_config(to_dict(config))) == []


def test_the_parts_of_a_mix_are_looked_into(tiny_directory, tmp_path):
    parts = [
        {"objective": {"kind": "sft"}, "data": {"train": "a", "curriculum": {"kind": "length", "ramp": 0.1}}},
        {"objective": {"kind": "ipo", "gamma": 2}, "data": {"train": "a"}},
    ]
    config = clean(tiny_directory, tmp_path, objective={"kind": "mix", "parts": parts})
    del config["data"]
    assert unread_lines(make_config(config)) == [
        "objective.parts.0.data.curriculum.ramp has no effect with "
        "objective.parts.0.data.curriculum.kind: length",
        "objective.parts.1.objective.gamma has no effect with objective.parts.1.objective.kind: ipo",
    ]


def clean(tiny_directory, tmp_path, **sections):
    """A config in which nothing but `sections` is unusual."""
    config = run_config(tiny_directory, tmp_path)
    data = {"train": "synth:house:8", **sections.pop("data", {})}
    return {"model": config["model"], "data": data, "run": config["run"], **sections}
