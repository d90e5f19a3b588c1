"""Read the trained weights of a checkpoint, and copy them into a model."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.errors import CheckpointError
from whet.model_io.sharded_tensors import (
    STATE_SEPARATOR,
    has_shards,
    is_sharded_tensor,
    read_full_tensors,
    read_like,
    read_tensor_infos,
)
from whet.models.moe import balance_biases

CHECKPOINT_WEIGHTS = "weights.safetensors"


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that a checkpoint stores.

    These are the trainable parameters, or all parameters if none is trainable, and the load-balancing biases
    of experts.
    """
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    return (trainable or parameters) | balance_biases(model)


def read_trained_parameters(
    model: torch.nn.Module, checkpoint: Path, *, extra_prefix: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint that belong to the trained parameters of a model.

    For a sharded model, these are the shards of this rank.

    Raises:
        CheckpointError: If names or shapes differ. Tensors whose names start with `extra_prefix` are ignored.
    """
    expected = trained_parameters(model)
    is_sharded = any(is_sharded_tensor(tensor) for tensor in expected.values())
    full = {} if is_sharded else read_checkpoint_weights(checkpoint)
    shapes = {name: stored.shape for name, stored in (full or read_tensor_infos(checkpoint)).items()}
    mismatched = [name for name in expected if shapes.pop(name, None) != expected[name].shape]
    mismatched += [
        name
        for name in shapes
        if STATE_SEPARATOR not in name and not (extra_prefix and name.startswith(extra_prefix))
    ]
    if mismatched:
        raise CheckpointError(f"{checkpoint} does not match this model: {', '.join(sorted(mismatched)[:4])}")
    return read_like(expected, checkpoint) if is_sharded else {name: full[name] for name in expected}


def read_checkpoint_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the full weights of a checkpoint, whether it is sharded or not."""
    if has_shards(checkpoint):
        return read_full_tensors(checkpoint, lambda name: STATE_SEPARATOR not in name)
    try:
        weights: dict[str, torch.Tensor] = load_file(checkpoint / CHECKPOINT_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint / CHECKPOINT_WEIGHTS} cannot be read: {error}") from error
    return weights


def copy_trained_parameters(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy the weights that `read_trained_parameters` returned into the model."""
    with torch.no_grad():
        for name, tensor in trained_parameters(model).items():
            tensor.copy_(weights[name])
