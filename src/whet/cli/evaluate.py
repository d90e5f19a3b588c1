"""whet eval: loss, perplexity and exact match of a model on a dataset."""

import json
from enum import Enum

import typer


class Supervised(Enum):
    """The values of --supervise, which are those of data.supervise."""

    assistant = "assistant"
    last = "last"
    all = "all"
    completion = "completion"


def command(
    model: str = typer.Argument(help="A model's name, a model or adapter directory, a GGUF file, or a run."),
    data: str = typer.Option(
        ...,
        "--data",
        help="Records: a file, a directory (its test split, or ledgers), hf:NAME or synth:NAME:N.",
    ),
    generate: bool = typer.Option(True, help="Also generate completions, for exact match."),
    samples: int = typer.Option(3, min=0, help="Number of prompts to show with their completions."),
    max_tokens: int = typer.Option(256, min=1, help="Maximum number of generated tokens."),
    max_length: int = typer.Option(2048, min=2, help="Maximum example length, in tokens."),
    split: bool = typer.Option(
        False, "--split", help="Split longer examples into windows instead of truncating them."
    ),
    supervise: Supervised = typer.Option(  # noqa: B008
        Supervised.assistant,
        help="Tokens that count towards the loss: all, all assistant turns, the last one, or those after the "
        "last user message.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the metrics as one JSON object."),
) -> None:
    """Compute loss, perplexity and exact match of a model."""
    from whet.api import evaluate
    from whet.cli.console import set_up_logging
    from whet.model_io.formats.classifier_head import is_classifier
    from whet.model_io.resolve import local_model_directory
    from whet.reporting.console import stderr_console
    from whet.reporting.progress import format_metrics
    from whet.reporting.text.classifier_text import classification_text

    set_up_logging()
    with stderr_console().status("evaluating") as status:
        metrics = evaluate(
            model,
            data,
            generate=generate,
            samples=samples,
            max_tokens=max_tokens,
            max_length=max_length,
            too_long="split" if split else "truncate",
            supervise=supervise.value,
            progress=lambda done, total: status.update(f"generating: {done} of {total} completions"),
        )
    if as_json:
        print(json.dumps(metrics))
    elif is_classifier(local_model_directory(model)):
        print(classification_text(metrics))
    else:
        print(format_metrics(metrics))
