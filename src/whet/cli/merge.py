"""whet merge: merge an adapter into its base model, or several models into one."""

from enum import Enum
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence


class MergeMethod(Enum):
    """The values of --method."""

    average = "average"
    slerp = "slerp"
    task = "task"
    ties = "ties"
    dare = "dare"
    dare_ties = "dare-ties"


class Dtype(Enum):
    """The values of --dtype."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


MODELS = typer.Argument(help="A run or an adapter; with --method, several models, runs or adapters.")
DTYPE = typer.Option(None, help="Dtype of the written weights; default: that of the base model.")
TOLERANCE = typer.Option(None, min=0.0, help="Fail if the logits differ by more than this.")


def command(
    models: list[str] = MODELS,
    out: str = typer.Option(..., "--out", help="Output model directory."),
    method: MergeMethod | None = typer.Option(None, help="How to merge several models."),  # noqa: B008
    base: str | None = typer.Option(None, help="Base model for task, ties and dare."),
    weights: str | None = typer.Option(None, help="One weight per model, e.g. 0.3,0.7."),
    density: float | None = typer.Option(None, help="Share of each model's update that ties and dare keep."),
    seed: int | None = typer.Option(None, help="Random seed of dare."),
    dtype: Dtype | None = DTYPE,
    tolerance: float | None = TOLERANCE,
) -> None:
    """Merge an adapter into its base, or several models.

    Without --method, MODELS is one run or adapter. With --method, it is two or more models.
    """
    from whet.cli.console import set_up_logging

    set_up_logging()
    if method is None:
        _reject_options(
            {"--base": base, "--weights": weights, "--density": density, "--seed": seed}, "needs --method"
        )
        _merge_adapter(models, out, dtype, tolerance)
        return
    _reject_options(
        {"--dtype": dtype, "--tolerance": tolerance}, "is for merging one adapter, without --method"
    )
    from whet.model_io.merging.merge_models import merge_models

    recipe = merge_models(
        models,
        out,
        method=method.value,
        base=base,
        weights=_parse_weights(weights),
        density=density,
        seed=seed,
    )
    weighted_models = ", ".join(
        f"{weight:g} {model}" for weight, model in zip(recipe.weights, models, strict=True)
    )
    print(f"{recipe.method} of {weighted_models}: {out}")


def _merge_adapter(models: "Sequence[str]", out: str, dtype: Dtype | None, tolerance: float | None) -> None:
    import torch

    from whet.errors import ConfigError, ModelError
    from whet.model_io.export.export_model import dtype_name, load_for_export, merge_adapter, write_hf

    if len(models) != 1:
        raise ConfigError(
            f"merging {len(models)} models needs --method",
            hint=f"choose one of: {', '.join(choice.value for choice in MergeMethod)}",
        )
    loaded = load_for_export(models[0])
    if not loaded.has_adapter:
        raise ModelError(f"{models[0]} has no adapter: it is already a full model", hint="use it directly")
    base, target_dtype = loaded.base, loaded.dtype if dtype is None else getattr(torch, dtype.value)
    difference = merge_adapter(loaded, target_dtype, tolerance=tolerance)
    write_hf(loaded, out, target_dtype)
    print(f"merged into {base} in {dtype_name(target_dtype)}: {difference}\n{out}")


def _reject_options(options: dict[str, object], reason: str) -> None:
    from whet.errors import ConfigError

    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} {reason}")


def _parse_weights(text: str | None) -> list[float] | None:
    from whet.errors import ConfigError

    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights {text} is not a list of numbers", hint="separate them with commas: 0.3,0.7"
        ) from None
