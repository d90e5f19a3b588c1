"""whet init: write a starter config and sample data."""

from enum import StrEnum

import typer


class Kind(StrEnum):
    """The tasks that have a starter project."""

    SFT = "sft"
    DPO = "dpo"
    GRPO = "grpo"
    CLASSIFY = "classify"
    PRETRAIN = "pretrain"
    DISTILL = "distill"


def command(
    kind: Kind = typer.Argument(Kind.SFT, help="The task."),  # noqa: B008
    directory: str = typer.Option(".", "--dir", help="Where to write the files."),
) -> None:
    """Write a starter config and sample data.

    Both train as they are: edit them for your own data.
    """
    from pathlib import Path

    from whet.cli.console import print_line
    from whet.runs.starter import STARTERS, write_starter

    config, *records = write_starter(kind, Path(directory))
    print_line(f"{config}: {STARTERS[kind].summary}")
    print_line(f"sample records: {', '.join(map(str, records))}")
    print_line(f"next: whet data {config} --check   shows what the model will see")
    print_line(f"      whet train {config}")
