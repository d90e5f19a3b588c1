"""What a model's files must be before anything computes with them: in their directory, and usable weights."""

import math
from pathlib import Path

import torch

from whet.errors import ModelError

_TEMPLATES = "additional_chat_templates"  # the one folder of a model directory that transformers reads


def check_links(directory: Path) -> None:
    """Refuse files that are symbolic links out of their directory: using one would reveal its target.

    The hub's cache consists of links, from models--x/snapshots/REVISION into models--x/blobs: these pass.
    """
    if not directory.is_dir():
        return
    root = directory.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    folder = directory / _TEMPLATES
    for path in [*directory.iterdir(), *(folder.iterdir() if folder.is_dir() else ())]:
        real = path.resolve()
        if any(real.is_relative_to(each) for each in allowed) or not (real.is_file() or path == folder):
            continue
        raise ModelError(
            f"{path} is a symbolic link that leads out of its directory, to {real}",
            hint="copy the file, or make the whole directory a link",
        )


def weight_problem(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be the weights of a model, or None; one pass over its values."""
    if not tensor.is_floating_point():
        return f"is stored as {_name(tensor.dtype)}, and weights are floating-point"
    return None if _is_finite(tensor) else "has values that are NaN or infinite"


def check_weight(stored: torch.Tensor, name: str, path: Path, *, used: torch.Tensor | None = None) -> None:
    """Refuse a tensor that cannot be weights, or not in the dtype in which it is used, by file and name."""
    if used is not None and stored.is_floating_point() and _is_finite(used):
        return
    if (problem := weight_problem(stored)) is not None:
        raise ModelError(
            f"{path}: tensor {name} {problem}",
            hint="the file is damaged, or its training diverged: get another copy or an earlier checkpoint",
        )
    if used is not None:
        raise ModelError(
            f"{path}: tensor {name} overflows in {_name(used.dtype)}",
            hint="choose another precision: bf16 has the range of fp32",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.is_meta:
        return True
    # aminmax is NaN where any value is, and some ten times as fast as isfinite; it does not know float8
    ends = torch.aminmax(tensor.detach().float() if tensor.element_size() == 1 else tensor.detach())
    return all(math.isfinite(float(end)) for end in ends)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
