"""Devices, precision, memory use, and peak performance of known accelerators."""

import difflib
import functools
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from whet.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run, and the reason for choosing them."""

    frozen: torch.dtype  # frozen weights
    trained: torch.dtype  # trained weights
    compute: torch.dtype  # matmuls, by autocast if it differs from `trained`
    reason: str


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device, or for "auto" the first available of CUDA, MPS and CPU.

    Raises:
        ConfigError: The device is unknown or not available.
    """
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
        raise ConfigError(f"unknown device {name!r}", hint="use cpu, cuda, cuda:0, mps or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda is not available: torch finds no CUDA device", hint="run: whet doctor")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps is not available: torch finds no Apple GPU", hint="run: whet doctor")
    return device


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return a description of the device, operating system, CPU cores and memory."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": f"{device.type}: {chip}" if chip else device.type,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / GIB:.0f} GiB",
    }


def _processor() -> str:
    """Return the name of the CPU, or an empty string if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def has_fast_bf16(device: torch.device) -> tuple[bool, str]:
    """Return whether the device has bf16 hardware support, and an explanation."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return True, f"{torch.cuda.get_device_name(device)} supports bf16 in hardware"
        return False, f"{torch.cuda.get_device_name(device)} has no bf16 support"
    if device.type == "cpu":
        if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
            return True, "this CPU supports bf16 in hardware"
        return False, "this CPU has no bf16 support"
    return False, f"bf16 is not used on {device.type}"


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the dtypes for a value of `run.precision`."""
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
    """Return the resident memory of this process in GiB."""
    return float(psutil.Process().memory_info().rss) / GIB


def peak_gib(device: torch.device) -> float:
    """Return the peak memory use in GiB: of the CUDA device, otherwise of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if os.uname().sysname == "Darwin" else peak * 1024 / GIB


def used_gib(device: torch.device) -> float:
    """Return the current memory use in GiB: of the CUDA device, otherwise of this process."""
    return torch.cuda.memory_reserved(device) / GIB if device.type == "cuda" else resident_gib()


@dataclass(frozen=True)
class Chip:
    """Peak performance of one device as torch sees it, without sparsity. A GB is 10**9 bytes."""

    name: str  # for --device
    pattern: str  # a regular expression for the full driver name, without vendor and brand
    half_tflops: float  # bf16 matmuls with fp32 accumulation; fp16 on devices without bf16
    fp32_tflops: float  # without TF32
    bandwidth_gb_s: float  # of the device memory
    memory_gb: float
    link_gb_s: float  # to other devices of the machine, one direction
    source: str

    def tflops(self, dtype: torch.dtype) -> float:
        """Return the peak matmul performance in a dtype, in TFLOP/s."""
        return self.fp32_tflops if dtype == torch.float32 else self.half_tflops


_VOLTA = "NVIDIA V100 data sheet, January 2020 (fp16: it has no bf16)"
_A100 = "NVIDIA A100 80GB data sheet, June 2021"
_AMPERE = "NVIDIA Ampere GA102 white paper, appendix A"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell architecture white paper, appendices (bf16 with fp32 accumulation)"
_PRO = "NVIDIA RTX PRO 6000 Blackwell data sheet, 2025 (bf16: an eighth of FP4 with sparsity)"
_H100 = "NVIDIA H100 data sheet, 2023 (halved: it states bf16 with sparsity)"
_H200 = "NVIDIA H200 data sheet, 2024 (halved: with sparsity)"
_GH200 = "NVIDIA GH200 data sheet, 2024 (the GPU alone; halved: with sparsity)"
_HGX = "NVIDIA HGX B200 and B300 data sheets, 2025 (an eighth; bf16 halved)"
_NVL72 = "NVIDIA GB200 and GB300 NVL72 data sheets, 2025 (one GPU of 72; bf16 halved)"
_CLOCK = "GPU cores x 128 lanes x 2 x clock (Apple states none); bandwidth: Apple's technical specifications"
# A pattern must match the full name except these words: a GH200 is not an H200, and neither a laptop GPU nor
# a MIG slice performs like the card it is named after. Devices without an entry are measured.
_VENDORS = r"(?:(?:NVIDIA|Tesla|GeForce|AMD|Instinct) )*"

