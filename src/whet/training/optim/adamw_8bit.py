"""AdamW with both moments in 8 bits (arXiv 2110.02861), quantised by bitsandbytes."""

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from whet.errors import ConfigError
from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup

BLOCK = 256  # values that share a scale
SMALLEST = 4096  # tensors with fewer values keep float32 moments: they cost little, and norms are sensitive
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bit(MaskedOptimizer):
    """bitsandbytes' AdamW8bit, from its quantisation and AdamW's formula in float32.

    Its own optimizer counts steps on the host and waits for the device after each tensor: such a step can be
    neither queued nor masked.
    """

    def __init__(
        self,
        params: Iterable[Any],  # Any: parameters, or torch's dictionaries of parameter groups
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.bnb = _bitsandbytes()
        # computed here, since a plan's update runs on tensors without values
        self.tables = {signed: self.bnb.create_dynamic_map(signed=signed) for signed in SIGNED.values()}
        self.codes: dict[tuple[bool, torch.device], torch.Tensor] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Two moments: codes and the scale of each block of them, or plain numbers."""
        state = {"step": torch.zeros((), device=p.device)}
        for name in SIGNED:
            if p.numel() < SMALLEST:
                state[name] = torch.zeros_like(p, dtype=torch.float32)
            else:
                # the kernels read memory in order, whatever a tensor's strides say
                state[name] = torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
                state[f"{name}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        return state

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """AdamW with the moments as they are before they are quantised again."""
        (beta1, beta2), step, grad = group["betas"], state["step"].add_(1), grad.float()
        mean = self._moment(state, "exp_avg").lerp_(grad, 1 - beta1)
        square = self._moment(state, "exp_avg_sq").mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / _debias(beta2, step)).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(mean / root.mul_(_debias(beta1, step)), alpha=group["lr"])
        self._keep(state, "exp_avg", mean)
        self._keep(state, "exp_avg_sq", square)

    def _moment(self, state: OptimizerState, name: str) -> torch.Tensor:
        """A moment in float32: the tensor of the state itself, where it is not quantised."""
        stored = state[name]
        if stored.dtype != torch.uint8:
            return stored
        return self.bnb.dequantize_blockwise(
            stored, absmax=state[f"{name}_scale"], code=self._code(name, stored.device), blocksize=BLOCK
        )

    def _keep(self, state: OptimizerState, name: str, moment: torch.Tensor) -> None:
        stored = state[name]
        if stored.dtype == torch.uint8:
            code = self._code(name, stored.device)
            self.bnb.quantize_blockwise(
                moment, code=code, absmax=state[f"{name}_scale"], out=stored, blocksize=BLOCK
            )

    def _code(self, name: str, device: torch.device) -> torch.Tensor:
        """The 256 values a code may mean; kept on the device, since copying them there would wait for it."""
        key = SIGNED[name], device
        if key not in self.codes:
            self.codes[key] = self.tables[SIGNED[name]].to(device)
        return self.codes[key]


def _debias(beta: float, step: torch.Tensor) -> torch.Tensor:
    """1 - beta**step, exact where beta is close to 1 and the step is small."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _bitsandbytes() -> ModuleType:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ConfigError(
            f"optim.name adamw8bit needs bitsandbytes, which cannot be imported: {error}",
            hint="pip install 'whet[bitsandbytes]', or take adamw",
        ) from error
    return bitsandbytes.functional
