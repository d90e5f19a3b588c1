"""whet doctor: report the hardware, software and settings that whet uses on this machine."""

import typer


def command(
    recommend: bool = typer.Option(
        False,
        "--recommend",
        help="Instead, recommend model sizes and micro-batches for full, lora and qlora.",
    ),
    device: str | None = typer.Option(
        None,
        "--device",
        help="With --recommend: a device such as h100, rtx4090 or m4-max; cpu; or this (this machine).",
    ),
) -> None:
    """Show device, precision, versions, memory and cache.

    With --recommend, show which model sizes train on this machine or on another device.
    """
    from whet.errors import ConfigError

    if recommend:
        _print_recommendation(device)
    elif device is not None:
        raise ConfigError(
            "--device only works with --recommend", hint=f"whet doctor --recommend --device {device}"
        )
    else:
        _print_machine()


def _print_recommendation(device: str | None) -> None:
    from whet.cli.console import print_line
    from whet.reporting.text.recommend_text import recommend_lines
    from whet.studies.recommend import recommend

    print_line("\n".join(recommend_lines(recommend(device))))


def _print_machine() -> None:
    import platform

    import psutil
    import torch

    from whet.hardware import GIB, choose_device, choose_precision, find_peak
    from whet.model_io.resolve_model import cached_models
    from whet.ops.attention import describe_backend
    from whet.ops.dispatch import FAST, REFERENCE_VARIABLE, current_paths
    from whet.runs.provenance import versions
    from whet.storage import cache_dir, tokens_dir

    device, memory = choose_device(), psutil.virtual_memory()
    peak = find_peak(device)
    rows = {
        "system": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
        "memory": f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB free",
        "device": _describe_device(device),
        "peak": f"{peak.half_tflops:.4g} TFLOP/s in 16-bit formats, {peak.fp32_tflops:.4g} in fp32, "
        f"{peak.bandwidth_gb_s:.4g} GB/s memory bandwidth ({peak.source})",
        "precision": choose_precision("auto", device).reason,
        "attention": describe_backend(device),
        "reference": ("off" if current_paths() == FAST else "on")
        + f" ({REFERENCE_VARIABLE}=1 disables all fast paths)",
        **_describe_kernels(device),
        "threads": str(torch.get_num_threads()),
        **versions(),
        "tokens": str(tokens_dir()),
        "cache": str(cache_dir()),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    for name, size in cached_models():
        print(f"{'':<{width}}  {name}  {size / GIB:.2f} GiB")


def _describe_kernels(device: object) -> dict[str, str]:
    from whet.ops.dispatch import kernel_build_problem

    if getattr(device, "type", "") != "cuda":
        return {}
    problem = kernel_build_problem()
    return {"kernels": "whet's Triton kernels" if problem is None else f"plain torch: {problem}"}


def _describe_device(device: object) -> str:
    import torch

    if getattr(device, "type", "") != "cuda":
        return f"{device} (torch {torch.__version__} finds no CUDA device)"
    return f"{device}: {torch.cuda.get_device_name()}"
