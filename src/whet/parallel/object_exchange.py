"""Exchange of values between ranks as JSON in byte tensors, never as pickles, which could run code."""

import base64
import json
import sys
from typing import Any  # in this module: JSON values, tensors and arrays

import numpy as np
import torch
import torch.distributed as dist

from whet.errors import RunError, WhetError

ProcessGroup = dist.ProcessGroup | None  # None: all ranks

_KIND = "__kind__"
_ERROR_PACKAGES = ("whet", "torch", "builtins")  # packages whose exceptions keep their type


def gather(value: Any, group: ProcessGroup = None) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks; tuples become lists."""
    local = _to_bytes(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(local)]), group=group)
    sizes = [int(length) for length in lengths]
    parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(local, (0, max(sizes) - len(local))), group=group)
    return [_from_bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def broadcast(value: Any, group: ProcessGroup = None) -> Any:
    """Return the value of the first rank of a group; the values of the other ranks are ignored."""
    data = _to_bytes(value if dist.get_rank(group) == 0 else None)
    length = torch.tensor([len(data)])
    dist.broadcast(length, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return _from_bytes(data)


def describe_error(error: Exception) -> dict[str, Any]:
    """Return an exception as JSON: its type, its text, and its arguments if these are text or numbers."""
    kind = type(error)
    described: dict[str, Any] = {"type": f"{kind.__module__}:{kind.__qualname__}", "text": str(error)}
    if isinstance(error, WhetError):
        return {**described, "arguments": [error.message], "hint": error.hint}
    arguments = list(error.args)
    if isinstance(error, OSError) and error.filename is not None:
        arguments.append(error.filename)  # not included in args
    if all(isinstance(argument, str | int | float | None) for argument in arguments):
        described["arguments"] = arguments
    return described


def restore_error(described: dict[str, Any]) -> Exception:
    """Return the exception that another rank described, or a RunError if its type cannot be restored."""
    module, _, name = described["type"].partition(":")
    if "arguments" in described and module.partition(".")[0] in _ERROR_PACKAGES:
        kind = getattr(sys.modules.get(module), name, None)
        try:
            if isinstance(kind, type) and issubclass(kind, WhetError):
                return kind(*described["arguments"], hint=described["hint"])
            if isinstance(kind, type) and issubclass(kind, Exception):
                return kind(*described["arguments"])
        except TypeError:  # the constructor has other parameters
            pass
    return RunError(f"{name.rpartition('.')[2]}: {described['text']}")


def _to_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, default=_to_json).encode()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes(), object_hook=_from_json)


def _to_json(value: Any) -> dict[str, Any]:
    """Return a tensor or an array as JSON, without loss of precision."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        kind, dtype = "tensor", str(value.dtype).removeprefix("torch.")
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        flat, kind, dtype = np.ascontiguousarray(value), "array", value.dtype.str
    else:
        raise TypeError(
            f"{type(value).__name__} cannot be sent between ranks: send JSON values, tensors or arrays"
        )
    data = base64.b64encode(flat.tobytes()).decode()
    return {_KIND: kind, "dtype": dtype, "shape": list(value.shape), "data": data}


def _from_json(value: dict[str, Any]) -> Any:
    if _KIND not in value:
        return value
    data = bytearray(base64.b64decode(value["data"]))
    if value[_KIND] == "array":
        return np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    dtype = getattr(torch, value["dtype"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
