"""Checks before a run is started or resumed: its directory, its config, its models and its data."""

import contextlib
import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from whet.config.checks.error_messages import nested_sections
from whet.config.load_config import flatten_keys, load_config, to_dict, validate_config
from whet.config.run_config import RunConfig
from whet.config.section import key_info
from whet.errors import CheckpointError, ConfigError
from whet.run_directory import (
    ARCH_FILE,
    CHECKPOINTS_DIRECTORY,
    CONFIG_FILE,
    PROVENANCE_FILE,
    is_finished,
    parse_row,
    read_rows_text,
    split_rows,
    step_of,
)
from whet.storage import read_json

log = logging.getLogger("whet")


def _changeable_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if key_info(field).may_change_on_resume:
            yield key
        else:
            for inner in nested_sections(field.annotation):
                yield from _changeable_keys(inner, f"{key}.")


# durations, intervals and locations; a change of any other key would make it a different run
CHANGEABLE_KEYS = tuple(_changeable_keys(RunConfig))


def check_config_unchanged(
    saved: Mapping[str, Any], config: RunConfig, directory: Path
) -> None:  # Any: JSON values
    """Raise a CheckpointError that lists every key a resumed run changed and must not change.

    Args:
        saved: The config in the checkpoint.
        config: The config in the run directory.
        directory: The run directory.
    """
    with contextlib.suppress(ConfigError):  # adds the keys that the version which wrote it did not have
        saved = to_dict(validate_config(saved))
    changed = [
        f"  {key}: {json.dumps(before)} became {json.dumps(now)}"
        for key, (before, now) in config_differences(saved, to_dict(config)).items()
        if not _may_change(key)
    ]
    if changed:
        raise CheckpointError(
            f"the config of {directory} has changed in keys that a resumed run cannot change:\n"
            + "\n".join(changed),
            hint=f"restore {directory / CONFIG_FILE}, or start a new run",
        )


def config_differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:  # Any: JSON values
    """Return the keys in which two configs differ, each with its value in both."""
    old, new = dict(flatten_keys(before)), dict(flatten_keys(after))
    pairs = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _may_change(key: str) -> bool:
    return any(key == changeable or key.startswith(f"{changeable}.") for changeable in CHANGEABLE_KEYS)


def check_inputs_unchanged(
    directory: Path, inputs: Mapping[str, Any], model: str
) -> None:  # Any: JSON values
    """Raise a CheckpointError if the models, records or tokens are not those that the run started with.

    Args:
        directory: The run directory.
        inputs: The provenance as it is now, and the fingerprint of the architecture.
        model: The name of the trained model, for messages.
    """
    if read_json(directory / ARCH_FILE).get("fingerprint") != inputs["fingerprint"]:
        raise CheckpointError(
            f"the architecture of {model} is not the one that {directory} started with",
            hint="restore the model, or start a new run",
        )
    saved = read_json(directory / PROVENANCE_FILE)
    if saved.get("base") != inputs["base"]:
        raise CheckpointError(
            f"the weights of {model} are not the ones that {directory} started with",
            hint="restore them (and run.precision and the type of device), or start a new run",
        )
    before, after = saved.get("other_models", {}), inputs["other_models"]  # older runs did not record them
    changed = [name for name in before if before[name] != after.get(name)]
    if changed:
        raise CheckpointError(
            f"{directory} started with a different version of {', '.join(changed)}",
            hint="restore the model (and run.precision and the type of device), or start a new run",
        )
    before, after = saved.get("data_sha256", {}), inputs["data_sha256"]
    changed = [f"data.{name}" for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)}: the records are not the ones that {directory} was trained on",
            hint="restore the records, or start a new run",
        )
    before, after = saved.get("tokens_sha256", {}), inputs["tokens_sha256"]
    changed = [f"data.{name}" for name in before if before[name] != after.get(name)]
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)}: the tokens are not the ones that {directory} was trained on",
            hint=f"restore the tokenizer and chat template of {model}, or start a new run",
        )


def check_is_run(directory: Path) -> None:
    """Raise a CheckpointError if the directory is not a run directory."""
    if not directory.exists():
        problem = "does not exist"
    elif not directory.is_dir():
        problem = "is a file, not a run directory"
    elif not (directory / CONFIG_FILE).is_file():
        problem = "is not a run: it has no config.yaml"
    else:
        return
    raise CheckpointError(f"{directory} {problem}", hint="list the existing runs with: whet runs")


def is_run_of_config(config: RunConfig, directory: Path) -> bool:
    """Return whether a directory contains a run of exactly this config, not another run of the same name."""
    file = directory / CONFIG_FILE
    return file.is_file() and not config_differences(to_dict(load_config(file)), to_dict(config))


def check_directory_is_free(directory: Path) -> None:
    """Raise a ConfigError unless the directory of a new run is empty or does not exist."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    resume_hint = ""
    if (directory / CONFIG_FILE).is_file() and not is_finished(directory):
        has_checkpoint = any((directory / CHECKPOINTS_DIRECTORY).glob("step-*"))
        action = "resume it" if has_checkpoint else "restart it, because it has no checkpoint yet"
        resume_hint = f"{action} (whet resume {shlex.quote(str(directory))}), or "
    raise ConfigError(
        f"{directory} already exists, and whet never overwrites a run",
        hint=f"{resume_hint}choose another name (run.name=...)",
    )


def warn_about_missing_rows(path: Path, *, step: int, every: int) -> None:
    """Warn if metrics.jsonl lacks training rows up to the checkpoint, which a resume does not compute again.

    Args:
        path: The metrics.jsonl of the run.
        step: The step of the checkpoint.
        every: The interval of training rows, log.every.
    """
    trained = {
        step_of(row) for row in map(parse_row, split_rows(read_rows_text(path))) if "eval_s" not in row
    }
    missing = [due for due in range(every, step + 1, every) if due not in trained]
    if missing:
        steps = f"{len(missing)} steps between {missing[0]} and {missing[-1]}"
        log.warning(
            "%s has no training row for %s: these metrics are lost, and reports will have a gap",
            path,
            f"step {missing[0]}" if len(missing) == 1 else steps,
        )
