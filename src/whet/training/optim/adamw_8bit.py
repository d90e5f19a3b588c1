"""AdamW with 8-bit moments (arXiv 2110.02861), quantized by bitsandbytes."""

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from whet.errors import ConfigError
from whet.training.optim.masked_optimizer import MaskedOptimizer, OptimizerState, ParamGroup

BLOCK = 256  # values that share a scale
MIN_NUMEL = 4096  # smaller tensors have float32 moments: they cost little, and norms are sensitive
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bit(MaskedOptimizer):
    """AdamW8bit with the quantization of bitsandbytes and the AdamW update in float32.

    The optimizer of bitsandbytes counts steps on the host and waits for the device after each tensor, so its
    step can neither be queued nor skipped on the device.

    Args:
        params: The parameters, or parameter groups as for torch's optimizers.
        lr: The learning rate.
        betas: The decay rates of the first and second moment.
        eps: Added to the denominator of the update.
        weight_decay: The decoupled weight decay.

    Raises:
        ConfigError: If bitsandbytes is not installed.
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
        # computed here, because a plan runs updates on meta tensors
        self.tables = {signed: self.bnb.create_dynamic_map(signed=signed) for signed in SIGNED.values()}
        self.codes: dict[tuple[bool, torch.device], torch.Tensor] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def create_state(self, p: torch.Tensor, group: ParamGroup) -> OptimizerState:
        """Return two zero moments: 8-bit codes with one scale per block, or float32 for small tensors."""
        state = {"step": torch.zeros((), device=p.device)}
        for name in SIGNED:
            if p.numel() < MIN_NUMEL:
                state[name] = torch.zeros_like(p, dtype=torch.float32)
            else:
                # contiguous, because the kernels ignore strides
                state[name] = torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
                state[f"{name}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        return state

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: OptimizerState, group: ParamGroup) -> None:
        """Apply the AdamW update with dequantized moments, then quantize them again."""
        (beta1, beta2), step, grad = group["betas"], state["step"].add_(1), grad.float()
        mean = self._moment(state, "exp_avg").lerp_(grad, 1 - beta1)
        square = self._moment(state, "exp_avg_sq").mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / _debias(beta2, step)).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(mean / root.mul_(_debias(beta1, step)), alpha=group["lr"])
        self._store(state, "exp_avg", mean)
        self._store(state, "exp_avg_sq", square)

    def _moment(self, state: OptimizerState, name: str) -> torch.Tensor:
        """Return a moment in float32; the state's own tensor if it is not quantized."""
        stored = state[name]
        if stored.dtype != torch.uint8:
            return stored
        return self.bnb.dequantize_blockwise(
            stored, absmax=state[f"{name}_scale"], code=self._code(name, stored.device), blocksize=BLOCK
        )

    def _store(self, state: OptimizerState, name: str, moment: torch.Tensor) -> None:
        stored = state[name]
        if stored.dtype == torch.uint8:
            code = self._code(name, stored.device)
            self.bnb.quantize_blockwise(
                moment, code=code, absmax=state[f"{name}_scale"], out=stored, blocksize=BLOCK
            )

    def _code(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the 256 values of the codes, cached per device because a copy would wait for the device."""
        key = SIGNED[name], device
        if key not in self.codes:
            self.codes[key] = self.tables[SIGNED[name]].to(device)
        return self.codes[key]


def _debias(beta: float, step: torch.Tensor) -> torch.Tensor:
    """Return 1 - beta**step, accurately also if beta is close to 1 and the step is small."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _bitsandbytes() -> ModuleType:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ConfigError(
            f"optim.name adamw8bit needs bitsandbytes, which cannot be imported: {error}",
            hint="pip install 'whet[bitsandbytes]', or use adamw",
        ) from error
    return bitsandbytes.functional
