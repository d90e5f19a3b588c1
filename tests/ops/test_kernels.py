"""Plain PyTorch is used if Triton cannot build kernels."""

import pytest
import torch

from whet.ops.dispatch import can_build_kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu covers machines with a GPU")
def test_missing_triton_kernels_are_logged_once(caplog):
    can_build_kernels.cache_clear()
    assert not can_build_kernels()
    assert not can_build_kernels()
    [line] = [line for line in caplog.messages if "Triton" in line]
    assert line.startswith("Triton cannot build kernels on this machine (")
    assert line.endswith("): using slower plain PyTorch instead")
    can_build_kernels.cache_clear()
