"""Check the files of a model before they are used: no links out of the directory, and valid weights."""

import math
from pathlib import Path

import torch

from whet.errors import ModelError

_TEMPLATES = "additional_chat_templates"  # the only subdirectory of a model that transformers reads


def check_links(directory: Path) -> None:
    """Raise ModelError for symbolic links that lead out of the directory, which could expose other files.

    Links within the hub cache, from models--x/snapshots/REVISION to models--x/blobs, are allowed.
    """
    if not directory.is_dir():
        return
    root = directory.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    folder = directory / _TEMPLATES
    for path in [*directory.iterdir(), *(folder.iterdir() if folder.is_dir() else ())]:
        real = path.resolve()
        if any(real.is_relative_to(parent) for parent in allowed) or not (real.is_file() or path == folder):
            continue
        raise ModelError(
            f"{path} is a symbolic link that leads out of its directory, to {real}",
            hint="copy the file, or link to the entire directory instead",
        )


def weight_problem(tensor: torch.Tensor) -> str | None:
    """Return why a tensor is not a valid weight, or None. It reads all values once."""
    if not tensor.is_floating_point():
        return f"is stored as {_dtype_name(tensor.dtype)}, but weights must be floating-point"
    return None if _is_finite(tensor) else "has NaN or infinite values"


def check_weight(stored: torch.Tensor, name: str, path: Path, *, used: torch.Tensor | None = None) -> None:
    """Raise ModelError, with file and name, if a tensor is not a valid weight or overflows as `used`.

    `used` is the tensor in the dtype in which the model computes with it.
    """
    if used is not None and stored.is_floating_point() and _is_finite(used):
        return
    if (problem := weight_problem(stored)) is not None:
        raise ModelError(
            f"{path}: tensor {name} {problem}",
            hint="the file is corrupt, or training diverged: use another copy or an earlier checkpoint",
        )
    if used is not None:
        raise ModelError(
            f"{path}: tensor {name} overflows in {_dtype_name(used.dtype)}",
            hint="choose another precision: bf16 has the range of fp32",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.is_meta:
        return True
    # aminmax propagates NaN and is about ten times as fast as isfinite, but it does not support float8
    extrema = torch.aminmax(tensor.detach().float() if tensor.element_size() == 1 else tensor.detach())
    return all(math.isfinite(float(extremum)) for extremum in extrema)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
