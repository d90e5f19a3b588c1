"""whet eval: loss, perplexity and exact match of a model on some records."""

import json
from enum import Enum
from pathlib import Path

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
    from whet.cli.classify import report_classifier
    from whet.cli.console import notes, set_up_logging
    from whet.data.sources.source import open_source
    from whet.errors import DataError
    from whet.evaluation.evaluate_model import ModelEvaluation
    from whet.model_io.formats.classifier_head import is_classifier
    from whet.model_io.load import load
    from whet.model_io.resolve import usable_directory
    from whet.reporting.progress import describe
    from whet.run_directory import ARCH_FILE

    set_up_logging()
    directory = Path(usable_directory(model)).expanduser()
    if (directory / ARCH_FILE).is_file() and not (directory / "config.json").is_file():
        from whet.recipes.quality.quality import evaluate_quality

        rows = evaluate_quality(directory, data)
        print(json.dumps(rows) if as_json else describe(rows))
        return
    if is_classifier(usable_directory(model)):
        report_classifier(model, data, as_json=as_json)
        return
    source = open_source(data, split="test")
    loaded, tokenizer = load(model)
    if tokenizer is None:
        raise DataError(f"{model} has no tokenizer, so it cannot read {data}")
    evaluation = ModelEvaluation(
        loaded,
        tokenizer,
        source,
        max_length=min(max_length, loaded.max_positions),
        supervise=supervise.value,
        too_long="split" if split else "truncate",
    )
    notes().print(f"{data}: {evaluation.summary}", highlight=False)
    metrics = evaluation.loss()
    if generate and evaluation.questions:
        for question, answer in evaluation.answers(samples, max_tokens=max_tokens):
            notes().print(
                f"  asked     {question.text}\n  expected  {question.answer}\n  answered  {answer}\n",
                markup=False,
            )
        total = len(evaluation.questions)
        with notes().status(f"generating {total} answers") as status:
            metrics |= evaluation.exact_match(
                max_tokens=max_tokens,
                progress=lambda answered: status.update(f"generating: {answered} of {total} answers"),
            )
    print(json.dumps(metrics) if as_json else describe(metrics))
