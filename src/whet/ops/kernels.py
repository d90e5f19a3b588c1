"""Whether kernels of whet's own can be used on this machine's GPU."""

import functools
import logging

import torch

log = logging.getLogger("whet")


@functools.cache
def kernels_work() -> bool:
    """Whether they can; else plain torch does the same, more slowly, and a line says so."""
    problem = kernels_problem()
    if problem is not None:
        log.warning("slower than it could be: Triton cannot build kernels on this machine (%s)", problem)
    return problem is None


def kernels_problem() -> str | None:
    """Why Triton, which comes with torch for CUDA, cannot build kernels; often a C compiler is missing."""
    try:
        from whet.ops.fused_triton import silu_gate_on_gpu

        one = torch.ones(1, 1, device="cuda")
        silu_gate_on_gpu(one, one)
    except Exception as error:  # whatever a machine may lack
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None
