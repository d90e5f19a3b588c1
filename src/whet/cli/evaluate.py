"""whet eval: loss, perplexity and exact match of a model on some records."""

import json
from enum import Enum

import typer


class Supervised(Enum):
    """The choices of data.supervise."""

    assistant = "assistant"
    last = "last"
    all = "all"


def command(
    model: str = typer.Argument(help="A model's name, a model or adapter directory, a GGUF file, or a run."),
    data: str = typer.Option(
        ...,
        "--data",
        help="Records: a file, a directory (its test split, or ledgers), hf:NAME or synth:NAME:N.",
    ),
    generate: bool = typer.Option(True, help="Also generate each answer, for exact match."),
    samples: int = typer.Option(3, min=0, help="Show this many questions with their answers."),
    max_tokens: int = typer.Option(256, min=1, help="Longest generated answer."),
    max_length: int = typer.Option(2048, min=2, help="Longest example, in tokens."),
    split: bool = typer.Option(False, "--split", help="Split longer ones into windows, all of which count."),
    supervise: Supervised = typer.Option(Supervised.assistant, help="Tokens whose loss counts."),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print the numbers as one JSON object."),
) -> None:
    """Evaluate MODEL on DATA."""
    from whet.api import evaluate
    from whet.cli.console import set_up_logging
    from whet.model_io.formats.classifier_head import is_classifier
    from whet.model_io.resolve import usable_directory
    from whet.reporting.console import notes
    from whet.reporting.progress import describe
    from whet.reporting.text.classifier_text import classification_text

    set_up_logging()
    with notes().status("evaluating") as status:
        metrics = evaluate(
            model,
            data,
            generate=generate,
            samples=samples,
            max_tokens=max_tokens,
            max_length=max_length,
            too_long="split" if split else "truncate",
            supervise=supervise.value,
            progress=lambda done, total: status.update(f"generating: {done} of {total} answers"),
        )
    if as_json:
        print(json.dumps(metrics))
    elif is_classifier(usable_directory(model)):
        print(classification_text(metrics))
    else:
        print(describe(metrics))
