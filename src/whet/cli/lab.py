"""whet lab: checks that muP does what it promises, for a config of one's own."""

from collections.abc import Callable
from typing import TypeVar

import typer

app = typer.Typer(help="Check muP on a config.", no_args_is_help=True, rich_markup_mode=None)

_Number = TypeVar("_Number", int, float)

CONFIG = typer.Argument(help="A YAML file with model.preset and optim.mup.base_width.")
OVERRIDES = typer.Argument(None, help="section.key=value, e.g. optim.name=muon")
SEEDS = typer.Option(1, min=1, max=1000, help="Runs of each, with run.seed, run.seed + 1, ...")
OUT = typer.Option(None, "--out", help="The directory to write to; if not given, one beside the run.")


@app.command("coord-check")
def coord_check(
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
    widths: str = typer.Option("64,128,256,512,1024", help="Values of d_model, with commas."),
    steps: int = typer.Option(20, min=1, help="Steps after which activations are measured."),
    seeds: int = SEEDS,
    out: str = OUT,
) -> None:
    """Measure how the size of activations after some steps depends on the width, with muP and without."""
    from pathlib import Path

    from whet.cli.console import say
    from whet.config.load_config import load_config
    from whet.reporting.console import notes
    from whet.reporting.text.mup_text import describe_check, write_check
    from whet.studies.coordinate_check import coordinate_check

    settings = load_config(config, overrides or ())
    numbers = _numbers("--widths", widths, int)
    directory = Path(out or f"{settings.directory}-coord-check")
    directory.mkdir(parents=True, exist_ok=True)
    check = coordinate_check(settings, widths=numbers, steps=steps, seeds=seeds, tell=notes().print)
    say(describe_check(check))
    for path in write_check(check, directory):
        say(f"written: {path}")


@app.command("lr-sweep")
def lr_sweep(
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
    widths: str = typer.Option("32,64,128,256", help="Values of d_model, with commas."),
    lrs: str = typer.Option(
        None, help="Learning rates, with commas; if not given, optim.lr times 1/8, 1/4, ... 8."
    ),
    seeds: int = SEEDS,
    out: str = OUT,
) -> None:
    """Find the best learning rate at each width, with muP and without. A stopped sweep goes on."""
    from pathlib import Path

    from whet.cli.console import say
    from whet.config.load_config import load_config, to_dict
    from whet.recipes.registry import recipe_for
    from whet.reporting.console import notes
    from whet.reporting.text.mup_text import describe_sweep, plot_sweep
    from whet.studies.lr_transfer import RESULTS_FILE, keep_sweep, kept_points
    from whet.studies.lr_transfer import lr_sweep as sweep_rates

    settings = load_config(config, overrides or ())
    rates = (
        [settings.optim.lr * 2.0**n for n in range(-3, 4)] if lrs is None else _numbers("--lrs", lrs, float)
    )
    directory = Path(out or f"{settings.directory}-lr-sweep")
    directory.mkdir(parents=True, exist_ok=True)
    shared = to_dict(settings)
    del shared["optim"]["lr"]
    digests = recipe_for(settings).open_data().digests()
    found = sweep_rates(
        settings,
        widths=_numbers("--widths", widths, int),
        lrs=rates,
        seeds=seeds,
        known=kept_points(directory, settings=shared, data=digests),
        keep=lambda sweep: keep_sweep(sweep, directory, settings=shared, data=digests),
        tell=notes().print,
    )
    say(describe_sweep(found))
    for path in (directory / RESULTS_FILE, *plot_sweep(found, directory)):
        say(f"written: {path}")


def _numbers(option: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    from whet.errors import ConfigError

    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not a list of numbers with commas") from error
    if found[0] <= 0:
        raise ConfigError(f"{option} {text!r}: each must be above 0")
    return found
