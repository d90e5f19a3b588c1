"""One run at several widths, by muP and as usual: what the checks of muP are made of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from whet.config.load_config import make_config, to_dict
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.models.from_scratch.presets import PRESETS

Parametrisation = Literal["mup", "standard"]
PARAMETRISATIONS: tuple[Parametrisation, ...] = get_args(Parametrisation)


def at_width(config: RunConfig, width: int, parametrisation: Parametrisation, **optim: float) -> RunConfig:
    """The run on a model that is wider or narrower in everything that muP takes to grow with the width.

    Heads grow, or become more where optim.mup.base_head_dim says that their size is given.
    """
    if not isinstance(config.model, Preset) or config.optim.mup is None:
        raise ConfigError(
            "this compares widths of a model from scratch under muP",
            hint="it needs model.preset and optim.mup.base_width",
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
                f"at a width of {width}, model.{key} would be {size * width / shape.d_model:g}",
                hint=f"choose widths to which {key} {size} at d_model {shape.d_model} can be scaled",
            )
    values["optim"] |= optim
    if parametrisation == "standard":
        values["optim"]["mup"] = None
    return make_config(values)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The same run with other random numbers."""
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of a straight line through points, by least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - mean_x) ** 2 for x in xs)
