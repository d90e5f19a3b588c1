"""whet convert: translate the config of another tool."""

from enum import StrEnum

import typer


class Tool(StrEnum):
    """The tools whose configs can be translated."""

    AXOLOTL = "axolotl"
    LLAMA_FACTORY = "llama-factory"
    TRL = "trl"
    MLX_LM = "mlx-lm"


def command(
    file: str = typer.Argument(metavar="FILE", help="A YAML or JSON config of another tool."),
    out: str | None = typer.Option(
        None, "--out", "-o", help="Write to this file instead of standard output."
    ),
    tool: Tool | None = typer.Option(  # noqa: B008
        None, "--from", help="The tool; by default recognized by its keys."
    ),
    gpus: int = typer.Option(
        1, "--gpus", min=1, help="GPUs the config was written for: other tools count a batch per GPU."
    ),
) -> None:
    """Translate the config of another tool.

    Reads a config of axolotl, LLaMA-Factory, TRL or mlx-lm. Writes a commented whet config, and names every
    key that has no counterpart.
    """
    from pathlib import Path

    from whet.cli.console import output_option, print_line
    from whet.config.convert.convert_config import convert_config
    from whet.config.load_config import validate_config
    from whet.errors import ConfigError
    from whet.reporting.console import stderr_console
    from whet.storage import create_file_atomically, write_text

    def show(line: str) -> None:
        stderr_console().print(line, highlight=False)

    translation = convert_config(file, tool, gpus=gpus)
    text = translation.to_yaml(Path(file).name)
    if out is None:
        print_line(text.rstrip())
    else:
        with output_option(out, "--out"), create_file_atomically(Path(out)) as staging:
            write_text(staging, text)
        print_line(f"wrote {out}")
    for key, reason in translation.untranslated.items():
        show(f"not translated: {key}: {reason}")
    try:
        validate_config(translation.values(), origin=out or "the converted config")
    except ConfigError as error:
        show(f"warning: edit the config before you train: {error}")
