"""Checkpoints: directories with weights, optimizer state and run state, which are written atomically."""

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
from whet.model_io.checkpoint_weights import (
    CHECKPOINT_WEIGHTS,
    copy_trained_parameters,
    read_trained_parameters,
    trained_parameters,
)
from whet.model_io.sharded_tensors import (
    STATE_SEPARATOR,
    TensorInfo,
    has_shards,
    is_sharded_tensor,
    read_into,
    read_tensor_infos,
)
from whet.parallel.object_exchange import ProcessGroup
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.parallel.sharded_checkpoint import write_sharded
from whet.run_directory import CHECKPOINTS_DIRECTORY, STATE_FILE
from whet.storage import (
    check_manifest,
    create_directory_atomically,
    read_json,
    remove_directory,
    replace_directory,
    write_manifest,
    write_safetensors,
    write_text,
)

log = logging.getLogger("whet")

OPTIMIZER = "optimizer.safetensors"
_DIRECTORY_NAME = re.compile(r"step-(?P<step>[0-9]+)")
CheckpointState = dict[str, Any]  # Any: JSON values


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint: tensors by their names in its files, and the state."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor] | None  # tensors of the optimizer state
    state: str  # JSON

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only its shards of the weights."""
        return any(is_sharded_tensor(tensor) for tensor in self.weights.values())


def checkpoint_contents(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int, metadata: CheckpointState | None
) -> Contents:
    """Return the contents of a checkpoint of the current state; tensors are not copied."""
    moments, state = None, {"step": step, **(metadata or {})}
    if optimizer is not None:
        moments = _optimizer_tensors(model, optimizer)
        if values := _optimizer_values(model, optimizer):
            state["optimizer"] = values
    return Contents(trained_parameters(model), moments, json.dumps(state, indent=2) + "\n")


def write_contents(path: Path, contents: Contents, group: ProcessGroup = None) -> None:
    """Write a checkpoint directory atomically; if the contents are sharded, all ranks must call this."""
    if contents.is_sharded:
        tensors = {**contents.weights, **(contents.moments or {})}
        write_sharded(path, tensors, {STATE_FILE: contents.state}, group=group)
        return
    with create_directory_atomically(path, replace=True) as staging:
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
    """Write a checkpoint directory atomically.

    Only trained weights are written; frozen ones come from the base model.

    Args:
        path: The directory to write. An existing checkpoint there is replaced.
        model: The model whose trained weights are saved.
        optimizer: The optimizer whose state is saved, if any.
        step: The step that the checkpoint belongs to.
        metadata: JSON values to store with the checkpoint; `load_checkpoint` returns them.

    Raises:
        CheckpointError: If the step, the metadata or the optimizer state cannot be stored.
    """
    _check_state(step, metadata)
    write_contents(Path(path), checkpoint_contents(model, optimizer, step, metadata))


def _check_state(step: int, metadata: CheckpointState | None) -> None:
    """Raise an error for a step or metadata that a JSON file would not return unchanged."""
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"the step of a checkpoint must be an integer >= 0, not {step!r}")
    if "step" in (metadata or {}):
        raise CheckpointError(
            "metadata must not have the key 'step'", hint="pass it as the argument step=..."
        )
    if not isinstance(metadata, dict | None) or not all(isinstance(name, str) for name in metadata or {}):
        raise CheckpointError("metadata must be a dictionary whose keys are strings")
    try:
        json.dumps(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"metadata is not JSON-serializable: {error}") from error


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    world: World = SINGLE_PROCESS,
) -> CheckpointState:
    """Load a checkpoint into a model and an optimizer, and return its state.

    The whole checkpoint is validated before anything is changed.

    Args:
        path: The directory of the checkpoint.
        model: The model to load the trained weights into.
        optimizer: The optimizer to restore; None to load the weights only.
        world: The ranks that load the checkpoint together; each validates a share of the files.

    Returns:
        The step and the metadata that `save_checkpoint` stored.

    Raises:
        CheckpointError: If the checkpoint is incomplete or damaged, or does not fit the model.
    """
    path = Path(path)
    with world.sync_errors():
        check_manifest(path, share=slice(world.rank, None, world.size))
    weights, state = read_trained_parameters(model, path), read_checkpoint_state(path)
    if optimizer is not None:
        _restore_optimizer(model, optimizer, path, state.get("optimizer", {}))
    copy_trained_parameters(model, weights)
    return state


def read_checkpoint_state(path: Path) -> CheckpointState:
    """Return the state of a checkpoint: everything that is not a tensor."""
    # No size limit: the state may contain a rollout, and the manifest covers it.
    return read_json(path / STATE_FILE, max_bytes=math.inf)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        entry: value
        for entry, value in _optimizer_entries(model, optimizer)
        if isinstance(value, torch.Tensor)
    }


def _optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:  # Any: JSON values
    """Return the values of an optimizer's state that are not tensors; raises an error for non-JSON values."""
    values = {
        entry: value
        for entry, value in _optimizer_entries(model, optimizer)
        if not isinstance(value, torch.Tensor)
    }
    for entry, value in values.items():
        if not isinstance(value, bool | int | float | str):
            raise CheckpointError(
                f"{type(optimizer).__name__} stores {entry} as {type(value).__name__}, which cannot be saved",
                hint="train without a directory, or use an optimizer whose state is tensors and numbers",
            )
    return values


