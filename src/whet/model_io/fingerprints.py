"""SHA-256 digests of weights and configs, in memory and on disk."""

import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from whet.errors import ModelError
from whet.model_io.base_models import base_model_of, local_model_directory
from whet.storage import file_sha256

_SAMPLE = 2**14  # values per tensor, roughly


def weight_files_digest(name: str) -> str | None:
    """Return a digest of a local teacher's weight files, or None if the teacher is only known by name."""
    try:
        target = local_model_directory(name)
    except ModelError:  # the run has not finished
        return None
    path = Path(target)
    if path.is_file():
        return file_sha256(path)
    if not path.is_dir():
        return None
    base = base_model_of(path)
    files = sorted(path.glob("*.safetensors"))
    digests = [*(file_sha256(file) for file in files), *([str(weight_files_digest(base))] if base else [])]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def config_file_digest(name: str) -> str | None:
    """Return a digest of the config.json of a local teacher or its base, or None if there is no such file."""
    try:
        path = Path(local_model_directory(name))
    except ModelError:
        return None
    config = path / "config.json"
    if config.is_file():
        return file_sha256(config)
    base = base_model_of(path) if path.is_dir() else None
    return config_file_digest(base) if base else None


def weights_digest(model: nn.Module) -> str:
    """Return a SHA-256 digest of a model's weights in memory.

    It covers each tensor's name, dtype and shape, the sum of its bytes read as integers (exact in any order,
    so a single changed weight changes it), and a sample spread over the tensor. For weights that are sharded
    over ranks it is a collective.
    """
    digest = hashlib.sha256()
    persistent = model.state_dict().keys()  # quantized weights and biases of experts are buffers
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    for name, tensor in [*model.named_parameters(), *buffers]:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        raw = full.detach().contiguous().reshape(-1).view(torch.uint8)
        is_aligned = raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0
        bits = raw.view(torch.int64) if is_aligned else raw
        sample = bits[:: max(1, bits.numel() // _SAMPLE)].cpu().numpy()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(f"{bits.sum(dtype=torch.int64).item()} ".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()
