"""Devices, precision and memory: what this machine has, and why a choice was made."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from whet.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Precision:
    """How numbers are held and computed in a run."""

    frozen: torch.dtype  # weights that do not train
    trained: torch.dtype  # weights that do
    compute: torch.dtype  # matrix products (by autocast where it differs from `trained`)
    reason: str


def choose_device(name: str = "auto") -> torch.device:
    """The device to run on: the named one, or CUDA, MPS, CPU in this order."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda", "mps")
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(f"unknown device {name!r}", hint="cpu, cuda, cuda:0, mps or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no CUDA device", hint="run: whet doctor")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps was asked for, but torch sees no Apple GPU", hint="run: whet doctor")
    return device


def machine(device: torch.device) -> dict[str, str]:
    """What a run was made on, in words."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": f"{device.type}: {chip}" if chip else device.type,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / GIB:.0f} GiB",
    }


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def has_fast_bf16(device: torch.device) -> tuple[bool, str]:
    """Whether the device computes bf16 in hardware, and how we know."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return True, f"{torch.cuda.get_device_name(device)} has bf16 units"
        return False, f"{torch.cuda.get_device_name(device)} has no bf16 units"
    if device.type == "cpu":
        if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
            return True, "this CPU has bf16 units"
        return False, "this CPU has no bf16 units"
    return False, f"bf16 is not used on {device.type}"


def choose_precision(name: str, device: torch.device) -> Precision:
    """Turn `run.precision` into dtypes, with the reason in words."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    if name == "auto":
        fast, why = has_fast_bf16(device)
        name = "bf16" if fast else "fp32"
    else:
        why = "as configured"
    if name == "fp32":
        return Precision(f32, f32, f32, f"fp32: {why}")
    if name == "bf16":
        return Precision(bf16, f32, bf16, f"bf16 compute, fp32 trained weights: {why}")
    if name == "fp16":
        return Precision(f16, f32, f16, f"fp16 compute with a scaled loss, fp32 trained weights: {why}")
    return Precision(bf16, bf16, bf16, f"bf16 throughout: {why}")


def resident_gib() -> float:
    """Memory this process holds now."""
    return float(psutil.Process().memory_info().rss) / GIB


def peak_gib(device: torch.device) -> float:
    """The most memory used so far: of the accelerator where there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if os.uname().sysname == "Darwin" else peak * 1024 / GIB


def used_gib(device: torch.device) -> float:
    """Memory in use now, of the device a run computes on."""
    return torch.cuda.memory_reserved(device) / GIB if device.type == "cuda" else resident_gib()
