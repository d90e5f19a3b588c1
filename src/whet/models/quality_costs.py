"""What a model of the quality task costs, from its description alone."""

from typing import Any

from whet.models.routers import EXPERTS, IN_DIM
from whet.models.tabular import QualitySpec, architecture

GIB = 2**30
_MOMENTS = {"adamw": 8, "adam": 8, "muon": 8, "sgd": 4, "lion": 4, "adafactor": 4, "adamw8bit": 2}


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
