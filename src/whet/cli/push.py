"""whet push: upload a model to the Hugging Face hub."""

import typer


def command(
    run: str = typer.Argument(help="A run, or a directory or GGUF file with a model."),
    repository: str = typer.Argument(help="The repository on the hub: OWNER/NAME."),
    what: str = typer.Option("final", help="What to upload: final, or the path of an export in the run."),
    private: bool = typer.Option(
        False, "--private", help="Create a private repository; refuse an existing public one."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="List the files and their sizes. Nothing is uploaded, no network is used."
    ),
    base_model: str | None = typer.Option(
        None, help="For an adapter of a local base model: the base model's name on the hub."
    ),
) -> None:
    """Upload a model to the Hugging Face hub.

    Only the files of a model are uploaded: never checkpoints, data, links or paths of this machine.
    """
    from whet.api.export import push
    from whet.cli.console import print_line
    from whet.reporting.text.push_text import push_text

    result = push(run, repository, what=what, private=private, dry_run=dry_run, base_model=base_model)
    print_line(push_text(result))
