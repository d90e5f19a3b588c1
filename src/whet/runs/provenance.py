"""Where a result came from: versions, commit, machine, and hashes of its data."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from datetime import date

import torch

import whet
from whet.hardware import machine


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
