"""Whatever kind of objective or optimizer a config may name is built as itself, never as a default."""

from typing import get_args

import pytest
from torch import nn

from whet.config.objectives import AnyObjective
from whet.config.optim import Optim
from whet.config.section import Section
from whet.config.sections import MixObjective
from whet.errors import ConfigError
from whet.objectives.sft import SFT
from whet.training import optimizers, sketches, tasks
from whet.training.tasks import ObjectiveBuilder, needs_of

SECTIONS = [*get_args(get_args(AnyObjective)[0]), MixObjective]
OTHER_THAN_SFT = ("regression", "mix")  # of rows, and of several parts


def made(section):
    """An instance without its checks: only its class and its kind are looked at."""
    return section.model_construct(
        kind=get_args(section.model_fields["kind"].annotation)[0], classes=2, multi_label=False
    )


class Unheard(Section):
    """A kind that somebody adds to the union and to nothing else."""

    kind: str = "unheard"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_objective_of_a_config_has_a_branch(section, monkeypatch):
    for name in ("_preference", "_distillation", "_multi_token", "_distrust"):
        monkeypatch.setattr(ObjectiveBuilder, name, lambda self, section: section)
    monkeypatch.setattr(ObjectiveBuilder, "_learned", lambda self: [])
    monkeypatch.setattr(tasks, "build_classify", lambda section, *_, **__: section)
    monkeypatch.setattr(tasks, "GRPO", lambda **_: "grpo")
    monkeypatch.setattr(tasks.GRPOObjective, "aggregated_by", "group", raising=False)
    builder = object.__new__(ObjectiveBuilder)
    builder.model = builder.seed = None
    config = made(section)
    needs_of(config)
    if config.kind in OTHER_THAN_SFT:
        with pytest.raises(ConfigError, match=f"objective.kind {config.kind} is not"):
            builder.build(config)
    else:
        assert isinstance(builder.build(config), SFT) == (config.kind == "sft")


def test_an_objective_without_a_branch_is_not_taken_for_sft():
    unheard = Unheard()
    for build in (
        needs_of,
        object.__new__(ObjectiveBuilder).build,
        lambda section: sketches.make_objective(section, None, [], None),
    ):
        with pytest.raises(AssertionError, match="unheard"):
            build(unheard)


def test_every_optimizer_of_a_config_has_a_branch(monkeypatch):
    monkeypatch.setattr(optimizers, "AdamW8bit", lambda *_, **__: "adamw8bit")  # needs bitsandbytes
    kinds = {}
    for name in get_args(Optim.model_fields["name"].annotation):
        section = Optim(name=name)
        model = nn.Linear(2, 2)
        kinds[name] = type(optimizers._create(section, [{"params": list(model.parameters())}], model))
    assert len(set(kinds.values())) == len(kinds), kinds


def test_an_optimizer_without_a_branch_is_not_taken_for_adamw():
    section = Optim().model_copy(update={"name": "unheard"})
    with pytest.raises(AssertionError, match="unheard"):
        optimizers._create(section, [], nn.Linear(2, 2))
