"""Hashes of weights and configs, in memory and on disk."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from whet.errors import ModelError
from whet.model_io.resolve import base_of, usable_directory
from whet.storage import sha256_of

_SAMPLE = 2**14  # numbers of each tensor


def weights_mark(name: str) -> str | None:
    """What tells a teacher's weights on this machine from others; None for one known by name only."""
    try:
        target = usable_directory(name)
    except ModelError:  # a run that has not finished
        return None
    path = Path(target)
    if path.is_file():
        return sha256_of(path)
    if not path.is_dir():
        return None
    base = base_of(path)
    files = sorted(path.glob("*.safetensors"))
    marks = [*(sha256_of(file) for file in files), *([str(weights_mark(base))] if base else [])]
    return hashlib.sha256(" ".join(marks).encode()).hexdigest()


def config_mark(name: str) -> str | None:
    """What tells the config of a teacher's weights from others, where they are in a directory."""
    try:
        path = Path(usable_directory(name))
    except ModelError:
        return None
    config = path / "config.json"
    if config.is_file():
        return sha256_of(config)
    base = base_of(path) if path.is_dir() else None
    return config_mark(base) if base else None


def weights_digest(model: nn.Module) -> str:
    """A SHA-256 that tells a model's weights, as they are in memory, from any others.

    Of each tensor it takes name, type and shape, the sum of all its bytes read as integers (exact in any
    order, so one changed weight changes it), and a sample spread over the whole.
    """
    digest = hashlib.sha256()
    kept = model.state_dict().keys()  # also quantised weights and the biases of experts, which are buffers
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    for name, tensor in [*model.named_parameters(), *buffers]:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        wide = raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0
        bits = raw.view(torch.int64) if wide else raw
        sample = bits[:: max(1, bits.numel() // _SAMPLE)].cpu().numpy()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(f"{bits.sum(dtype=torch.int64).item()} ".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()