CHIPS = (
    Chip("v100", r"V100-SXM\d(-\d+GB)?", 125, 15.7, 900, 32, 150, _VOLTA),
    Chip("v100-pcie", r"V100-PCIE-\d+GB", 112, 14, 900, 32, 16, _VOLTA),
    Chip("t4", r"T4", 65, 8.1, 300, 16, 16, "NVIDIA T4 data sheet, 2019 (fp16: it has no bf16)"),
    Chip("a100-40gb", r"A100-(SXM4?|PCIE)-40GB", 312, 19.5, 1555, 40, 300, "NVIDIA A100 data sheet, 2020"),
    Chip("a100-pcie", r"A100 80GB PCIe", 312, 19.5, 1935, 80, 32, _A100),
    Chip("a100", r"A100-SXM4?-80GB", 312, 19.5, 2039, 80, 300, _A100),
    Chip("a10", r"A10", 125, 31.2, 600, 24, 32, "NVIDIA A10 data sheet, 2021"),
    Chip("l40s", r"L40S", 362, 91.6, 864, 48, 32, "NVIDIA L40S data sheet, 2023"),
    Chip("l4", r"L4", 121, 30.3, 300, 24, 32, "NVIDIA L4 data sheet, 2023 (halved: with sparsity)"),
    Chip("rtx3090", r"RTX 3090", 71, 35.6, 936, 24, 32, _AMPERE),
    Chip("rtx4090", r"RTX 4090", 165.2, 82.6, 1008, 24, 32, _ADA),
    Chip("rtx5070", r"RTX 5070", 61.7, 30.9, 672, 12, 64, _BLACKWELL),
    Chip("rtx5070-ti", r"RTX 5070 Ti", 87.9, 43.9, 896, 16, 64, _BLACKWELL),
    Chip("rtx5080", r"RTX 5080", 112.6, 56.3, 960, 16, 64, _BLACKWELL),
    Chip("rtx5090", r"RTX 5090", 209.5, 104.8, 1792, 32, 64, _BLACKWELL),
    Chip("rtx-pro-6000", r"RTX PRO 6000 Blackwell Workstation Edition", 500, 125, 1792, 96, 64, _PRO),
    Chip("h100-nvl", r"H100 NVL", 835, 60, 3900, 94, 300, _H100),
    Chip("h100-pcie", r"H100 PCIe", 756, 51, 2000, 80, 64, _H100),
    Chip("h100", r"H100( 80GB HBM3)?", 989, 67, 3350, 80, 450, _H100),
    Chip("h200", r"H200", 989, 67, 4800, 141, 450, _H200),
    Chip("h200-nvl", r"H200 NVL", 835, 60, 4800, 141, 450, _H200),
    Chip("gh200", r"GH200 480GB", 989, 67, 4000, 96, 450, _GH200),  # named after the CPU memory
    Chip("gh200-144gb", r"GH200 144G HBM3e", 989, 67, 4900, 144, 450, _GH200),
    Chip("b200", r"B200", 2250, 75, 8000, 180, 900, _HGX),
    Chip("b300", r"B300( SXM6 AC)?", 2250, 75, 8000, 270, 900, _HGX),
    Chip("gb200", r"GB200", 2500, 80, 8000, 186, 900, _NVL72),
    Chip("gb300", r"GB300", 2500, 80, 8000, 279, 900, _NVL72),
    # torch reports the two dies of an MI250X as two devices
    Chip(
        "mi250x",
        r"MI250X( OAM| VF)?",
        191.5,
        23.9,
        1638,
        64,
        50,
        "AMD Instinct MI250X data sheet (half of each)",
    ),
    Chip("mi300x", r"MI300X( OAM| VF)?", 1307.4, 163.4, 5300, 192, 448, "AMD Instinct MI300X data sheet"),
    Chip("mi325x", r"MI325X( OAM| VF)?", 1307.4, 163.4, 6000, 256, 448, "AMD Instinct MI325X data sheet"),
    Chip("mi350x", r"MI350X( OAM| VF)?", 2306.9, 144.2, 8000, 288, 537, "AMD Instinct MI350X data sheet"),
    Chip("mi355x", r"MI355X( OAM| VF)?", 2516.6, 157.3, 8000, 288, 537, "AMD Instinct MI355X data sheet"),
    Chip("m1-ultra", r"Apple M1 Ultra", 20.8, 20.8, 800, 128, 0, _CLOCK),
    Chip("m1-max", r"Apple M1 Max", 10.4, 10.4, 400, 64, 0, "Apple newsroom, 18 October 2021"),
    Chip("m1-pro", r"Apple M1 Pro", 5.2, 5.2, 200, 32, 0, "Apple newsroom, 18 October 2021"),
    Chip("m1", r"Apple M1", 2.6, 2.6, 68, 16, 0, "Apple newsroom, 10 November 2020"),
    Chip("m2-ultra", r"Apple M2 Ultra", 27.2, 27.2, 800, 192, 0, _CLOCK),
    Chip("m2-max", r"Apple M2 Max", 13.6, 13.6, 400, 96, 0, _CLOCK),
    Chip("m2-pro", r"Apple M2 Pro", 6.8, 6.8, 200, 32, 0, _CLOCK),
    Chip("m2", r"Apple M2", 3.6, 3.6, 100, 24, 0, "Apple newsroom, 6 June 2022"),
    Chip("m3-ultra", r"Apple M3 Ultra", 28.6, 28.6, 819, 512, 0, _CLOCK),
    Chip("m3-max", r"Apple M3 Max", 14.3, 14.3, 400, 128, 0, _CLOCK),
    Chip("m3-pro", r"Apple M3 Pro", 6.4, 6.4, 150, 36, 0, _CLOCK),
    Chip("m3", r"Apple M3", 3.6, 3.6, 100, 24, 0, _CLOCK),
    Chip("m4-max", r"Apple M4 Max", 16.2, 16.2, 546, 128, 0, _CLOCK),
    Chip("m4-pro", r"Apple M4 Pro", 8.1, 8.1, 273, 64, 0, _CLOCK),
    Chip("m4", r"Apple M4", 4.0, 4.0, 120, 32, 0, _CLOCK),
)


