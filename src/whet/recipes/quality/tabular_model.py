"""The quality-decision models: experts of which two read each row, a dense twin, and their costs."""

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
from whet.model_io.safetensors import SINGLE, TensorFiles, load_parameters
from whet.models.language_model import Trainable
from whet.recipes.quality.padic_router import EXPERTS, IN_DIM, TOP_K, Padic, PadicRouter, PadicRouting
from whet.run_directory import ARCH_FILE, FINAL
from whet.storage import read_json, write_json, write_safetensors

OUT_DIM = 20
PAIRS = tuple(combinations(range(EXPERTS), 2))

# hidden size and h -> h blocks of an expert: nano and tiny are the published ones, medium and full whet's own
EXPERT_SHAPES: dict[str, tuple[int, int]] = {
    "nano": (128, 2),
    "tiny": (2048, 5),
    "medium": (3072, 7),
    "full": (4416, 9),
}

# width and blocks of the dense twin: the published one for full, the nearest in size for the others
DENSE_SHAPES: dict[str, tuple[int, int]] = {
    "nano": (106, 2),
    "tiny": (1880, 3),
    "medium": (2880, 4),
    "full": (1024, 84),
}
_MOMENTS = {"adamw": 8, "adam": 8, "muon": 8, "sgd": 4, "lion": 4, "adafactor": 4, "adamw8bit": 2}


@dataclass(frozen=True)
class QualitySpec:
    """One of these models, described."""

    size: Size
    arm: Arm
    padic: Padic | None = None  # of the sheaf-padic arm

    @classmethod
    def from_config(cls, model: Quality) -> "QualitySpec":
        """What a config names."""
        padic = Padic(model.base, model.digits, model.tie_digits, model.clamp)
        return cls(model.quality, model.arm, padic if model.arm == "sheaf-padic" else None)

    @property
    def shape(self) -> tuple[int, int]:
        """Hidden size and blocks, of an expert or of the dense twin."""
        return (DENSE_SHAPES if self.arm == "dense" else EXPERT_SHAPES)[self.size]

    def linears(self) -> list[tuple[int, int]]:
        """The linear layers of one stack, as (inputs, outputs)."""
        width, blocks = self.shape
        if self.arm == "dense":
            inner = [(width, 4 * width), (4 * width, width)] * blocks
        else:
            inner = [(IN_DIM, width), *[(width, width)] * blocks]
        return [*([(IN_DIM, width)] if self.arm == "dense" else []), *inner, (width, OUT_DIM)]

    @property
    def stacks(self) -> int:
        """How many stacks of layers there are."""
        return 1 if self.arm == "dense" else EXPERTS

    def parameter_count(self) -> int:
        """By the formula: nothing is built."""
        linears = self.linears()
        stack = sum(i * o + o for i, o in linears) + sum(2 * o for _, o in self._normed(linears))
        return self.stacks * stack + (0 if self.arm == "dense" else IN_DIM * EXPERTS + EXPERTS)

    def tensor_count(self) -> int:
        """Weights, biases and the two of each norm."""
        linears = self.linears()
        stack = 2 * len(linears) + 2 * len(self._normed(linears))
        return self.stacks * stack + (0 if self.arm == "dense" else 2)

    def _normed(self, linears: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The linear layers that a norm follows: not the last, nor the one that leads into a dense twin."""
        return linears[1 if self.arm == "dense" else 0 : -1]

    def describe(self) -> dict[str, Any]:  # Any: JSON values
        """A plain JSON value, equal for equal architectures."""
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
        """SHA-256 of the canonical description: stable across machines and key order."""
        return hashlib.sha256(canonical(self.describe()).encode()).hexdigest()


def canonical(description: dict[str, Any]) -> str:  # Any: JSON values
    """JSON with sorted keys and no spaces."""
    return json.dumps(description, sort_keys=True, separators=(",", ":"))


def architecture(spec: QualitySpec) -> dict[str, Any]:  # Any: JSON values
    """What arch.json holds."""
    return {
        "fingerprint": spec.fingerprint(),
        "param_count": spec.parameter_count(),
        "architecture": spec.describe(),
    }


@dataclass(frozen=True)
class Decision:
    """What a model makes of rows; the last two are None in a dense one."""

    outputs: torch.Tensor  # [B, OUT_DIM]
    routing: PadicRouting | None = None
    sections: torch.Tensor | None = None  # [B, TOP_K, OUT_DIM]: what the chosen experts say, unweighted


class TabularModel(Trainable):
    """Rows of IN_DIM numbers in, OUT_DIM numbers out."""

    def __init__(self, spec: QualitySpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.arm == "dense":
            self.dense = _stack(spec.linears(), bare_first=True)
        else:
            self.router = PadicRouter(spec.padic)
            self.experts = nn.ModuleList(_stack(spec.linears()) for _ in range(EXPERTS))

    def decide(self, rows: torch.Tensor) -> Decision:
        """Outputs, and how they came about. Every expert reads every row: that costs no wait for a count."""
        rows = rows.to(next(self.parameters()).dtype)
        if self.spec.arm == "dense":
            return Decision(self.dense(rows))
        routing = self.router.route(rows)
        every = torch.stack([expert(rows) for expert in self.experts], dim=1)  # [B, EXPERTS, OUT_DIM]
        sections = every.gather(1, routing.chosen[..., None].expand(-1, -1, OUT_DIM))
        outputs = (routing.weights[..., None].to(sections.dtype) * sections).sum(1)
        return Decision(outputs, routing, sections)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs [B, OUT_DIM] of rows [B, IN_DIM]."""
        return self.decide(rows).outputs

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""
        return self.spec.fingerprint()

    def describe(self) -> dict[str, Any]:  # Any: JSON values
        """The architecture as plain JSON."""
        return self.spec.describe()


def _stack(linears: list[tuple[int, int]], *, bare_first: bool = False) -> nn.Sequential:
    """Linear layers, each with a norm and a GELU but the last (and the first of a dense twin)."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(linears):
        layers.append(nn.Linear(inputs, outputs))
        if place < len(linears) - 1 and not (bare_first and place == 0):
            layers += [nn.LayerNorm(outputs), nn.GELU()]
    return nn.Sequential(*layers)


def disagreement(sections: torch.Tensor) -> torch.Tensor:
    """[B]: |a - b|^2 / (|a|^2 + |b|^2) of a row's two experts: 0 equal, 1 unrelated, 2 opposed."""
    first, second = sections.float().unbind(1)
    apart = (first - second).square().sum(-1)
    return apart / (first.square().sum(-1) + second.square().sum(-1) + 1e-12)


def shared_by(routing: PadicRouting) -> torch.Tensor:
    """[B, PAIRS], 1 at the pair of experts that share a row, in the order of PAIRS."""
    low, high = routing.chosen.amin(-1), routing.chosen.amax(-1)
    return torch.stack([((low == a) & (high == b)) for a, b in PAIRS], -1).float()


def new_quality_model(spec: QualitySpec, *, seed: int) -> TabularModel:
    """A model with fresh float32 weights on the CPU: every tensor depends on the seed."""
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
    """model.safetensors and arch.json, into a directory that exists."""
    write_safetensors(directory / SINGLE, dict(model.named_parameters()))
    write_json(directory / ARCH_FILE, architecture(model.spec))


def load_quality(path: str | Path, *, device: str | torch.device = "cpu") -> TabularModel:
    """The model of a run, or of its `final/`, in evaluation mode."""
    directory = Path(path)
    if (directory / FINAL).is_dir():
        directory /= FINAL
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
        dtype=next((files.described(name).dtype for name in files), torch.float32),
        device=torch.device(device),
    )
    model.name = str(directory)
    return model.eval()


