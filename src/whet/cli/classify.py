"""whet classify: what class a text belongs to."""

import json

import typer


def command(
    run: str = typer.Argument(help="A run with objective.kind: classify, a checkpoint of it, or its final/."),
    texts: list[str] = typer.Argument(None, help="Texts to classify."),  # noqa: B008
    data: str | None = typer.Option(
        None, "--data", help="Records with labels, for a report: a file, a directory (its test split), ..."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each text."),
) -> None:
    """Classify TEXTS: a line each, with the probability of every class that counts."""
    from whet.cli.console import set_up_logging
    from whet.errors import ConfigError

    set_up_logging()
    if bool(texts) == (data is not None):
        raise ConfigError("give either texts or --data")
    if data is not None:
        report_classifier(run, data, as_json=as_json)
        return
    from whet.recipes.classify.classifier import Classifier

    classifier = Classifier.load(run)
    names = classifier.info.classes
    probabilities = classifier.predict_proba(texts)
    for text, chosen, row in zip(texts, classifier.choose(probabilities), probabilities, strict=True):
        chances = dict(zip(names, map(float, row), strict=True))
        if as_json:
            label = "labels" if classifier.info.multi_label else "label"
            print(json.dumps({"text": text, label: chosen, "probabilities": chances}, ensure_ascii=False))
            continue
        said = chosen if isinstance(chosen, str) else ", ".join(chosen) or "none"
        likely = sorted(chances, key=lambda name: -chances[name])[:3]
        print(f"{said}  ({', '.join(f'{name} {chances[name]:.1%}' for name in likely)})")


def report_classifier(run: str, data: str, *, as_json: bool) -> None:
    """The report of a classifier on some records."""
    from whet.recipes.classify.classifier import Classifier
    from whet.reporting.text.classifier_text import classification_text

    report = Classifier.load(run).evaluate(data)
    print(json.dumps(report) if as_json else classification_text(report))
