"""whet plan: what a run would take, with nothing allocated."""

import json
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from whet.config.run_config import RunConfig


def command(
    config: str = typer.Argument(help="A YAML file, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. method.kind=full"),  # noqa: B008
    device: str = typer.Option(
        None, "--device", help="A chip, such as h100, rtx4090, mi300x or m4-max; cpu; or this: the one here."
    ),
    gpus: int = typer.Option(1, "--gpus", help="So many of them, as the parallel section says."),
    network: float = typer.Option(50.0, "--network", help="GB/s from a GPU to those of other machines."),
    utilisation: float = typer.Option(0.4, "--utilisation", help="Share of the peak that is reached."),
    as_json: bool = typer.Option(False, "--json", help="Print it as one JSON object."),
) -> None:
    """Show parameters, FLOPs, memory and time of CONFIG, here or on other devices. Nothing is allocated."""
    from whet.cli.console import say
    from whet.config.load_config import load_config
    from whet.config.quality import Quality
    from whet.errors import ConfigError
    from whet.planning.plan import plan
    from whet.reporting.text.plan_text import plan_json, plan_lines

    settings = load_config(config, overrides or ())
    if not 0 < utilisation <= 1:
        raise ConfigError(f"--utilisation {utilisation:g}: it is a share, above 0 and at most 1")
    if isinstance(settings.model, Quality):
        found = _quality_costs(settings)
        say(json.dumps(found, indent=2) if as_json else "\n".join(_quality_lines(found)))
        return
    planned = plan(settings, device=device, gpus=gpus, network_gb_s=network, utilisation=utilisation)
    say(json.dumps(plan_json(planned), indent=2) if as_json else "\n".join(plan_lines(planned)))


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


def _quality_lines(found: dict[str, Any]) -> list[str]:  # Any: JSON values
    from whet.reporting.formatting import format_memory

    memory, flops, shape = found["bytes"], found["flops_per_row"], found["architecture"]
    parts = ", ".join(f"{name} {format_memory(size)}" for name, size in memory.items() if name != "total")
    table = {
        "model": f"quality {shape['size']}, {shape['arm']}: {shape['hidden']} x {shape['depth']}",
        "parameters": f"{found['param_count']:,} in {found['tensors']} tensors",
        "FLOPs": f"{flops['forward']:,} a row forward, {flops['training']:,} with the backward pass",
        "memory": f"{format_memory(memory['total'])} in fp32, {found['rows']} rows at once: {parts}",
        "checkpoint": f"{format_memory(found['tkp1_bytes'])} as TKP1",
        "fingerprint": found["fingerprint"],
        "architecture": json.dumps(shape),
    }
    return [f"{name:<12}  {value}" for name, value in table.items()]
