"""Whether a metric is the same quantity in several runs: a loss is what their configs make of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.config.checks.unread_keys import unread_by_objective
from whet.config.load_config import flat_keys
from whet.config.metric_direction import quantity
from whet.config.objectives.union import section_of_kind
from whet.config.section import key_info
from whet.runs.run_files import Values, section


def differing_keys(configs: Sequence[Values], metric: str) -> list[str]:
    """The keys that make a metric another quantity in each of these runs; none: it can be compared."""
    settings = [dict(_defining(config, metric)) for config in configs if config]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    found = [
        key
        for key in keys
        if len({json.dumps(setting[key], default=str) for setting in settings if key in setting}) > 1
    ]
    kinds = [key for key in found if key.endswith("objective.kind")]
    return kinds or found  # of another kind, the other keys are its own


def _defining(config: Values, metric: str) -> Iterator[tuple[str, object]]:
    """The keys that say what a metric is, with their values."""
    what, objective = quantity(metric), section(config, "objective")
    if what is None:
        return
    part = metric.rpartition(".")[0].removeprefix("best_").removeprefix("eval_").removeprefix("test_")
    if metric == "loss":
        yield from (
            (f"experts.{key}", section(config, "experts").get(key, 0.0))
            for key in ("load_balancing", "z_loss")
        )
    if what != "bits" and _is_token_mean(objective):
        yield "model.tokenizer", section(config, "model").get("tokenizer")
    parts = objective.get("parts")
    if not isinstance(parts, list):
        yield from _of_objective(what, objective, section(config, "data"), "")
        return
    if not part:
        yield "objective.kind", "mix"
    for number, each in enumerate(each for each in parts if isinstance(each, dict)):
        inner = section(each, "objective")
        if part and part != (each.get("name") or inner.get("kind")):
            continue
        place = f"objective.parts.{number}."
        if not part:
            yield f"{place}weight", each.get("weight", 1.0)
        yield from _of_objective(what, inner, section(each, "data"), place)


def _of_objective(what: str, objective: Values, data: Values, place: str) -> Iterator[tuple[str, object]]:
    if what == "loss":
        fields = section_of_kind(objective.get("kind")).model_fields
        left_out = {key for key, field in fields.items() if not key_info(field).changes_loss}
        left_out |= unread_by_objective(objective)
        kept: Mapping[str, Any] = {key: objective[key] for key in objective if key not in left_out}
        yield from flat_keys({"kind": "sft", **kept}, f"{place}objective.")
    if _is_token_mean(objective):
        yield f"{place}data.supervise", data.get("supervise", "assistant")


def _is_token_mean(objective: Values) -> bool:
    kind = objective.get("kind")
    return kind not in section_of_kind(kind).answer_level_kinds
