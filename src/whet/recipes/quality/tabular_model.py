"""The quality-decision models: a top-2 mixture of experts, a dense twin of the same size, and their costs."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.config.quality import Arm, Quality, Size
from whet.errors import ConfigError, ModelError
from whet.model_io.safetensors import WEIGHTS_FILE, TensorFiles, load_parameters
from whet.models.language_model import Trainable
from whet.recipes.quality.padic_router import EXPERTS, IN_DIM, TOP_K, Padic, PadicRouter, PadicRouting
from whet.run_directory import ARCH_FILE, FINAL_DIRECTORY
from whet.storage import read_json, write_json, write_safetensors

OUT_DIM = 20
PAIRS = tuple(combinations(range(EXPERTS), 2))

# hidden size and number of h -> h blocks per expert: nano and tiny are published, medium and full are whet's
EXPERT_SHAPES: dict[str, tuple[int, int]] = {
    "nano": (128, 2),
    "tiny": (2048, 5),
    "medium": (3072, 7),
    "full": (4416, 9),
}

# width and number of blocks of the dense twin: published for full, and for the others the nearest in size
DENSE_SHAPES: dict[str, tuple[int, int]] = {
    "nano": (106, 2),
    "tiny": (1880, 3),
    "medium": (2880, 4),
    "full": (1024, 84),
}
_OPTIMIZER_BYTES_PER_PARAMETER = {
    "adamw": 8,
    "adam": 8,
    "muon": 8,
    "sgd": 4,
    "lion": 4,
    "adafactor": 4,
    "adamw8bit": 2,
}


@dataclass(frozen=True)
class QualitySpec:
    """The architecture of a quality-decision model."""

    size: Size
    arm: Arm
    padic: Padic | None = None  # only for the sheaf-padic arm

    @classmethod
    def from_config(cls, model: Quality) -> "QualitySpec":
        """Return the architecture of a config's `model` section."""
        padic = Padic(model.base, model.digits, model.tie_digits, model.clamp)
        return cls(model.quality, model.arm, padic if model.arm == "sheaf-padic" else None)

    @property
    def shape(self) -> tuple[int, int]:
        """Hidden size and number of blocks, of an expert or of the dense twin."""
        return (DENSE_SHAPES if self.arm == "dense" else EXPERT_SHAPES)[self.size]

    def linears(self) -> list[tuple[int, int]]:
        """Return the linear layers of one stack, as (inputs, outputs)."""
        width, blocks = self.shape
        if self.arm == "dense":
            inner = [(width, 4 * width), (4 * width, width)] * blocks
        else:
            inner = [(IN_DIM, width), *[(width, width)] * blocks]
        return [*([(IN_DIM, width)] if self.arm == "dense" else []), *inner, (width, OUT_DIM)]

    @property
    def stacks(self) -> int:
        """The number of layer stacks: one per expert, or one in the dense twin."""
        return 1 if self.arm == "dense" else EXPERTS

    def parameter_count(self) -> int:
        """Return the number of parameters without building the model."""
        linears = self.linears()
        stack = sum(i * o + o for i, o in linears) + sum(2 * o for _, o in self._normed(linears))
        return self.stacks * stack + (0 if self.arm == "dense" else IN_DIM * EXPERTS + EXPERTS)

    def tensor_count(self) -> int:
        """Return the number of parameter tensors: weights and biases of linear layers and norms."""
        linears = self.linears()
        stack = 2 * len(linears) + 2 * len(self._normed(linears))
        return self.stacks * stack + (0 if self.arm == "dense" else 2)

    def _normed(self, linears: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the layers that precede a norm: all but the last, and in the dense twin not the first."""
        return linears[1 if self.arm == "dense" else 0 : -1]

    def describe(self) -> dict[str, Any]:  # Any: JSON values
        """Return the architecture as a JSON value, which is equal for equal architectures."""
        width, blocks = self.shape
        padic = None if self.padic is None else asdict(self.padic)
        routed = {"experts": EXPERTS, "top_k": TOP_K, "padic": padic}
        return {
            "kind": "quality",
            "size": self.size,
            "arm": self.arm,
            "inputs": IN_DIM,
            "outputs": OUT_DIM,
            "hidden": width,
            "depth": blocks,
            "linears": [list(pair) for pair in self.linears()],
            **({} if self.arm == "dense" else routed),
        }

    def fingerprint(self) -> str:
        """Return the SHA-256 of the canonical description, which does not depend on machine or key order."""
        return hashlib.sha256(canonical(self.describe()).encode()).hexdigest()


def canonical(description: dict[str, Any]) -> str:  # Any: JSON values
    """Return a description as JSON with sorted keys and no spaces."""
    return json.dumps(description, sort_keys=True, separators=(",", ":"))


def architecture(spec: QualitySpec) -> dict[str, Any]:  # Any: JSON values
    """Return the contents of arch.json."""
    return {
        "fingerprint": spec.fingerprint(),
        "param_count": spec.parameter_count(),
        "architecture": spec.describe(),
    }


@dataclass(frozen=True)
class Decision:
    """The outputs of a model for some rows; the dense twin has no routing and no sections."""

    outputs: torch.Tensor  # [B, OUT_DIM]
    routing: PadicRouting | None = None
    sections: torch.Tensor | None = None  # [B, TOP_K, OUT_DIM]: unweighted outputs of the selected experts


class TabularModel(Trainable):
    """A quality-decision model: maps rows of IN_DIM features to OUT_DIM outputs."""

    def __init__(self, spec: QualitySpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.arm == "dense":
            self.dense = _stack(spec.linears(), bare_first=True)
        else:
            self.router = PadicRouter(spec.padic)
            self.experts = nn.ModuleList(_stack(spec.linears()) for _ in range(EXPERTS))

    def decide(self, rows: torch.Tensor) -> Decision:
        """Return the outputs of rows [B, IN_DIM], with the routing and the experts' outputs.

        Every expert computes every row, which avoids a device synchronization to count rows per expert.
        """
        rows = rows.to(next(self.parameters()).dtype)
        if self.spec.arm == "dense":
            return Decision(self.dense(rows))
        routing = self.router.route(rows)
        expert_outputs = torch.stack([expert(rows) for expert in self.experts], 1)  # [B, EXPERTS, OUT_DIM]
        sections = expert_outputs.gather(1, routing.chosen[..., None].expand(-1, -1, OUT_DIM))
        outputs = (routing.weights[..., None].to(sections.dtype) * sections).sum(1)
        return Decision(outputs, routing, sections)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs [B, OUT_DIM] of rows [B, IN_DIM]."""
        return self.decide(rows).outputs

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the architecture."""
        return self.spec.fingerprint()

    def describe(self) -> dict[str, Any]:  # Any: JSON values
        """Return the architecture as a JSON value."""
        return self.spec.describe()


def _stack(linears: list[tuple[int, int]], *, bare_first: bool = False) -> nn.Sequential:
    """Return linear layers with a norm and a GELU after each but the last (and the first if `bare_first`)."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(linears):
        layers.append(nn.Linear(inputs, outputs))
        if i < len(linears) - 1 and not (bare_first and i == 0):
            layers += [nn.LayerNorm(outputs), nn.GELU()]
    return nn.Sequential(*layers)


def disagreement(sections: torch.Tensor) -> torch.Tensor:
    """Return |a - b|^2 / (|a|^2 + |b|^2) [B] of each row's two experts: 0 equal, 1 orthogonal, 2 opposite."""
    first, second = sections.float().unbind(1)
    distance = (first - second).square().sum(-1)
    return distance / (first.square().sum(-1) + second.square().sum(-1) + 1e-12)


def one_hot_pairs(routing: PadicRouting) -> torch.Tensor:
    """Return a float tensor [B, PAIRS] with 1 at the pair of experts that each row was routed to."""
    low, high = routing.chosen.amin(-1), routing.chosen.amax(-1)
    return torch.stack([((low == a) & (high == b)) for a, b in PAIRS], -1).float()


def new_quality_model(spec: QualitySpec, *, seed: int) -> TabularModel:
    """Return a new model with float32 weights on the CPU, initialized from the seed."""
    with torch.device("meta"):
        model = TabularModel(spec)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                bound = 1 / math.sqrt(parameter.shape[1])
                parameter.uniform_(-bound, bound, generator=generator)
    model.name = f"quality {spec.size}, {spec.arm}"
    return model


def save_quality(model: TabularModel, directory: Path) -> None:
    """Write model.safetensors and arch.json into an existing directory."""
    write_safetensors(directory / WEIGHTS_FILE, dict(model.named_parameters()))
    write_json(directory / ARCH_FILE, architecture(model.spec))


def load_quality(path: str | Path, *, device: str | torch.device = "cpu") -> TabularModel:
    """Load the model of a run, or of its `final/`, in evaluation mode."""
    directory = Path(path)
    if (directory / FINAL_DIRECTORY).is_dir():
        directory /= FINAL_DIRECTORY
    spec = read_spec(directory / ARCH_FILE)
    files = TensorFiles(directory)
    with torch.device("meta"):
        model = TabularModel(spec)
    names = {name: name for name, _ in model.named_parameters()}
    load_parameters(
        model,
        files,
        names=names,
        transposed=set(),
        ignored=set(),
        dtype=next((files.meta_tensor(name).dtype for name in files), torch.float32),
        device=torch.device(device),
    )
    model.name = str(directory)
    return model.eval()


def read_spec(path: Path) -> QualitySpec:
    """Read the architecture from an arch.json; raise a ModelError if it does not match its fingerprint."""
    stored = read_json(path)
    try:
        description = stored["architecture"]
        padic = description.get("padic")
        model = Quality(quality=description["size"], arm=description["arm"], **(padic or {}))
        spec = QualitySpec.from_config(model)
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ModelError(f"{path} does not describe a model of the quality task") from error
    if spec.describe() != description or stored.get("fingerprint") != spec.fingerprint():
        raise ModelError(f"{path} has been changed: its fingerprint does not match")
    return spec


def quality_costs(
    spec: QualitySpec, *, rows: int, optimizer: str, momentum: float
) -> dict[str, Any]:  # Any: JSON
    """Return the parameter count, FLOPs and memory of a training step in fp32, without allocating anything.

    Activations are those that the backward pass needs: the input of every linear layer, norm and GELU, and
    the output. Optimizer state takes 8 bytes per parameter for Adam's two moments, 4 for one momentum, and
    so on.

    Args:
        spec: The architecture.
        rows: The rows of a micro-batch.
        optimizer: optim.name of the config.
        momentum: optim.momentum of the config.
    """
    linears = spec.linears()
    router = 0 if spec.arm == "dense" else IN_DIM * EXPERTS
    multiply_adds = router + spec.stacks * sum(i * o for i, o in linears)  # per row
    activations = spec.stacks * (sum(i for i, _ in linears) + 2 * sum(o for _, o in linears))  # per row
    parameters = spec.parameter_count()
    moments = 0 if optimizer == "sgd" and not momentum else _OPTIMIZER_BYTES_PER_PARAMETER[optimizer]
    memory = {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "moments": moments * parameters,
        "activations": 4 * rows * activations,
    }
    return {
        **architecture(spec),
        "tensors": spec.tensor_count(),
        "flops_per_row": {"forward": 2 * multiply_adds, "training": 6 * multiply_adds},
        "bytes": {**memory, "total": sum(memory.values())},
        "tkp1_bytes": 12 * parameters,
    }
