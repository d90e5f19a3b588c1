"""Norms of gradients that ranks hold in parts, against float64."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distributed.ranks import run_ranks
from whet.training.grad_clip import clip, total_norm

KINDS = [torch.float32, torch.bfloat16, torch.float16]


def gradients(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((30, 4), (7,), (6, 5, 3))]


def on_ranks(rank):
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for kinds in (*([kind] for kind in KINDS), KINDS):
        whole = [tensor for kind in kinds for tensor in gradients(kind)]
        parts = [
            distribute_tensor(tensor, mesh, [Replicate() if place == 1 else Shard(0)])
            for place, tensor in enumerate(whole)
        ]
        norm = total_norm([*parts, *whole])  # some in parts, some whole, as beside trained heads
        clip(parts, 0.5, norm)
        found.append((norm.item(), [part.full_tensor().double().numpy() for part in parts]))
    return found


def test_shards_of_any_precision_have_the_norm_of_the_whole():
    for found in run_ranks(on_ranks, 2):
        for kinds, (norm, clipped) in zip((*([kind] for kind in KINDS), KINDS), found, strict=True):
            whole = [tensor.double() for kind in kinds for tensor in gradients(kind)]
            exact = (2 * torch.cat([tensor.flatten() for tensor in whole]).square().sum()).sqrt().item()
            assert norm == pytest.approx(exact, rel=1e-5)
            for part, tensor in zip(clipped, whole, strict=True):
                wanted = tensor * 0.5 / (exact + 1e-6)
                torch.testing.assert_close(torch.from_numpy(part), wanted, rtol=2**-7, atol=1e-6)
