"""Description of the machine, stored with every benchmark result."""

import importlib.metadata
import os
import platform


def describe_machine():
    """Return the hardware and the versions of libraries."""
    import torch

    packages = ("torch", "transformers", "tokenizers", "peft", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "accelerator": accelerator,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def _cpu():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
