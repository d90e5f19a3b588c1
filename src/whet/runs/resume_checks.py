"""What must be unchanged before a run is resumed."""

import contextlib
import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from whet.config.checks.error_messages import inner_sections
from whet.config.load_config import flat_keys, load_config, make_config, to_dict
from whet.config.run_config import RunConfig
from whet.config.section import key_info
from whet.errors import CheckpointError, ConfigError
from whet.run_directory import (
    ARCH_FILE,
    CHECKPOINTS,
    CONFIG_FILE,
    PROVENANCE_FILE,
    is_finished,
    parse_row,
    read_rows_text,
    row_lines,
    step_of,
)
from whet.storage import read_json

log = logging.getLogger("whet")


def _changeable(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if key_info(field).may_change_on_resume:
            yield key
        else:
            for inner in inner_sections(field.annotation):
                yield from _changeable(inner, f"{key}.")


# how long, how often and where; everything else would make another run of it
MAY_CHANGE = tuple(_changeable(RunConfig))


def refuse_changes(began: Mapping[str, Any], config: RunConfig, directory: Path) -> None:  # Any: JSON values
    """Compare a config with the one its checkpoint was written under; every difference is named."""
    with contextlib.suppress(ConfigError):  # keys that the version it was written by did not have
        began = to_dict(make_config(began))
    changed = [
        f"  {key}: {json.dumps(before)} became {json.dumps(now)}"
        for key, (before, now) in differences(began, to_dict(config)).items()
        if not _may_change(key)
    ]
    if changed:
        raise CheckpointError(
            f"the config of {directory} has changed in what a run cannot change on its way:\n"
            + "\n".join(changed),
            hint=f"restore {directory / CONFIG_FILE}, or start a new run",
        )


def differences(
    began: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:  # Any: JSON values
    """The keys in which two configs differ, with what each has there."""
    before, now = dict(flat_keys(began)), dict(flat_keys(config))
    both = {key: (before.get(key), now.get(key)) for key in {**before, **now}}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def _may_change(key: str) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in MAY_CHANGE)


def refuse_other_origins(directory: Path, now: Mapping[str, Any], model: str) -> None:  # Any: JSON values
    """A run goes on with the weights and the records it began with: others would silently change it."""
    if read_json(directory / ARCH_FILE).get("fingerprint") != now["fingerprint"]:
        raise CheckpointError(f"{model} is no longer the architecture {directory} began with")
    began = read_json(directory / PROVENANCE_FILE)
    if began.get("base") != now["base"]:
        raise CheckpointError(
            f"the weights of {model} are no longer those {directory} began with",
            hint="restore them (and run.precision and the kind of device), or start a new run",
        )
    before, after = began.get("other_models", {}), now["other_models"]  # older runs have none
    changed = [name for name in before if before[name] != after.get(name)]
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)} is no longer the model {directory} began with",
            hint="restore it (and run.precision and the kind of device), or start a new run",
        )
    before, after = began.get("data_sha256", {}), now["data_sha256"]
    changed = [f"data.{name}" for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)} is no longer what {directory} was trained on",
            hint="restore the records, or start a new run",
        )
    before, after = began.get("tokens_sha256", {}), now["tokens_sha256"]
    changed = [f"data.{name}" for name in before if before[name] != after.get(name)]
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)} gives other tokens than {directory} was trained on",
            hint=f"restore the tokenizer and chat template of {model}, or start a new run",
        )


def refuse_other_than_run(directory: Path) -> None:
    """Raise a CheckpointError where there is nothing to resume."""
    if not directory.exists():
        problem = "does not exist"
    elif not directory.is_dir():
        problem = "is a file, not the directory of a run"
    elif not (directory / CONFIG_FILE).is_file():
        problem = "is not a run: it has no config.yaml"
    else:
        return
    raise CheckpointError(f"{directory} {problem}", hint="whet runs lists the runs that are there")


def is_run_of(config: RunConfig, directory: Path) -> bool:
    """Whether a directory holds a run of this very config, and not somebody else's of the same name."""
    file = directory / CONFIG_FILE
    return file.is_file() and not differences(to_dict(load_config(file)), to_dict(config))


def refuse_taken_name(directory: Path) -> None:
    """A new run needs a directory that is not there yet, or empty."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    ways = ""
    if (directory / CONFIG_FILE).is_file() and not is_finished(directory):
        saved = any((directory / CHECKPOINTS).glob("step-*"))
        what = "go on with it" if saved else "start it over, as it has no checkpoint yet"
        ways = f"{what} (whet resume {shlex.quote(str(directory))}) or "
    raise ConfigError(
        f"{directory} exists already, and whet overwrites no run",
        hint=f"{ways}choose another name (run.name=...)",
    )


def warn_of_missing_rows(path: Path, *, step: int, every: int) -> None:
    """Log which training rows up to a checkpoint are not there: a resume does not compute them again."""
    trained = {step_of(row) for row in map(parse_row, row_lines(read_rows_text(path))) if "eval_s" not in row}
    missing = [due for due in range(every, step + 1, every) if due not in trained]
    if missing:
        several = f"{len(missing)} steps between {missing[0]} and {missing[-1]}"
        log.warning(
            "%s has no training row for %s: they are lost, and reports will have a gap there",
            path,
            f"step {missing[0]}" if len(missing) == 1 else several,
        )
