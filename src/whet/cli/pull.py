"""whet pull: download a model ahead of time."""

import typer


def command(name: str = typer.Argument(help="A model's name, e.g. smollm2-135m-instruct.")) -> None:
    """Download a model into the cache and print its path."""
    from whet.model_io.resolve_model import resolve_model

    print(resolve_model(name))
