"""whet plan: estimate the cost of a run without allocating anything."""

import json
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from whet.config.run_config import RunConfig


def command(
    config: str = typer.Argument(help="A YAML config, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="Overrides: section.key=value, e.g. method.kind=full"),  # noqa: B008
    device: str = typer.Option(
        None,
        "--device",
        help="A device such as h100, rtx4090, mi300x or m4-max; cpu; or this (this machine).",
    ),
    gpus: int = typer.Option(
        1, "--gpus", help="Number of devices; the parallel section says how they are used."
    ),
    network: float = typer.Option(
        50.0, "--network", help="Network bandwidth per GPU between machines, in GB/s."
    ),
    utilisation: float = typer.Option(
        0.4,
        "--utilisation",
        help="Assumed model FLOPs utilization: the share of peak throughput that is reached.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Estimate memory, FLOPs and time of a run.

    For this machine or for other devices. Nothing is allocated.
    """
    from whet.cli.console import print_line
    from whet.config.load_config import load_config
    from whet.config.quality import Quality
    from whet.errors import ConfigError
    from whet.planning.plan import plan
    from whet.reporting.text.plan_text import plan_json, plan_lines

    settings = load_config(config, overrides or ())
    if not 0 < utilisation <= 1:
        raise ConfigError(f"--utilisation {utilisation:g}: must be above 0 and at most 1")
    if isinstance(settings.model, Quality):
        costs = _quality_costs(settings)
        print_line(json.dumps(costs, indent=2) if as_json else "\n".join(_quality_lines(costs)))
        return
    planned = plan(settings, device=device, gpus=gpus, network_gb_s=network, utilisation=utilisation)
    print_line(json.dumps(plan_json(planned), indent=2) if as_json else "\n".join(plan_lines(planned)))


def _quality_costs(settings: "RunConfig") -> dict[str, Any]:  # Any: JSON values
    from whet.config.quality import Quality
    from whet.data.packing import StepSettings
    from whet.recipes.quality.tabular_model import QualitySpec, quality_costs

    assert isinstance(settings.model, Quality)
    run, optim = settings.run, settings.optim
    steps = StepSettings(run.batch_size, run.batch_tokens, run.micro_batch_tokens, pack=True)
    rows = min(run.batch_size or run.batch_tokens or 1, steps.micro_tokens)
    spec = QualitySpec.from_config(settings.model)
    return {
        **quality_costs(spec, rows=rows, optimizer=optim.name, momentum=optim.momentum),
        "rows": rows,
    }


def _quality_lines(costs: dict[str, Any]) -> list[str]:  # Any: JSON values
    from whet.reporting.formatting import format_memory

    memory, flops, shape = costs["bytes"], costs["flops_per_row"], costs["architecture"]
    parts = ", ".join(f"{name} {format_memory(size)}" for name, size in memory.items() if name != "total")
    table = {
        "model": f"quality {shape['size']}, {shape['arm']}: {shape['hidden']} x {shape['depth']}",
        "parameters": f"{costs['param_count']:,} in {costs['tensors']} tensors",
        "FLOPs": f"{flops['forward']:,} per row forward, {flops['training']:,} with the backward pass",
        "memory": f"{format_memory(memory['total'])} in fp32, {costs['rows']} rows per micro-batch: {parts}",
        "checkpoint": f"{format_memory(costs['tkp1_bytes'])} as TKP1",
        "fingerprint": costs["fingerprint"],
        "architecture": json.dumps(shape),
    }
    return [f"{name:<12}  {value}" for name, value in table.items()]
