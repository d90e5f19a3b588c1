"""Whether a metric is comparable between runs: the meaning of a loss depends on their configs."""

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
    """Return the config keys that make a metric incomparable between runs; empty if it is comparable."""
    settings = [dict(_defining_keys(config, metric)) for config in configs if config]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    differing = [
        key
        for key in keys
        if len({json.dumps(setting[key], default=str) for setting in settings if key in setting}) > 1
    ]
    kinds = [key for key in differing if key.endswith("objective.kind")]
    return kinds or differing  # the other keys depend on the kind


def _defining_keys(config: Values, metric: str) -> Iterator[tuple[str, object]]:
    """Yield the config keys that define a metric, with their values."""
    measure, objective = quantity(metric), section(config, "objective")
    if measure is None:
        return
    part = metric.rpartition(".")[0].removeprefix("best_").removeprefix("eval_").removeprefix("test_")
    if metric == "loss":
        yield from (
            (f"experts.{key}", section(config, "experts").get(key, 0.0))
            for key in ("load_balancing", "z_loss")
        )
    if measure != "bits" and _is_token_mean(objective):
        yield "model.tokenizer", section(config, "model").get("tokenizer")
    parts = objective.get("parts")
    if not isinstance(parts, list):
        yield from _objective_keys(measure, objective, section(config, "data"), "")
        return
    if not part:
        yield "objective.kind", "mix"
    for number, each in enumerate(each for each in parts if isinstance(each, dict)):
        inner = section(each, "objective")
        if part and part != (each.get("name") or inner.get("kind")):
            continue
        prefix = f"objective.parts.{number}."
        if not part:
            yield f"{prefix}weight", each.get("weight", 1.0)
        yield from _objective_keys(measure, inner, section(each, "data"), prefix)


def _objective_keys(
    measure: str, objective: Values, data: Values, prefix: str
) -> Iterator[tuple[str, object]]:
    if measure == "loss":
        fields = section_of_kind(objective.get("kind")).model_fields
        ignored = {key for key, field in fields.items() if not key_info(field).changes_loss}
        ignored |= unread_by_objective(objective)
        relevant: Mapping[str, Any] = {key: objective[key] for key in objective if key not in ignored}
        yield from flat_keys({"kind": "sft", **relevant}, f"{prefix}objective.")
    if _is_token_mean(objective):
        yield f"{prefix}data.supervise", data.get("supervise", "assistant")


def _is_token_mean(objective: Values) -> bool:
    kind = objective.get("kind")
    return kind not in section_of_kind(kind).answer_level_kinds
