"""Optimizers whose update can be skipped by a flag on the device, without a host sync."""

import logging
from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import nn

from whet.config.optim import Optim
from whet.config.run_config import RunConfig
from whet.errors import RunError
from whet.lazy_import import load_object
from whet.ops.dispatch import current_paths
from whet.parallel.gradient_sync import group_by_mesh
from whet.training.optim.lr_schedules import Schedule, create_schedule
from whet.training.optim.masked_optimizer import MaskedOptimizer
from whet.training.optim.param_groups import hidden_matrices, mup_ratio, parameter_groups

log = logging.getLogger("whet")

# imported when a config selects them
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
    """Return the optimizer that a config describes, over the trainable parameters of a model.

    The learning rate of each parameter group is `lr` times its `lr_scale`, so that `optimizer.step()` and
    torch's schedulers work as usual. All optimizers support the flag `found_inf`: if it is set, a step
    changes neither weights nor state.

    Args:
        section: The section `optim` of a config.
        model: The module whose parameters with `requires_grad` are trained.
        quiet: Do not log the parameter groups.

    Raises:
        ConfigError: If nothing is trainable, or a parameter group matches no parameter.
    """
    section = section.add_router_group
    settings = parameter_groups(section, model)
    optimizer = _create(section, _split_by_mesh([group.for_torch(section.lr) for group in settings]), model)
    if not quiet:
        without = "norms, biases" if section.decay_embeddings else "norms, biases, embeddings"
        descriptions = (group.describe(section.weight_decay, without=without) for group in settings)
        log.info("optimizer: %s", "; ".join([section.name, *descriptions]))
    return optimizer


def _create(section: Optim, groups: ParamGroups, model: nn.Module) -> torch.optim.Optimizer:
    # With muP gradients shrink as the width grows, and so must epsilon.
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
            matrices, others = (_select(groups, hidden, inside=inside) for inside in (True, False))
            return create(matrices, others, lr, betas=betas, eps=eps)
        case "adam" | "adamw":
            options: dict[str, bool] = {"fused": True}
            if not current_paths().fused_optimizer:
                create, options = (
                    load_object("whet.training.optim.plain_adam:PlainAdam"),
                    {"decoupled": section.name == "adamw"},
                )
            return create(groups, lr=lr, betas=betas, eps=eps, **options)
    assert_never(section.name)


def _split_by_mesh(groups: ParamGroups) -> ParamGroups:
    """Split groups by device mesh, because torch's kernels cannot mix sharded and plain tensors."""
    return [{**group, "params": params} for group in groups for params in group_by_mesh(group["params"])]


def _select(groups: ParamGroups, ids: set[int], *, inside: bool) -> ParamGroups:
    """Return the groups with only the parameters in `ids`, or not in it, without empty groups."""
    selected = [
        {**group, "params": [p for p in group["params"] if (id(p) in ids) == inside]} for group in groups
    ]
    return [group for group in selected if group["params"]]


def supports_grad_divisor(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's kernel can divide gradients, which saves a pass over them."""
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    # kernels for other devices ignore grad_scale in some versions of torch
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.Adam) and fused and devices <= {"cpu", "cuda"}


def prepare_optimizer(
    optimizer: torch.optim.Optimizer | None,
    schedule: Schedule | None,
    config: RunConfig | None,
    module: nn.Module,
    total_steps: int | None,
) -> tuple[torch.optim.Optimizer, Schedule]:
    """Return the given optimizer or the one of a config, and its learning rate as a function of the step."""
    if optimizer is not None:
        return optimizer, adopt_optimizer(optimizer, schedule)
    assert config is not None
    created = create_optimizer(config.optim_groups, module)
    return created, schedule or create_schedule(config.optim, total_steps)


def partition_parameters(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters of a module that are in the optimizer, and those that are not.

    Raises:
        RunError: If the optimizer has parameters that are not in the module.
    """
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if optimized - {id(p) for p in module.parameters()}:
        raise RunError(
            "the optimizer has parameters that are not in the model",
            hint="create it from the parameters of the model that is trained",
        )
    trainable = [p for p in module.parameters() if p.requires_grad]
    return (
        [p for p in trainable if id(p) in optimized],
        [p for p in trainable if id(p) not in optimized],
    )


def adopt_optimizer(optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> Schedule:
    """Prepare a user's optimizer for `masked_step`, and return its learning rate as a function of the step.

    A schedule sets the learning rate of the first group, and the other groups keep their ratio to it. Without
    one, the learning rates are those that the optimizer or a torch scheduler has at each step.
    """
    groups = optimizer.param_groups
    if schedule is None:
        return lambda _: float(groups[0]["lr"])
    lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if not lrs[0] and any(lrs):
        raise RunError(
            "the first parameter group has a learning rate of 0",
            hint="put a group with another learning rate first",
        )
    for group, lr in zip(groups, lrs, strict=True):
        group.setdefault("lr_scale", lr / lrs[0] if lrs[0] else 1.0)
    return schedule


def supports_skip_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer reads `found_inf` on the device, as torch's fused kernels and whet's do."""
    return isinstance(optimizer, MaskedOptimizer) or all(
        group.get("fused") for group in optimizer.param_groups
    )


def masked_step(
    optimizer: torch.optim.Optimizer, *, lr: float, skip: torch.Tensor, divisor: torch.Tensor | None = None
) -> None:
    """Apply one update with learning rate `lr`, unless the flag `skip` (0. or 1., on the device) is set.

    With a `divisor`, gradients are divided by it, if `supports_grad_divisor`. The gradients are cleared. An
    update that itself overflows, for example with a learning rate of 1e38, is not undone: the fused kernels
    write in place, and undoing it would need a copy of all weights and moments.
    """
    for group in optimizer.param_groups:
        if "lr_scale" in group:  # else the optimizer or a torch scheduler sets lr
            group["lr"] = lr * group["lr_scale"]
    if not supports_skip_flag(optimizer):  # the host must wait for the flag
        if not skip.item():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return
    # torch's GradScaler sets the same attributes, which the fused kernels read on the device
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=True)
