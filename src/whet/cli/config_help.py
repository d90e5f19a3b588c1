"""The config keys in `whet train --help`: common keys first, then every key by section, rare ones last."""

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from whet.config.checks.error_messages import nested_sections
from whet.config.load_config import describe_keys
from whet.config.objectives.distrust import DistrustObjective
from whet.config.objectives.union import OBJECTIVE_KINDS
from whet.config.preset import Preset
from whet.config.quality import Quality, RegressionObjective
from whet.config.router_balancing import RouterBalancing
from whet.config.run_config import RunConfig

COMMON_KEYS = (
    *("model", "data.train", "data.valid", "data.max_length"),
    *("method.kind", "method.rank", "method.alpha", "objective.kind"),
    *("optim.lr", "optim.schedule", "optim.warmup"),
    *("run.steps", "run.epochs", "run.batch_size", "run.batch_tokens", "run.name", "run.seed"),
    *("eval.every", "checkpoint.every"),
)
_RARE_SECTIONS = (RouterBalancing, DistrustObjective, RegressionObjective, Quality)
_RARE_KEYS = ("data.curriculum", "optim.mup", "log.probes")


def config_help() -> Iterator[str]:
    """Yield the lines of the config help."""
    sections = [*_sections()]
    yield "Common config keys:"
    line_by_key = {_key(line): line for _, _, lines in reversed(sections) for line in reversed(lines)}
    line_by_key["model"] = f"  model: {RunConfig.model_fields['model'].description} (required)"
    line_by_key["objective.kind"] = f'  objective.kind: one of {", ".join(OBJECTIVE_KINDS)} (default "sft")'
    yield from (line_by_key[key] for key in COMMON_KEYS)
    yield "\nAll config keys by section:"
    rare: list[tuple[str, list[str]]] = []
    for section, title, lines in sections:
        if section in _RARE_SECTIONS:
            rare.append((title, lines))
            continue
        yield f"\n{title}:"
        yield from (line for line in lines if not _is_rare(line))
        if rare_lines := [line for line in lines if _is_rare(line)]:
            rare.append((title, rare_lines))
    yield "\nRarely needed:"
    for title, lines in rare:
        yield f"\n{title}:"
        yield from lines


def _sections() -> Iterator[tuple[type[BaseModel], str, list[str]]]:
    """Yield every top-level section with its title and the lines of its keys."""
    for name, field in RunConfig.model_fields.items():
        for section in nested_sections(field.annotation):
            always = field.is_required() and field.annotation is section
            lines = [*describe_keys(section, f"{name}.", always_present=always)]
            yield section, _title(name, section), lines


def _title(name: str, section: type[BaseModel]) -> str:
    if section is Preset:
        return "model, built from scratch with a preset"
    if section is Quality:
        return "model, for the quality task"
    if name != "objective":
        return name
    kind = section.model_fields["kind"].annotation
    return (
        f"objective, kind {', '.join(get_args(kind))}" if get_origin(kind) is Literal else "objective, custom"
    )


def _key(line: str) -> str:
    return line.strip().partition(":")[0]


def _is_rare(line: str) -> bool:
    return any(f"{_key(line)}.".startswith(f"{rare}.") for rare in _RARE_KEYS)
