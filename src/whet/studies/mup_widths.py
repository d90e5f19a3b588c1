"""Variants of a config at other widths, with muP or with standard parametrization."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from whet.config.load_config import to_dict, validate_config
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.models.from_scratch.presets import PRESETS

Parametrisation = Literal["mup", "standard"]
PARAMETRISATIONS: tuple[Parametrisation, ...] = get_args(Parametrisation)


def at_width(config: RunConfig, width: int, parametrisation: Parametrisation, **optim: float) -> RunConfig:
    """Return the config with all sizes scaled to a width, and with the given `optim` keys.

    The head size grows with the width, or the number of heads if optim.mup.base_head_dim is set.
    """
    if not isinstance(config.model, Preset) or config.optim.mup is None:
        raise ConfigError(
            "muP checks need a model built from scratch",
            hint="set model.preset and optim.mup.base_width",
        )
    shape = replace(PRESETS[config.model.preset], **config.model.changes())
    sizes = {"d_model": shape.d_model, "width": shape.width}
    if config.optim.mup.base_head_dim is not None:
        sizes |= {"heads": shape.heads, "kv_heads": shape.kv_heads or shape.heads}
    elif shape.head_dim is not None:
        sizes |= {"head_dim": shape.head_dim}
    values = to_dict(config)
    for key, size in sizes.items():
        values["model"][key], rest = divmod(size * width, shape.d_model)
        if rest:
            raise ConfigError(
                f"at width {width}, model.{key} would not be an integer: {size * width / shape.d_model:g}",
                hint=f"choose widths that scale {key} {size} at d_model {shape.d_model} to an integer",
            )
    values["optim"] |= optim
    if parametrisation == "standard":
        values["optim"]["mup"] = None
    return validate_config(values)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """Return the config with another seed."""
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line through points."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)
