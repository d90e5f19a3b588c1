"""whet lab: verify muP (coordinate check, learning-rate transfer) on a given config."""

from collections.abc import Callable
from typing import TypeVar

import typer

app = typer.Typer(
    help="Check muP: coordinate check, learning-rate transfer.", no_args_is_help=True, rich_markup_mode=None
)

_Number = TypeVar("_Number", int, float)

CONFIG = typer.Argument(help="A YAML config with model.preset and optim.mup.base_width.")
OVERRIDES = typer.Argument(None, help="Overrides: section.key=value, e.g. optim.name=muon")
SEEDS = typer.Option(1, min=1, max=1000, help="Runs per point, with run.seed, run.seed + 1, ...")
OUT = typer.Option(None, "--out", help="Output directory; default: one next to the run.")


@app.command("coord-check")
def coord_check(
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
    widths: str = typer.Option("64,128,256,512,1024", help="Values of d_model, separated by commas."),
    steps: int = typer.Option(20, min=1, help="Training steps before the activations are measured."),
    seeds: int = SEEDS,
    out: str = OUT,
) -> None:
    """Measure activation sizes over the width.

    Trains a few steps at every width, with muP and with standard parametrization. With muP, the sizes
    should not depend on the width.
    """
    from pathlib import Path

    from whet.cli.console import print_line
    from whet.config.load_config import load_config
    from whet.reporting.console import stderr_console
    from whet.reporting.text.mup_text import describe_check, write_check
    from whet.studies.coordinate_check import coordinate_check

    settings = load_config(config, overrides or ())
    width_values = _parse_positive("--widths", widths, int)
    directory = Path(out or f"{settings.directory}-coord-check")
    directory.mkdir(parents=True, exist_ok=True)
    check = coordinate_check(
        settings, widths=width_values, steps=steps, seeds=seeds, log_line=stderr_console().print
    )
    print_line(describe_check(check))
    for path in write_check(check, directory):
        print_line(f"written: {path}")


@app.command("lr-sweep")
def lr_sweep(
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
    widths: str = typer.Option("32,64,128,256", help="Values of d_model, separated by commas."),
    lrs: str = typer.Option(
        None, help="Learning rates, separated by commas; default: optim.lr times 1/8, 1/4, ..., 8."
    ),
    seeds: int = SEEDS,
    out: str = OUT,
) -> None:
    """Find the best learning rate at each width.

    With muP and with standard parametrization. Rerun the same command to resume an interrupted sweep.
    """
    from pathlib import Path

    from whet.cli.console import print_line
    from whet.config.load_config import load_config, to_dict
    from whet.recipes.registry import recipe_for
    from whet.reporting.console import stderr_console
    from whet.reporting.text.mup_text import describe_sweep, plot_sweep
    from whet.studies.lr_transfer import RESULTS_FILE, load_points, save_sweep
    from whet.studies.lr_transfer import lr_sweep as run_lr_sweep

    settings = load_config(config, overrides or ())
    rates = (
        [settings.optim.lr * 2.0**n for n in range(-3, 4)]
        if lrs is None
        else _parse_positive("--lrs", lrs, float)
    )
    directory = Path(out or f"{settings.directory}-lr-sweep")
    directory.mkdir(parents=True, exist_ok=True)
    shared = to_dict(settings)
    del shared["optim"]["lr"]
    digests = recipe_for(settings).open_data().digests()
    transfer = run_lr_sweep(
        settings,
        widths=_parse_positive("--widths", widths, int),
        lrs=rates,
        seeds=seeds,
        known_points=load_points(directory, settings=shared, data=digests),
        save=lambda sweep: save_sweep(sweep, directory, settings=shared, data=digests),
        log_line=stderr_console().print,
    )
    print_line(describe_sweep(transfer))
    for path in (directory / RESULTS_FILE, *plot_sweep(transfer, directory)):
        print_line(f"written: {path}")


def _parse_positive(option: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    from whet.errors import ConfigError

    try:
        values = sorted({kind(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not a list of numbers separated by commas") from error
    if values[0] <= 0:
        raise ConfigError(f"{option} {text!r}: every value must be above 0")
    return values