@dataclass(frozen=True)
class Peak:
    """Peak performance of a device, and its source."""

    half_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    source: str

    def tflops(self, dtype: torch.dtype) -> float:
        """Return the peak matmul performance in a dtype, in TFLOP/s."""
        return self.fp32_tflops if dtype == torch.float32 else self.half_tflops


def chip_by_name(name: str) -> Chip:
    """Return the chip with this short name.

    Raises:
        ConfigError: No chip has this name.
    """
    normalized = name.lower().replace(" ", "-").replace("_", "-")
    for chip in CHIPS:
        if chip.name == normalized:
            return chip
    known = [chip.name for chip in CHIPS]
    near = difflib.get_close_matches(normalized, known, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"unknown device {name!r}", hint=f"{guess}known: this, cpu, {', '.join(known)}")


def chip_by_driver_name(driver_name: str) -> Chip | None:
    """Return the chip for the device name that a driver reports, or None if it is not in the table."""
    matches = (chip for chip in CHIPS if re.fullmatch(_VENDORS + chip.pattern, driver_name, re.IGNORECASE))
    return next(matches, None)


def driver_name(device: torch.device) -> str:
    """Return the name that the driver reports for a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def find_peak(device: torch.device) -> Peak:
    """Return the peak performance of a device from the table, or else measure it once, in about a second."""
    chip = None if device.type == "cpu" else chip_by_driver_name(driver_name(device))
    if chip is None:
        return measure_peak(device)
    return Peak(chip.half_tflops, chip.fp32_tflops, chip.bandwidth_gb_s, chip.source)


def detect_peak_tflops(
    device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> float | None:
    """Return the peak matmul performance of a device in TFLOP/s.

    Known accelerators are looked up in a table, others are measured once.

    Args:
        device: The device. By default the one that runs use.
        dtype: The dtype of the matmuls. By default the compute dtype of run.precision: auto.

    Returns:
        The peak in TFLOP/s, or None if the device is not available.
    """
    try:
        resolved = choose_device(str(device or "auto"))
        return find_peak(resolved).tflops(dtype or choose_precision("auto", resolved).compute)
    except (RuntimeError, ConfigError):
        return None


@functools.cache
def measure_peak(device: torch.device) -> Peak:
    """Measure the peak performance of a device with matmuls and copies, without using random numbers."""
    half = torch.float16 if device.type == "mps" else torch.bfloat16
    return Peak(
        _matmul_tflops(device, half), _matmul_tflops(device, torch.float32), _copy_gb_s(device), "measured"
    )


def _matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    size = 768 if device.type == "cpu" else 4096
    matrix = torch.full((size, size), 0.5, device=device, dtype=dtype)
    best = _best_time(device, lambda: matrix @ matrix, budget_s=0.3)
    return 2 * size**3 / best / 1e12


def _copy_gb_s(device: torch.device) -> float:
    source = torch.ones(2**24 if device.type == "cpu" else 2**26, device=device)
    target = torch.empty_like(source)
    best = _best_time(device, lambda: target.copy_(source), budget_s=0.2)
    return 2 * source.numel() * source.element_size() / best / 1e9


def _best_time(device: torch.device, call: Callable[[], object], *, budget_s: float) -> float:
    _wait_for(device, call())
    best, deadline = float("inf"), time.perf_counter() + budget_s
    while best == float("inf") or time.perf_counter() < deadline:
        started = time.perf_counter()
        _wait_for(device, call())
        best = min(best, time.perf_counter() - started)
    return best


def _wait_for(device: torch.device, _: object) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
