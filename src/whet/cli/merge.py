"""whet merge: an adapter into its base, or several models into one."""

from enum import Enum
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence


class MergeMethod(Enum):
    """The ways to merge several models."""

    average = "average"
    slerp = "slerp"
    task = "task"
    ties = "ties"
    dare = "dare"
    dare_ties = "dare-ties"


class Dtype(Enum):
    """What weights can be rounded to."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


MODELS = typer.Argument(help="A run or an adapter; with --method, several models, runs or adapters.")
DTYPE = typer.Option(None, help="Round the weights to this; the dtype of the base when not given.")
TOLERANCE = typer.Option(None, min=0.0, help="Refuse a larger logit difference than this.")


def command(
    models: list[str] = MODELS,
    out: str = typer.Option(..., "--out", help="The model directory to write."),
    method: MergeMethod | None = typer.Option(None, help="How to make one model out of several."),  # noqa: B008
    base: str | None = typer.Option(None, help="What task, ties and dare measure each model against."),
    weights: str | None = typer.Option(None, help="One number a model: 0.3,0.7."),
    density: float | None = typer.Option(None, help="Share of each update that ties and dare keep."),
    seed: int | None = typer.Option(None, help="Seed of what dare drops."),
    dtype: Dtype | None = DTYPE,
    tolerance: float | None = TOLERANCE,
) -> None:
    """Merge an adapter into its base, or with --method several models into one."""
    from whet.cli.console import set_up_logging

    set_up_logging()
    if method is None:
        _refuse(
            {"--base": base, "--weights": weights, "--density": density, "--seed": seed}, "needs --method"
        )
        _merge_adapter(models, out, dtype, tolerance)
        return
    _refuse({"--dtype": dtype, "--tolerance": tolerance}, "is for merging one adapter, without --method")
    from whet.model_io.merging.merge_models import merge_models

    recipe = merge_models(
        models, out, method=method.value, base=base, weights=_numbers(weights), density=density, seed=seed
    )
    shown = ", ".join(f"{weight:g} {model}" for weight, model in zip(recipe.weights, models, strict=True))
    print(f"{recipe.method} of {shown}: {out}")


def _merge_adapter(models: "Sequence[str]", out: str, dtype: Dtype | None, tolerance: float | None) -> None:
    import torch

    from whet.errors import ConfigError, ModelError
    from whet.model_io.export.export_model import dtype_name, fold, load_exact, write_hf

    if len(models) != 1:
        raise ConfigError(
            f"{len(models)} models were given, and no --method to merge them",
            hint=f"choose one of: {', '.join(known.value for known in MergeMethod)}",
        )
    loaded = load_exact(models[0])
    if not loaded.has_adapter:
        raise ModelError(f"{models[0]} has no adapter: it is a whole model already", hint="use it as it is")
    onto, chosen = loaded.base, loaded.dtype if dtype is None else getattr(torch, dtype.value)
    difference = fold(loaded, chosen, tolerance=tolerance)
    write_hf(loaded, out, chosen)
    print(f"merged onto {onto} in {dtype_name(chosen)}: {difference}\n{out}")


def _refuse(options: dict[str, object], why: str) -> None:
    from whet.errors import ConfigError

    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} {why}")


def _numbers(text: str | None) -> list[float] | None:
    from whet.errors import ConfigError

    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: not a list of numbers", hint="as in 0.3,0.7") from None