def read_spec(path: Path) -> QualitySpec:
    """The architecture in an arch.json, which must be exactly what its fingerprint says."""
    stored = read_json(path)
    try:
        found = stored["architecture"]
        padic = found.get("padic")
        model = Quality(quality=found["size"], arm=found["arm"], **(padic or {}))
        spec = QualitySpec.from_config(model)
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ModelError(f"{path} does not describe a model of the quality task") from error
    if spec.describe() != found or stored.get("fingerprint") != spec.fingerprint():
        raise ModelError(f"{path} has been changed: its fingerprint is another")
    return spec


def quality_costs(
    spec: QualitySpec, *, rows: int, optimizer: str, momentum: float
) -> dict[str, Any]:  # Any: JSON
    """Parameters, FLOPs, and bytes of a training step on `rows` rows at once in fp32. Nothing is allocated.

    Activations are those that the backward pass needs: the input of every linear layer, norm and GELU, and
    the output. Bytes a parameter of the moments: 8 for Adam's two, 4 for one momentum, and so on.
    """
    linears = spec.linears()
    router = 0 if spec.arm == "dense" else IN_DIM * EXPERTS
    multiplied = router + spec.stacks * sum(i * o for i, o in linears)
    kept = spec.stacks * (sum(i for i, _ in linears) + 2 * sum(o for _, o in linears))
    parameters = spec.parameter_count()
    moments = 0 if optimizer == "sgd" and not momentum else _MOMENTS[optimizer]
    memory = {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "moments": moments * parameters,
        "activations": 4 * rows * kept,
    }
    return {
        **architecture(spec),
        "tensors": spec.tensor_count(),
        "flops_per_row": {"forward": 2 * multiplied, "training": 6 * multiplied},
        "bytes": {**memory, "total": sum(memory.values())},
        "tkp1_bytes": 12 * parameters,
    }
