"""whet pull: get a model before it is needed."""

import typer


def command(name: str = typer.Argument(help="A model's name, e.g. smollm2-135m-instruct.")) -> None:
    """Fetch a model into the cache and print where it is."""
    from whet.model_io.hub import resolve

    print(resolve(name))
