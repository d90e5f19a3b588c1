"""whet teach: store a teacher's predictions for offline distillation."""

import shlex

import typer


def command(
    config: str = typer.Argument(help="A YAML config with objective: {kind: distill, offline: {...}}."),
    overrides: list[str] = typer.Argument(None, help="Overrides: section.key=value, as for whet train"),  # noqa: B008
) -> None:
    """Store teacher logits for offline distillation.

    Writes the teachers' most likely tokens per position, so that whet train does not load the teachers.
    """
    from whet.cli.console import print_line, set_up_logging
    from whet.config.load_config import load_config
    from whet.runs.teach import store_teacher_logprobs

    set_up_logging()
    store_teacher_logprobs(load_config(config, overrides or ()))
    print_line(f"train with: {shlex.join(['whet', 'train', config, *(overrides or [])])}")
