"""How records are read for an evaluation: given options, or the data settings of the evaluated run."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from whet.config.data import Data, Format
from whet.config.load_config import load_config
from whet.data.sources.source import Source, SourceSpec, open_source
from whet.data.tokens.loss_mask import Supervise
from whet.errors import ConfigError, WhetError
from whet.run_directory import CONFIG_FILE

log = logging.getLogger("whet")


@dataclass(frozen=True)
class DataOptions:
    """Options of the `data` section that apply to an evaluation."""

    columns: Mapping[str, str] = field(default_factory=dict)
    form: Format = "auto"
    template: str | None = None  # None: that of the tokenizer
    template_args: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON values
    supervise: Supervise = "assistant"
    supervise_thinking: bool = True
    ignore: tuple[str, ...] = ()

    def open(self, spec: SourceSpec) -> Source:
        """Open the test split of a source."""
        return open_source(spec, split="test", form=self.form, ignore=self.ignore, columns=self.columns)

    def apply_template(self, tokenizer: Any) -> Any:  # Any: a transformers tokenizer
        """Return the tokenizer, or a copy of it with the chosen chat template."""
        if self.template is None:
            return tokenizer
        import copy

        from whet.data.templates.builtin import load_template

        copied = copy.copy(tokenizer)
        copied.chat_template = load_template(self.template)
        return copied

    def replace_given(self, **given: Any) -> "DataOptions":  # Any: the types of the fields
        """Return a copy with the options that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def options_of_model(model: object) -> DataOptions:
    """Return the data settings of the run that a model belongs to, or the defaults.

    The chat template of a run is saved with its model, so it is not one of them.
    """
    directory = _run_of(Path(model).expanduser()) if isinstance(model, str | Path) else None
    if directory is None:
        return DataOptions()
    try:
        config = load_config(directory / CONFIG_FILE)
    except WhetError as error:
        log.warning("%s: its data settings are not used: %s", directory, error.message)
        return DataOptions()
    if config.parts():  # each part has its own
        return DataOptions()
    data = config.data
    options = DataOptions(
        columns=data.columns,
        template_args=data.template_args,
        supervise=data.supervise,
        supervise_thinking=data.supervise_thinking,
        ignore=tuple(data.ignore),
    )
    changed = [name for name, value in vars(options).items() if value != getattr(DataOptions(), name)]
    if changed:
        log.info("using the run's %s", ", ".join(f"data.{name}" for name in changed))
    return options


def _run_of(path: Path) -> Path | None:
    """Return the run directory of a run, its final/ or one of its checkpoints."""
    candidates = (path, path.parent, path.parent.parent)
    return next((each for each in candidates if (each / CONFIG_FILE).is_file()), None)


def parse_columns(text: str) -> dict[str, str]:
    """Return the mapping that `FIELD=COLUMN,FIELD=COLUMN` describes; empty for "none".

    Raises:
        ConfigError: the text has another form.
    """
    if text == "none":
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(separator and name.strip() and column.strip() for name, separator, column in pairs):
        raise ConfigError(
            f"--columns {text!r} is not a list of FIELD=COLUMN",
            hint="write --columns prompt=question,completion=answer",
        )
    return {name.strip(): column.strip() for name, _, column in pairs}


def parse_format(name: str) -> Format:
    """Return a record format by name.

    Raises:
        ConfigError: there is no such format.
    """
    for known in get_args(Data.model_fields["format"].annotation):
        if name == known:
            return name  # type: ignore[return-value]  # one of the literals
    known_names = ", ".join(get_args(Data.model_fields["format"].annotation))
    raise ConfigError(f"unknown record format {name!r}", hint=f"known: {known_names}")


def parse_template_args(text: str) -> dict[str, Any]:  # Any: JSON values
    """Return the arguments that a JSON object or `NAME=VALUE,NAME=VALUE` describes; empty for "none".

    Raises:
        ConfigError: the text has another form.
    """
    import yaml

    if text == "none":
        return {}
    try:
        if text.lstrip().startswith("{"):
            arguments = yaml.safe_load(text)
        else:
            pairs = [part.partition("=") for part in text.split(",")]
            if not all(separator and name.strip() for name, separator, _ in pairs):
                raise ValueError
            arguments = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    except (ValueError, yaml.YAMLError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"--template-args {text!r} is neither a JSON object nor a list of NAME=VALUE",
            hint="write --template-args enable_thinking=false",
        )
    return arguments
