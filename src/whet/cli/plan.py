"""whet plan: what a run would take, with nothing allocated."""

import json
from typing import Any

import typer


def command(
    config: str = typer.Argument(help="A YAML file, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. model.quality=full"),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print it as one JSON object."),
) -> None:
    """Show parameters, FLOPs, memory, architecture and fingerprint of CONFIG. Nothing is allocated."""
    from whet.cli.console import say
    from whet.config.load import load_config
    from whet.config.quality import Quality
    from whet.data.plan import StepSettings
    from whet.errors import ConfigError
    from whet.models.quality_costs import quality_costs
    from whet.models.tabular import QualitySpec

    settings = load_config(config, overrides or ())
    if not isinstance(settings.model, Quality):
        raise ConfigError(
            "whet plan knows only the models of the quality task so far",
            hint="whet train --dry-run plans the steps of a language model",
        )
    run, optim = settings.run, settings.optim
    steps = StepSettings(run.batch_size, run.batch_tokens, run.micro_batch_tokens, pack=True)
    rows = min(run.batch_size or run.batch_tokens or 1, steps.micro_tokens)
    found = quality_costs(
        QualitySpec.from_config(settings.model), rows=rows, optimizer=optim.name, momentum=optim.momentum
    )
    say(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found, rows)))


def _lines(found: dict[str, Any], rows: int) -> list[str]:  # Any: JSON values
    memory, flops, shape = found["bytes"], found["flops_per_row"], found["architecture"]
    parts = ", ".join(f"{name} {_size(size)}" for name, size in memory.items() if name != "total")
    table = {
        "model": f"quality {shape['size']}, {shape['arm']}: {shape['hidden']} x {shape['depth']}",
        "parameters": f"{found['param_count']:,} in {found['tensors']} tensors",
        "FLOPs": f"{flops['forward']:,} a row forward, {flops['training']:,} with the backward pass",
        "memory": f"{_size(memory['total'])} in fp32, {rows} rows at once: {parts}",
        "checkpoint": f"{_size(found['tkp1_bytes'])} as TKP1",
        "fingerprint": found["fingerprint"],
        "architecture": json.dumps(shape),
    }
    return [f"{name:<12}  {value}" for name, value in table.items()]


def _size(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB"
