"""The trained weights of a checkpoint, read and put into a model."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.errors import CheckpointError
from whet.model_io.sharded_tensors import MOMENT, fill_like, has_shards, is_cut, stored_tensors, whole_tensors
from whet.models.moe import balance_biases

CHECKPOINT_WEIGHTS = "weights.safetensors"


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: the weights that train, or all where none does.

    And the biases of experts, which their load changes.
    """
    every: dict[str, torch.Tensor] = dict(model.named_parameters())
    return ({name: p for name, p in every.items() if p.requires_grad} or every) | balance_biases(model)


def read_trained(
    model: torch.nn.Module, checkpoint: Path, *, besides: str | None = None
) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, which must be exactly those this model trains, and any whose names begin so.

    Of a model in shards, those of this rank.
    """
    expected = trained_parameters(model)
    in_shards = any(is_cut(tensor) for tensor in expected.values())
    whole = {} if in_shards else checkpoint_weights(checkpoint)
    shapes = {name: stored.shape for name, stored in (whole or stored_tensors(checkpoint)).items()}
    odd = [name for name in expected if shapes.pop(name, None) != expected[name].shape]
    odd += [name for name in shapes if MOMENT not in name and not (besides and name.startswith(besides))]
    if odd:
        raise CheckpointError(f"{checkpoint} does not fit this model: {', '.join(sorted(odd)[:4])}")
    return fill_like(expected, checkpoint) if in_shards else {name: whole[name] for name in expected}


def checkpoint_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint in one piece, whoever wrote it."""
    if has_shards(checkpoint):
        return whole_tensors(checkpoint, lambda name: MOMENT not in name)
    try:
        found: dict[str, torch.Tensor] = load_file(checkpoint / CHECKPOINT_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint / CHECKPOINT_WEIGHTS} cannot be read: {error}") from error
    return found


def put_trained(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy what `read_trained` returned into the model."""
    with torch.no_grad():
        for name, tensor in trained_parameters(model).items():
            tensor.copy_(weights[name])
