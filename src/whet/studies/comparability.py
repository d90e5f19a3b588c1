"""Whether a metric is comparable between runs: the meaning of a loss depends on their configs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.config.checks.unread_keys import objective_keys_without_effect
from whet.config.load_config import flatten_keys
from whet.config.metric_direction import loss_quantity
from whet.config.objectives.union import objective_section
from whet.config.section import key_info
from whet.runs.run_files import JsonObject, nested_object


def differing_keys(configs: Sequence[JsonObject], metric: str) -> list[str]:
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


def _defining_keys(config: JsonObject, metric: str) -> Iterator[tuple[str, object]]:
    """Yield the config keys that define a metric, with their values."""
    measure, objective = loss_quantity(metric), nested_object(config, "objective")
    if measure is None:
        return
    part = metric.rpartition(".")[0].removeprefix("best_").removeprefix("eval_").removeprefix("test_")
    if metric == "loss":
        yield from (
            (f"experts.{key}", nested_object(config, "experts").get(key, 0.0))
            for key in ("load_balancing", "z_loss")
        )
    if measure != "bits" and _is_token_mean(objective):
        yield "model.tokenizer", nested_object(config, "model").get("tokenizer")
    parts = objective.get("parts")
    if not isinstance(parts, list):
        yield from _objective_keys(measure, objective, nested_object(config, "data"), "")
        return
    if not part:
        yield "objective.kind", "mix"
    for number, each in enumerate(each for each in parts if isinstance(each, dict)):
        inner = nested_object(each, "objective")
        if part and part != (each.get("name") or inner.get("kind")):
            continue
        prefix = f"objective.parts.{number}."
        if not part:
            yield f"{prefix}weight", each.get("weight", 1.0)
        yield from _objective_keys(measure, inner, nested_object(each, "data"), prefix)


def _objective_keys(
    measure: str, objective: JsonObject, data: JsonObject, prefix: str
) -> Iterator[tuple[str, object]]:
    if measure == "loss":
        fields = objective_section(objective.get("kind")).model_fields
        ignored = {key for key, field in fields.items() if not key_info(field).changes_loss}
        ignored |= objective_keys_without_effect(objective)
        relevant: Mapping[str, Any] = {key: objective[key] for key in objective if key not in ignored}
        yield from flatten_keys({"kind": "sft", **relevant}, f"{prefix}objective.")
    if _is_token_mean(objective):
        yield f"{prefix}data.supervise_thinking", data.get("supervise_thinking", True)
        supervise = data.get("supervise", "assistant")
        yield f"{prefix}data.supervise", supervise if isinstance(supervise, str) else ", ".join(supervise)


def _is_token_mean(objective: JsonObject) -> bool:
    kind = objective.get("kind")
    return kind not in objective_section(kind).sequence_level_kinds
