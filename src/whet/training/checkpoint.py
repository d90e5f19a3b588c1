"""Checkpoints: weights, optimizer and state in a directory that is complete or not there."""

import base64
import json
import logging
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from whet.errors import CheckpointError
from whet.model_io.checkpoint_weights import CHECKPOINT_WEIGHTS, put_trained, read_trained, trained_parameters
from whet.model_io.sharded_tensors import MOMENT, StoredTensor, fill, has_shards, is_cut, stored_tensors
from whet.parallel.object_exchange import ProcessGroup
from whet.parallel.process_group import SOLO, World
from whet.parallel.sharded_checkpoint import write_sharded
from whet.run_directory import CHECKPOINTS, STATE_FILE
from whet.storage import (
    check_manifest,
    new_directory,
    read_json,
    remove_directory,
    replace_directory,
    write_manifest,
    write_safetensors,
    write_text,
)

log = logging.getLogger("whet")

OPTIMIZER = "optimizer.safetensors"
_NAME = re.compile(r"step-(?P<step>[0-9]+)")
CheckpointState = dict[str, Any]  # Any: JSON values


@dataclass(frozen=True)
class Contents:
    """Everything a checkpoint holds, named as in its files."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor] | None
    state: str  # JSON

    @property
    def in_shards(self) -> bool:
        """Whether each rank holds a part of it."""
        return any(is_cut(tensor) for tensor in self.weights.values())


def contents_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int, metadata: CheckpointState | None
) -> Contents:
    """What a checkpoint of this moment holds: the tensors themselves, not copies."""
    moments, state = None, {"step": step, **(metadata or {})}
    if optimizer is not None:
        moments = _optimizer_tensors(model, optimizer)
        if values := _optimizer_values(model, optimizer):
            state["optimizer"] = values
    return Contents(trained_parameters(model), moments, json.dumps(state, indent=2) + "\n")


def write_contents(path: Path, contents: Contents, group: ProcessGroup = None) -> None:
    """Write a checkpoint directory, complete or not at all; of a model in shards, all ranks together."""
    if contents.in_shards:
        tensors = {**contents.weights, **(contents.moments or {})}
        write_sharded(path, tensors, {STATE_FILE: contents.state}, group=group)
        return
    with new_directory(path, replace=True) as staging:
        files = {CHECKPOINT_WEIGHTS: write_safetensors(staging / CHECKPOINT_WEIGHTS, contents.weights)}
        if contents.moments is not None:
            files[OPTIMIZER] = write_safetensors(staging / OPTIMIZER, contents.moments)
        files[STATE_FILE] = write_text(staging / STATE_FILE, contents.state)
        write_manifest(staging, files)


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    metadata: CheckpointState | None = None,
) -> None:
    """Write a checkpoint; of a model with frozen weights, only the trained ones. `metadata` is any JSON."""
    _check_state(step, metadata)
    write_contents(Path(path), contents_of(model, optimizer, step, metadata))


def _check_state(step: int, metadata: CheckpointState | None) -> None:
    """Refuse what would come back as something else, or not at all."""
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"the step of a checkpoint is a whole number from 0, not {step!r}")
    if "step" in (metadata or {}):
        raise CheckpointError(
            "metadata must not have a 'step'", hint="it is an argument of its own: step=..."
        )
    if not isinstance(metadata, dict | None) or not all(isinstance(name, str) for name in metadata or {}):
        raise CheckpointError("metadata must have names for keys, as an object in JSON has")
    try:
        json.dumps(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"metadata cannot be written as JSON: {error}") from error


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    world: World = SOLO,
) -> CheckpointState:
    """Restore what `save_checkpoint` wrote, all of it or nothing, and return its metadata.

    Ranks that do so together check a share of the files each.
    """
    path = Path(path)
    with world.abreast():
        check_manifest(path, share=slice(world.rank, None, world.size))
    weights, state = read_trained(model, path), read_state(path)
    if optimizer is not None:
        _restore_optimizer(model, optimizer, path, state.get("optimizer", {}))
    put_trained(model, weights)
    return state


def read_state(path: Path) -> CheckpointState:
    """The part of a checkpoint that is not tensors."""
    return read_json(
        path / STATE_FILE, most=math.inf
    )  # it may hold a rollout, and the manifest vouches for it


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        entry: value
        for entry, value in _optimizer_entries(model, optimizer)
        if isinstance(value, torch.Tensor)
    }


def _optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:  # Any: JSON values
    """Return the numbers that an optimizer keeps beside its tensors; anything else is an error."""
    values = {
        entry: value
        for entry, value in _optimizer_entries(model, optimizer)
        if not isinstance(value, torch.Tensor)
    }
    for entry, value in values.items():
        if not isinstance(value, bool | int | float | str):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {entry} as {type(value).__name__}, which cannot be saved",
                hint="train without a directory, or with an optimizer whose state is tensors and numbers",
            )
    return values


def _optimizer_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any]]:  # Any: whatever an optimizer keeps
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is not None:
                yield f"{names[parameter]}{MOMENT}{key}", value


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    values: Mapping[str, Any],  # Any: JSON values
) -> None:
    parameters = dict(model.named_parameters())
    if has_shards(path) or any(is_cut(parameter) for parameter in parameters.values()):
        tensors = {
            entry: _room_for(stored, _parameter_of(entry, parameters, path))
            for entry, stored in stored_tensors(path).items()
            if MOMENT in entry
        }
        fill(tensors, path)
    else:
        try:
            tensors = load_file(path / OPTIMIZER)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / OPTIMIZER} cannot be read: {error}") from error
    state: dict[torch.Tensor, dict[str, Any]] = {}  # Any: tensors and numbers
    for entry, tensor in tensors.items():
        parameter = _parameter_of(entry, parameters, path)
        state.setdefault(parameter, {})[entry.rpartition(MOMENT)[2]] = tensor.to(parameter.device)
    for entry, value in values.items():
        parameter = _parameter_of(entry, parameters, path)
        state.setdefault(parameter, {})[entry.rpartition(MOMENT)[2]] = value
    optimizer.state.clear()
    optimizer.state.update(state)


def _parameter_of(entry: str, parameters: Mapping[str, nn.Parameter], path: Path) -> nn.Parameter:
    name = entry.rpartition(MOMENT)[0]
    if name not in parameters:
        raise CheckpointError(f"{path / OPTIMIZER} does not fit this model: {name}")
    return parameters[name]


def _room_for(stored: StoredTensor, parameter: nn.Parameter) -> torch.Tensor:
    """For what an optimizer remembers: of a parameter in shards the part that goes with it, or the whole."""
    if is_cut(parameter) and stored.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=stored.dtype)


def random_state() -> CheckpointState:
    """The state of every random stream a run draws from."""
    kind, words, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, np.asarray(words).tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": _pack(torch.get_rng_state()),
        "cuda": [_pack(torch.cuda.get_rng_state(device)) for device in _random_devices()],
    }


def restore_random_state(state: CheckpointState) -> None:
    """Set every random stream to what `random_state` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, words, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_unpack(state["torch"]))
    for device, packed in zip(_random_devices(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(_unpack(packed), device)


def _random_devices() -> list[int]:
    """The GPUs this process draws from: one of several processes leaves the others' GPUs alone."""
    if not torch.cuda.is_available():
        return []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _unpack(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.uint8)


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lives in a run."""
    return directory / CHECKPOINTS / f"step-{step:06d}"


def _by_step(directory: Path) -> list[Path]:
    numbered = [(path, _NAME.fullmatch(path.name)) for path in (directory / CHECKPOINTS).glob("step-*")]
    steps = {path: int(name["step"]) for path, name in numbered if name is not None}
    return sorted(steps, key=steps.__getitem__)


def newest_valid(directory: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None when none was ever saved.

    Broken ones are named with the reason and set aside, so that they count for nothing later.
    """
    candidates = _by_step(directory)[::-1]
    for candidate in candidates:
        try:
            check_manifest(candidate)
        except CheckpointError as error:
            log.warning("skipped checkpoint %s: %s", candidate.name, error.message)
            continue
        for broken in candidates[: candidates.index(candidate)]:
            replace_directory(broken, broken.with_name(f"broken-{broken.name}"))
        return candidate
    if candidates:
        raise CheckpointError(f"{directory}: {len(candidates)} checkpoints found, none of them whole")
    return None


def prune(directory: Path, *, keep: int, best_steps: Sequence[int]) -> None:
    """Remove all but the newest `keep` checkpoints and the last of the best ones that could be saved."""
    paths = _by_step(directory)
    best = [path for step in best_steps if (path := checkpoint_path(directory, step)) in paths]
    spared = {*paths[-keep:], *best[-1:]}
    for path in paths:
        if path not in spared:
            remove_directory(path)
