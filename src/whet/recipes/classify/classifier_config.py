"""The config of a `whet.Classifier`: from a run, a saved classifier or the caller, and what is refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.config.load_config import load_config, make_config, to_dict
from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.model_io.formats.classifier_head import read_head
from whet.models.heads import WithHeads
from whet.run_directory import CONFIG_FILE, FINAL
from whet.storage import MANIFEST


def refuse_what_needs_a_run(objective: Mapping[str, Any]) -> None:  # Any: as in a config
    """Keys that would do nothing here, where they ask for something."""
    if objective.get("class_weights") in ("inverse", "sqrt_inverse", "effective"):
        raise ConfigError(
            f"class_weights: {objective['class_weights']} needs the counts of a training set",
            hint="give a list, a number for each class",
        )
    for key in ("oversample", "valid_share", "calibrate", "probe"):
        if objective.get(key):
            raise ConfigError(f"{key} is for runs", hint="whet.train with objective.kind: classify")


def refuse_what_needs_a_new_head(
    method: Mapping[str, Any] | None, objective: Mapping[str, Any]
) -> None:  # Any: as in a config
    """Settings that a trained classifier has already, and that would be ignored."""
    given = [*(["method"] if method else []), *(key for key in objective if key != "class_weights")]
    if given:
        raise ConfigError(f"{', '.join(given)}: only for a new head", hint="give classes, or leave it out")


def require_total_steps(config: RunConfig, total_steps: int | None) -> None:
    """Raise a ConfigError where the schedule ends and the number of updates is not given."""
    kinds = [part.kind for part in config.optim.parts if part.kind != "constant"]
    if kinds and total_steps is None:
        raise ConfigError(
            f"optim.schedule: {kinds[0]} needs the number of updates that it spans",
            hint="give total_steps to Classifier.load, or choose schedule: constant (with a warmup)",
        )


def with_constant_rate(
    config: RunConfig, optim: Mapping[str, Any] | None
) -> RunConfig:  # Any: as in a config
    """Return the config of a trained classifier with a constant rate, unless `optim` says otherwise."""
    constant = config.optim.model_copy(update={"schedule": "constant", "warmup": 0})
    config = config.model_copy(update={"optim": constant})
    if not optim:
        return config
    values = to_dict(config)
    return make_config({**values, "optim": {**values["optim"], **optim}}, origin="Classifier.load")


def for_the_head(config: RunConfig, learner: WithHeads) -> RunConfig:
    """A config without the rates of what does not train any more."""
    names = [name for name, parameter in learner.named_parameters() if parameter.requires_grad]
    groups = config.optim.groups
    first = {next((pattern for pattern in groups if re.search(pattern, name)), None) for name in names}
    kept = {pattern: group for pattern, group in groups.items() if pattern in first}
    optim = config.optim.model_copy(update={"groups": kept, "router_lr_scale": None})
    method = config.method.model_copy(update={"lr_ratio": None})
    return config.model_copy(update={"optim": optim, "method": method})


def config_of(run: Path, target: Path, *, class_weights: Any = None) -> RunConfig:  # Any: as in a config
    """The config of the run that a classifier is part of, or the least that describes a saved one."""
    if (run / CONFIG_FILE).is_file() and (target.name == FINAL or (target / MANIFEST).is_file()):
        given = [] if class_weights is None else [f"objective.class_weights={json.dumps(class_weights)}"]
        return load_config(run / CONFIG_FILE, given)
    info = read_head(target).info
    shape = {
        "classes": info.classes,
        "multi_label": info.multi_label,
        "pooling": info.pooling,
        "bias": info.bias,
        "class_weights": class_weights or "none",
    }
    whole = not (target / "adapter_config.json").is_file()
    return make_config(
        {
            "model": str(target),
            "method": {"kind": "full"} if whole else {},
            "objective": {"kind": "classify", **shape},
            "data": {"train": "the caller's own", "max_length": max(2, info.max_length)},
            "optim": {"schedule": "constant"},
            "run": {"steps": 1, "batch_size": 1, "precision": info.precision},
        }
    )
