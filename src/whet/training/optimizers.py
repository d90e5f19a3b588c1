"""Optimizers whose update can be masked on the device: one switch, no host sync."""

from typing import Any

import torch
from torch import nn

from whet.config.sections import Optim
from whet.errors import ConfigError
from whet.training.lion import Lion


def create_optimizer(section: Optim, model: nn.Module) -> torch.optim.Optimizer:
    """The configured optimizer over the model's trainable parameters.

    Fused kernels take a `found_inf` flag: with it set, weights and moments stay exactly as they are. Matrices
    decay; norms, biases and embeddings do not.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("nothing to train: every parameter is frozen")
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed = [p for p in trainable.values() if p.dim() > 1 and id(p) not in embeddings]
    plain = [p for p in trainable.values() if p.dim() <= 1 or id(p) in embeddings]
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, section.weight_decay), (plain, 0.0))
        if params
    ]
    if section.name == "sgd":
        return _sgd(section, groups)
    if section.name == "lion":
        return Lion(groups, lr=section.lr, betas=section.betas)
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def _sgd(section: Optim, groups: list[dict[str, Any]]) -> torch.optim.SGD:  # Any: torch's parameter groups
    optimizer = torch.optim.SGD(
        groups, lr=section.lr, momentum=section.momentum, nesterov=section.nesterov, fused=True
    )
    if section.momentum:
        # the fused kernel makes a missing buffer in its first step: masked, it would stay garbage
        for group in groups:
            for p in group["params"]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def masked_step(optimizer: torch.optim.Optimizer, *, lr: float, skip: torch.Tensor) -> None:
    """One update with learning rate `lr`, unless the device-side flag `skip` (0. or 1.) is set."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    # the attributes torch's own GradScaler sets: the fused kernels read the flag on the device
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
