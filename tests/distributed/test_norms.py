"""Norms of sharded gradients, against float64."""

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


def norms_on_ranks(rank):
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for kinds in (*([kind] for kind in KINDS), KINDS):
        full = [tensor for kind in kinds for tensor in gradients(kind)]
        parts = [
            distribute_tensor(tensor, mesh, [Replicate() if index == 1 else Shard(0)])
            for index, tensor in enumerate(full)
        ]
        norm = total_norm([*parts, *full])  # some sharded, some replicated, as with trained heads
        clip(parts, 0.5, norm)
        results.append((norm.item(), [part.full_tensor().double().numpy() for part in parts]))
    return results


def test_norm_of_shards_equals_norm_of_full_gradients():
    for results in run_ranks(norms_on_ranks, 2):
        for kinds, (norm, clipped) in zip((*([kind] for kind in KINDS), KINDS), results, strict=True):
            full = [tensor.double() for kind in kinds for tensor in gradients(kind)]
            exact = (2 * torch.cat([tensor.flatten() for tensor in full]).square().sum()).sqrt().item()
            assert norm == pytest.approx(exact, rel=1e-5)
            for part, tensor in zip(clipped, full, strict=True):
                wanted = tensor * 0.5 / (exact + 1e-6)
                torch.testing.assert_close(torch.from_numpy(part), wanted, rtol=2**-7, atol=1e-6)
