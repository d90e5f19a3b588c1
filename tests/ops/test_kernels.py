"""Where Triton cannot build kernels, plain torch does their work."""

import pytest
import torch

from whet.ops.dispatch import kernels_work


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it for a machine with a GPU")
def test_a_machine_that_cannot_build_kernels_is_told_once(caplog):
    kernels_work.cache_clear()
    assert not kernels_work()
    assert not kernels_work()
    [line] = [line for line in caplog.messages if "Triton" in line]
    assert line.startswith("slower than it could be: Triton cannot build kernels on this machine (")
    kernels_work.cache_clear()
