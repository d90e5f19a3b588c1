"""whet classify: predict the classes of texts."""

import json

import typer


def command(
    run: str = typer.Argument(
        help="A run with objective.kind: classify, one of its checkpoints, or its final/."
    ),
    texts: list[str] = typer.Argument(None, help="Texts to classify."),  # noqa: B008
    data: str | None = typer.Option(
        None, "--data", help="Evaluate on labeled records: a file, a directory (its test split), ..."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per text."),
) -> None:
    """Classify texts with a trained classifier.

    Prints one line per text, with the probabilities of the three most likely classes.
    """
    from whet.cli.console import set_up_logging
    from whet.errors import ConfigError

    set_up_logging()
    if bool(texts) == (data is not None):
        raise ConfigError("give either TEXTS or --data (exactly one of the two)")
    if data is not None:
        report_classifier(run, data, as_json=as_json)
        return
    from whet.recipes.classify.classifier import Classifier

    classifier = Classifier.load(run)
    names = classifier.info.classes
    probabilities = classifier.predict_proba(texts)
    for text, chosen, row in zip(texts, classifier.choose(probabilities), probabilities, strict=True):
        by_class = dict(zip(names, map(float, row), strict=True))
        if as_json:
            label = "labels" if classifier.info.multi_label else "label"
            print(json.dumps({"text": text, label: chosen, "probabilities": by_class}, ensure_ascii=False))
            continue
        prediction = chosen if isinstance(chosen, str) else ", ".join(chosen) or "none"
        likeliest = sorted(by_class, key=lambda name: -by_class[name])[:3]
        print(f"{prediction}  ({', '.join(f'{name} {by_class[name]:.1%}' for name in likeliest)})")


def report_classifier(run: str, data: str, *, as_json: bool) -> None:
    """Evaluate a classifier on labeled records and print the report."""
    from whet.recipes.classify.classifier import Classifier
    from whet.reporting.text.classifier_text import classification_text

    report = Classifier.load(run).evaluate(data)
    print(json.dumps(report) if as_json else classification_text(report))
