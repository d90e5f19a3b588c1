"""The provenance of a run: software versions, git commit, machine, and hashes of its models and data."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import torch

import whet
from whet.hardware import describe_machine


def collect_provenance(
    data_digests: Mapping[str, str],
    base_digest: str,
    *,
    device: torch.device,
    start_date: date,
    token_digests: Mapping[str, str],
    frozen_models: Mapping[str, str] | None = None,
    continues: Sequence[Mapping[str, Any]] = (),  # Any: JSON values
) -> dict[str, object]:
    """Return the contents of provenance.json: everything that is needed to reproduce a run.

    Args:
        data_digests: Hash of each source's records.
        base_digest: Hash of the untrained weights.
        device: The device of the run.
        start_date: The day on which the run was started.
        token_digests: Hash of each source's tokens.
        frozen_models: Hash of each frozen model's weights, by name.
        continues: The adapters that the run continues to train, the latest first.
    """
    chain = {"continues": list(continues)} if continues else {}
    return {
        "began": start_date.isoformat(),
        "versions": versions(),
        "machine": describe_machine(device),
        "git_commit": git_commit(),
        "base": base_digest,
        **chain,
        "other_models": dict(frozen_models or {}),
        "data_sha256": dict(data_digests),
        "tokens_sha256": dict(token_digests),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, whet and the packages that a result depends on."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    package_versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "whet": whet.__version__, **package_versions}


def git_commit() -> str | None:
    """Return the git commit of the working directory, or None if it is not in a repository."""
    try:
        process = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return process.stdout.strip() or None
