"""Where a result came from: versions, commit, and what tells its data and its base's weights from others."""

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch
from torch import nn

import whet
from whet.hardware import machine
from whet.models.weights import read_json

_SAMPLE = 2**14  # numbers of each tensor


def provenance(
    digests: Mapping[str, str],
    base: str,
    *,
    device: torch.device,
    began: date,
    tokens: Mapping[str, str],
    others: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """What is stored beside a run so that it can be repeated."""
    return {
        "began": began.isoformat(),
        "versions": versions(),
        "machine": machine(device),
        "git_commit": git_commit(),
        "base": base,
        "other_models": dict(others or {}),
        "data_sha256": dict(digests),
        "tokens_sha256": dict(tokens),
    }


def began_on(directory: Path) -> date:
    """The day on which a run began: today, where it has not begun yet."""
    path = directory / "provenance.json"
    found = read_json(path).get("began") if path.is_file() else None
    try:
        return date.fromisoformat(str(found))
    except ValueError:
        return date.today()


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


def versions() -> dict[str, str]:
    """Versions of everything a result may depend on."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "whet": whet.__version__, **found}


def git_commit() -> str | None:
    """The commit of the repository whet is run from, where there is one."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return found.stdout.strip() or None
