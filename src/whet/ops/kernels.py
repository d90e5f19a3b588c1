"""Whether kernels of whet's own can be used on this machine's GPU."""

import functools
import logging

import torch

log = logging.getLogger("whet")


@functools.cache
def kernels_work() -> bool:
    """Whether Triton, which comes with torch for CUDA, can build kernels: it needs a C compiler for that.

    Found out by the first one that is asked for; without them plain torch does the same, more slowly.
    """
    try:
        from whet.ops.fused_triton import silu_gate_on_gpu

        one = torch.ones(1, 1, device="cuda")
        silu_gate_on_gpu(one, one)
    except Exception as error:  # whatever a machine may lack
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("slower than it could be: Triton cannot build kernels on this machine (%s)", reason)
        return False
    return True
