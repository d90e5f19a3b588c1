"""Keys without effect for the chosen kind are reported, and no others."""

from typing import get_args

import pytest

from tiny import run_config
from whet.config.checks.error_messages import nested_sections
from whet.config.checks.unread_keys import objective_keys_without_effect, unused_key_messages
from whet.config.load_config import to_dict, validate_config
from whet.config.optim import ScheduleKind
from whet.config.run_config import RunConfig
from whet.config.section import key_info

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
        (
            {"objective": {"kind": "grpo", "rewards": ["exact_match"], "reference_model": "a"}},
            "objective.reference_model",
            "objective.beta: 0",
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
def test_key_without_effect_is_reported(tiny_directory, tmp_path, sections, key, choice):
    config = validate_config(clean(tiny_directory, tmp_path, **sections))
    assert unused_key_messages(config) == [f"{key} has no effect with {choice}"]
    assert unused_key_messages(validate_config(to_dict(config))) == unused_key_messages(
        config
    )  # with every default explicit


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
        {"objective": {"kind": "grpo", "rewards": ["exact_match"], "reference_model": "a", "beta": 0.1}},
        {"optim": {"name": "sgd", "momentum": 0.5, "nesterov": True}},
        {"optim": {"name": "muon", "betas": [0.8, 0.9], "eps": 1e-6}},
        {"optim": {"schedule": "step", "decay_every": 5, "decay_factor": 0.1, "min_lr_ratio": 0}},
        {"optim": {"schedule": [{"kind": "constant", "steps": 2}, {"kind": "wsd"}], "decay_fraction": 0.2}},
        {"data": {"curriculum": {"kind": "length", "stages": 2, "steps": 3, "shortest": 8}}},
        {"data": {"curriculum": {"kind": "difficulty", "hard": "a", "ramp": 0.2}}},
    ],
)
def test_key_with_effect_is_not_reported(tiny_directory, tmp_path, sections):
    config = validate_config(clean(tiny_directory, tmp_path, **sections))
    assert unused_key_messages(config) == []
    assert unused_key_messages(validate_config(to_dict(config))) == []


def test_keys_without_effect_in_mix_parts_are_reported(tiny_directory, tmp_path):
    parts = [
        {"objective": {"kind": "sft"}, "data": {"train": "a", "curriculum": {"kind": "length", "ramp": 0.1}}},
        {"objective": {"kind": "ipo", "gamma": 2}, "data": {"train": "a"}},
    ]
    config = clean(tiny_directory, tmp_path, objective={"kind": "mix", "parts": parts})
    del config["data"]
    assert unused_key_messages(validate_config(config)) == [
        "objective.parts.0.data.curriculum.ramp has no effect with "
        "objective.parts.0.data.curriculum.kind: length",
        "objective.parts.1.objective.gamma has no effect with objective.parts.1.objective.kind: ipo",
    ]


def test_conditions_refer_to_existing_keys_and_values():
    """A typo in a condition would make a key never count as read."""
    sections, conditions = [RunConfig], 0
    for section in sections:
        for field in section.model_fields.values():
            sections += [inner for inner in nested_sections(field.annotation) if inner not in sections]
            if (read_by := key_info(field).used_when) is None:
                continue
            switch = section.model_fields[read_by.switch]
            known = get_args(ScheduleKind if read_by.switch == "schedule" else switch.annotation)
            assert set(read_by.values) <= set(known)
            conditions += 1
    assert conditions > 30


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({}, set()),
        ({"kind": "sft"}, set()),
        ({"kind": "a.py:Mine", "gamma": 1}, set()),
        ({"kind": ["dpo"]}, set()),
        ({"kind": "dpo"}, {"gamma", "logprobs"}),
        ({"kind": "orpo"}, {"gamma", "logprobs", "label_smoothing", "reference", "reference_model"}),
        ({"kind": "distrust"}, {"alpha", "scale"}),  # mode is weight unless it is given
        ({"kind": "distrust", "mode": "additive"}, {"strength"}),
        ({"kind": "grpo", "beta": 0.0}, {"reference_model"}),
        ({"kind": "grpo", "beta": 0.1}, set()),
    ],
)
def test_keys_without_effect_in_plain_objective_values(values, keys):
    assert objective_keys_without_effect(values) == keys


def clean(tiny_directory, tmp_path, **sections):
    """Return a config with defaults except for `sections`."""
    config = run_config(tiny_directory, tmp_path)
    data = {"train": "synth:house:8", **sections.pop("data", {})}
    return {"model": config["model"], "data": data, "run": config["run"], **sections}