def _optimizer_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any]]:  # Any: values of an optimizer's state
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is not None:
                yield f"{names[parameter]}{STATE_SEPARATOR}{key}", value


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    values: Mapping[str, Any],  # Any: JSON values
) -> None:
    parameters = dict(model.named_parameters())
    if has_shards(path) or any(is_sharded_tensor(parameter) for parameter in parameters.values()):
        tensors = {
            entry: _empty_buffer(stored, _parameter_of(entry, parameters, path))
            for entry, stored in read_tensor_infos(path).items()
            if STATE_SEPARATOR in entry
        }
        read_into(tensors, path)
    else:
        try:
            tensors = load_file(path / OPTIMIZER)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / OPTIMIZER} cannot be read: {error}") from error
    state: dict[torch.Tensor, dict[str, Any]] = {}  # Any: tensors and numbers
    for entry, tensor in tensors.items():
        parameter = _parameter_of(entry, parameters, path)
        state.setdefault(parameter, {})[entry.rpartition(STATE_SEPARATOR)[2]] = tensor.to(parameter.device)
    for entry, value in values.items():
        parameter = _parameter_of(entry, parameters, path)
        state.setdefault(parameter, {})[entry.rpartition(STATE_SEPARATOR)[2]] = value
    optimizer.state.clear()
    optimizer.state.update(state)


def _parameter_of(entry: str, parameters: Mapping[str, nn.Parameter], path: Path) -> nn.Parameter:
    name = entry.rpartition(STATE_SEPARATOR)[0]
    if name not in parameters:
        raise CheckpointError(f"{path / OPTIMIZER} does not fit this model, which has no parameter {name}")
    return parameters[name]


def _empty_buffer(stored: TensorInfo, parameter: nn.Parameter) -> torch.Tensor:
    """Return a buffer for optimizer state: sharded like its parameter if their shapes agree, else full."""
    if is_sharded_tensor(parameter) and stored.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=stored.dtype)


def random_state() -> CheckpointState:
    """Return the states of all random generators that a run uses, as JSON values."""
    kind, words, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, np.asarray(words).tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": _pack(torch.get_rng_state()),
        "cuda": [_pack(torch.cuda.get_rng_state(device)) for device in _random_devices()],
    }


def gather_random_states(world: World) -> CheckpointState:
    """Return the random states of all ranks, under the keys that checkpoints store them with."""
    main, *other_ranks = world.gather(random_state())
    return {"random": main, **({"random_elsewhere": other_ranks} if other_ranks else {})}


def restore_random_states(state: CheckpointState, world: World) -> None:
    """Restore the random state of this rank from a checkpoint.

    A rank that the checkpoint has no state for, because the run had fewer ranks, keeps its seed.
    """
    states = [state["random"], *state.get("random_elsewhere", ())]
    if world.rank < len(states):
        restore_random_state(states[world.rank])


def restore_random_state(state: CheckpointState) -> None:
    """Restore the random generators from what `random_state` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, words, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_unpack(state["torch"]))
    for device, packed in zip(_random_devices(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(_unpack(packed), device)


def _random_devices() -> list[int]:
    """Return the GPUs whose generators this process uses: in a distributed run only its own."""
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
    """Return the path of a step's checkpoint in a run directory."""
    return directory / CHECKPOINTS_DIRECTORY / f"step-{step:06d}"


def _sorted_checkpoints(directory: Path) -> list[Path]:
    paths = (directory / CHECKPOINTS_DIRECTORY).glob("step-*")
    matches = [(path, _DIRECTORY_NAME.fullmatch(path.name)) for path in paths]
    steps = {path: int(match["step"]) for path, match in matches if match is not None}
    return sorted(steps, key=steps.__getitem__)


def newest_valid_checkpoint(directory: Path) -> Path | None:
    """Return the newest valid checkpoint of a run, or None if the run has no checkpoints.

    Newer damaged checkpoints are logged with the reason and renamed to `broken-step-...`.

    Raises:
        CheckpointError: If there are checkpoints, but none is valid.
    """
    candidates = _sorted_checkpoints(directory)[::-1]
    for candidate in candidates:
        try:
            check_manifest(candidate)
        except CheckpointError as error:
            log.warning("skipping damaged checkpoint %s: %s", candidate.name, error.message)
            continue
        for broken in candidates[: candidates.index(candidate)]:
            replace_directory(broken, broken.with_name(f"broken-{broken.name}"))
        return candidate
    if candidates:
        raise CheckpointError(f"{directory}: none of the {len(candidates)} checkpoints is valid")
    return None


def prune_checkpoints(directory: Path, *, keep: int, best_steps: Sequence[int]) -> None:
    """Delete all checkpoints except the newest `keep` and the best one that was saved."""
    paths = _sorted_checkpoints(directory)
    best = [path for step in best_steps if (path := checkpoint_path(directory, step)) in paths]
    retained = {*paths[-keep:], *best[-1:]}
    for path in paths:
        if path not in retained:
            remove_directory(path)
