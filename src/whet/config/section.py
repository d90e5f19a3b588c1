"""What every section of a config is, and the kinds of values that several of them have."""

import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Factor = Annotated[float, Field(ge=0, lt=1)]


def _as_text(value: Any) -> Any:  # Any: YAML values
    """What YAML reads as a number or a date, and Python as a path, is a name all the same."""
    return str(value) if isinstance(value, int | float | datetime.date | Path) else value


Text = Annotated[str, BeforeValidator(_as_text)]


class Section(BaseModel):
    """A strict, frozen group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
