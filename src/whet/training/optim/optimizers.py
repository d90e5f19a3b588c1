"""Optimizers whose update can be masked on the device: one switch, no host sync."""

import logging
from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import nn

from whet.config.optim import Optim
from whet.errors import RunError
from whet.lazy_import import load_object
from whet.ops.dispatch import chosen_paths
from whet.parallel.gradient_sync import by_mesh
from whet.training.optim.lr_schedules import Schedule
from whet.training.optim.masked_optimizer import MaskedOptimizer
from whet.training.optim.param_groups import hidden_matrices, mup_ratio, parameter_groups

log = logging.getLogger("whet")

# each is imported when a config asks for it
OPTIMIZERS = {
    "adamw": "whet.training.optim.adamw:AdamW",
    "adam": "torch.optim:Adam",
    "sgd": "whet.training.optim.sgd:SGD",
    "lion": "whet.training.optim.lion:Lion",
    "adafactor": "whet.training.optim.adafactor:Adafactor",
    "muon": "whet.training.optim.muon:Muon",
    "adamw8bit": "whet.training.optim.adamw_8bit:AdamW8bit",
}

ParamGroups = list[dict[str, Any]]  # Any: torch's parameter groups


def create_optimizer(section: Optim, model: nn.Module, *, quiet: bool = False) -> torch.optim.Optimizer:
    """The configured optimizer over the model's trainable parameters.

    A group starts at its own rate, `lr` times its lr_scale, so that a plain `step()` and torch's schedulers
    are right. Each optimizer obeys a `found_inf` flag: with it set, weights and state stay exactly as they
    are. Torch's fused kernels read it themselves, the others get it from MaskedOptimizer.
    """
    section = section.with_router_group
    found = parameter_groups(section, model)
    optimizer = _create(section, _apart([group.for_torch(section.lr) for group in found]), model)
    if not quiet:
        without = "norms, biases" if section.decay_embeddings else "norms, biases, embeddings"
        said = (group.describe(section.weight_decay, without=without) for group in found)
        log.info("optimizer: %s", "; ".join([section.name, *said]))
    return optimizer


def _create(section: Optim, groups: ParamGroups, model: nn.Module) -> torch.optim.Optimizer:
    # muP's gradients shrink as the width grows, and what is added to their size must, too
    lr, betas, eps = section.lr, section.betas, section.eps / mup_ratio(section, model)
    create: Callable[..., torch.optim.Optimizer] = load_object(OPTIMIZERS[section.name])
    match section.name:
        case "sgd":
            return create(groups, lr, momentum=section.momentum, nesterov=section.nesterov)
        case "lion":
            return create(groups, lr, betas=betas)
        case "adafactor":
            return create(groups, lr)
        case "adamw8bit":
            return create(groups, lr, betas=betas, eps=eps)
        case "muon":
            hidden = hidden_matrices(model)
            matrices, others = (_part(groups, hidden, inside=inside) for inside in (True, False))
            return create(matrices, others, lr, betas=betas, eps=eps)
        case "adam" | "adamw":
            how: dict[str, bool] = {"fused": True}
            if not chosen_paths().fused_optimizer:
                create, how = (
                    load_object("whet.training.optim.plain_adam:PlainAdam"),
                    {"decoupled": section.name == "adamw"},
                )
            return create(groups, lr=lr, betas=betas, eps=eps, **how)
    assert_never(section.name)


def _apart(groups: ParamGroups) -> ParamGroups:
    """Weights that ranks hold in parts in groups of their own: torch's kernels take no mixture."""
    return [{**group, "params": alike} for group in groups for alike in by_mesh(group["params"])]


def _part(groups: ParamGroups, ids: set[int], *, inside: bool) -> ParamGroups:
    """Each group's parameters that are (not) among some, where it has any."""
    cut = [{**group, "params": [p for p in group["params"] if (id(p) in ids) == inside]} for group in groups]
    return [group for group in cut if group["params"]]


def divides_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can divide gradients as it reads them, which saves a pass over all of them."""
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    # the kernels for other devices read no divisor in all versions of torch
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.Adam) and fused and devices <= {"cpu", "cuda"}


def adopt_optimizer(optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> Schedule:
    """Prepare an optimizer that was not made here for `masked_step`, and return its learning rate by step.

    A schedule gives the rate of the first group; the others keep their ratio to it. Without one, the rates
    are those that the optimizer, or a scheduler of torch's, has at each step.
    """
    groups = optimizer.param_groups
    if schedule is None:
        return lambda _: float(groups[0]["lr"])
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if not rates[0] and any(rates):
        raise RunError("the first parameter group has a learning rate of 0: put another group first")
    for group, rate in zip(groups, rates, strict=True):
        group.setdefault("lr_scale", rate / rates[0] if rates[0] else 1.0)
    return schedule


def reads_skip_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer obeys `found_inf` on the device, as torch's fused kernels and whet's own do."""
    return isinstance(optimizer, MaskedOptimizer) or all(
        group.get("fused") for group in optimizer.param_groups
    )


def masked_step(
    optimizer: torch.optim.Optimizer, *, lr: float, skip: torch.Tensor, divisor: torch.Tensor | None = None
) -> None:
    """One update with learning rate `lr`, unless the device-side flag `skip` (0. or 1.) is set.

    With a `divisor` for an optimizer that `divides_itself`, gradients are divided by it.
    The flag is about what is known before the update. An update that itself overflows (a learning rate of
    1e38) is not undone: the fused kernels write in place, so it would take a copy of all weights and moments.
    """
    for group in optimizer.param_groups:
        if "lr_scale" in group:  # else the rate is the optimizer's own
            group["lr"] = lr * group["lr_scale"]
    if not reads_skip_flag(optimizer):  # the host has to wait for the flag
        if not skip.item():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return
    # the attributes torch's own GradScaler sets: the fused kernels read the flag on the device
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=True)
