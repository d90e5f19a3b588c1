"""Keys that are given and have no effect: another kind than the chosen one reads them."""

from collections.abc import Iterator, Mapping
from typing import Any

from whet.config.objectives.distrust import DistrustObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.mix import MixObjective
from whet.config.objectives.preference import PreferenceObjective
from whet.config.optim import Optim
from whet.config.quality import Quality
from whet.config.run_config import RunConfig
from whet.config.section import Section

Readers = Mapping[str, tuple[str, ...]]  # a key, and the kinds that read it

_ADAM = ("adamw", "adam", "adamw8bit", "muon")
_METHOD: Readers = dict.fromkeys(
    (
        *("rank", "alpha", "dropout", "variant", "targets", "layers", "rank_pattern", "alpha_pattern"),
        *("lr_ratio", "modules_to_save"),
    ),
    ("lora", "qlora"),
)
_PREFERENCE: Readers = {
    "gamma": ("simpo",),
    "label_smoothing": ("dpo",),
    **dict.fromkeys(("reference", "reference_model"), ("dpo", "ipo")),
    "logprobs": ("ipo",),
}
_DISTRUST: Readers = {"strength": ("weight",), "alpha": ("additive",), "scale": ("additive",)}
_CURRICULUM: Readers = {
    **dict.fromkeys(("stages", "steps", "shortest"), ("length",)),
    **dict.fromkeys(("score", "hard", "ramp"), ("difficulty",)),
}
_OPTIMIZER: Readers = {
    "betas": (*_ADAM, "lion"),
    "eps": _ADAM,
    "momentum": ("sgd",),
    "nesterov": ("sgd",),
}
_SCHEDULE: Readers = {
    "min_lr_ratio": ("linear", "cosine", "exponential", "step", "wsd"),
    "decay_every": ("step",),
    "decay_factor": ("step",),
    "decay_fraction": ("wsd",),
}
_QUALITY: Readers = dict.fromkeys(("base", "digits", "tie_digits", "clamp"), ("sheaf-padic",))


def unread(config: RunConfig) -> dict[str, str]:
    """Keys that differ from their default and that nothing reads, each with the choice that makes it so."""
    method = config.method
    if config.objective.kind == "classify" and method.targets == "qv":  # the default there
        method = method.model_copy(update={"targets": "all-linear"})
    return dict(
        [
            *_unread(method, "method", "kind", _METHOD),
            *_of_optim(config.optim),
            *(_unread(config.model, "model", "arm", _QUALITY) if isinstance(config.model, Quality) else ()),
            *_of_objective(config, ""),
        ]
    )


def unread_lines(config: RunConfig) -> list[str]:
    """The same in words."""
    return [f"{key} has no effect with {choice}" for key, choice in unread(config).items()]


def unread_by_objective(values: Mapping[str, Any]) -> set[str]:  # Any: YAML values
    """The keys of an objective, as plain values, that its kind does not read."""
    switch, readers = ("mode", _DISTRUST) if values.get("kind") == "distrust" else ("kind", _PREFERENCE)
    if values.get("kind") not in ("distrust", "dpo", "ipo", "orpo", "simpo"):
        return set()
    return {key for key, kinds in readers.items() if values.get(switch) not in kinds}


def _of_objective(config: RunConfig, place: str) -> Iterator[tuple[str, str]]:
    """What an objective and its data leave unread; of a mix, each part's."""
    if isinstance(config.objective, MixObjective):
        for number, part in enumerate(config.parts().values()):
            yield from _of_objective(part, f"objective.parts.{number}.")
        return
    if isinstance(config.objective, PreferenceObjective):
        yield from _unread(config.objective, f"{place}objective", "kind", _PREFERENCE)
    if isinstance(config.objective, GRPOObjective):
        yield from _of_grpo(config.objective, place)
    if isinstance(config.objective, DistrustObjective):
        yield from _unread(config.objective, f"{place}objective", "mode", _DISTRUST)
    if config.data.curriculum is not None:
        yield from _unread(config.data.curriculum, f"{place}data.curriculum", "kind", _CURRICULUM)


def _of_grpo(section: GRPOObjective, place: str) -> Iterator[tuple[str, str]]:
    if section.reference_model is not None and not section.beta:
        yield f"{place}objective.reference_model", f"{place}objective.beta: 0"


def _of_optim(section: Optim) -> Iterator[tuple[str, str]]:
    yield from _unread(section, "optim", "name", _OPTIMIZER)
    kinds = {part.kind for part in section.parts}
    choice = f"optim.schedule: {', '.join(part.kind for part in section.parts)}"
    for key in _given(section, _SCHEDULE):
        if kinds.isdisjoint(_SCHEDULE[key]):
            yield f"optim.{key}", choice


def _unread(section: Section, place: str, switch: str, readers: Readers) -> Iterator[tuple[str, str]]:
    chosen = getattr(section, switch)
    for key in _given(section, readers):
        if chosen not in readers[key]:
            yield f"{place}.{key}", f"{place}.{switch}: {chosen}"


def _given(section: Section, keys: Readers) -> Iterator[str]:
    fields = type(section).model_fields
    return (key for key in keys if getattr(section, key) != fields[key].get_default())
