"""whet compare: compare several runs, or several models on the same records or tasks."""

import json
from typing import Any

import typer


def command(
    runs: list[str] = typer.Argument(  # noqa: B008
        help="Runs, or directories of runs; with --data or --tasks also models. The first is the baseline."
    ),
    metric: str | None = typer.Option(
        None, "--metric", help="The metric to rank by; default: the metric that selects the best checkpoint."
    ),
    data: str | None = typer.Option(
        None, "--data", help="Evaluate the models on these records, as in whet eval, and compare them."
    ),
    tasks: str | None = typer.Option(
        None, "--tasks", help="Evaluate the models on these benchmark tasks, as in whet eval."
    ),
    generate: bool = typer.Option(True, help="With --data: also generate answers, for exact match."),
    checks: list[str] = typer.Option(  # noqa: B008
        [], "--check", help="With --data: also check the answers, as in whet eval (repeatable)."
    ),
    samples: int = typer.Option(3, min=0, help="With --data: number of prompts to show with all answers."),
    max_tokens: int = typer.Option(256, min=1, help="With --data: maximum number of generated tokens."),
    max_length: int = typer.Option(2048, min=2, help="With --data: maximum example length, in tokens."),
    limit: int | None = typer.Option(None, "--limit", min=1, help="With --tasks: number of items per task."),
    shots: int | None = typer.Option(
        None, "--shots", min=0, help="With --tasks: number of examples in each prompt."
    ),
    chat: bool = typer.Option(False, "--chat", help="With --tasks: use the chat template."),
    html: str | None = typer.Option(
        None, "--html", help="Also write an HTML page; for runs, with the curves (needs matplotlib)."
    ),
    json_: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """Compare runs, or models on the same records or tasks.

    Without --data and --tasks, the metrics and configs of runs are compared. Runs that differ only in their
    seed form one group.
    """
    from whet.errors import ConfigError

    if data is None and tasks is None:
        if limit is not None or shots is not None or chat or checks:
            raise ConfigError("--check, --limit, --shots and --chat apply to --data or --tasks only")
        _compare_runs(runs, metric, html, as_json=json_)
        return
    if metric is not None:
        raise ConfigError("--metric ranks runs, and does not apply to --data and --tasks")
    if data is not None and (tasks is not None or limit is not None or shots is not None or chat):
        problem = "--data and --tasks exclude each other"
        raise ConfigError(
            problem if tasks is not None else "--limit, --shots and --chat apply to --tasks only"
        )
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    settings = {"generate": generate, "checks": checks, "samples": samples}
    settings |= {"max_tokens": max_tokens, "max_length": max_length}
    settings |= {"limit": limit, "shots": shots, "chat": chat}
    _compare_models(runs, data, names, html, as_json=json_, settings=settings)


def _compare_runs(runs: list[str], metric: str | None, html: str | None, *, as_json: bool) -> None:
    from whet.cli.console import output_option, print_line
    from whet.reporting.compare.compare_text import comparison_text
    from whet.studies.compare_runs import compare_runs, comparison_json

    comparison = compare_runs(runs, metric=metric)
    if html is not None:
        from whet.reporting.compare.compare_page import write_comparison

        with output_option(html, "--html"):
            write_comparison(comparison, html)
    print_line(json.dumps(comparison_json(comparison), indent=2) if as_json else comparison_text(comparison))


def _compare_models(
    models: list[str],
    data: str | None,
    tasks: list[str],
    html: str | None,
    *,
    as_json: bool,
    settings: dict[str, Any],  # Any: keyword arguments of whet.compare_models
) -> None:
    from whet.api.evaluate import compare_models
    from whet.cli.console import output_option, print_line, set_up_logging
    from whet.reporting.compare.models_page import check_page_name, write_models_page
    from whet.reporting.compare.models_text import models_text
    from whet.reporting.console import stderr_console

    set_up_logging()
    if html is not None:
        check_page_name(html)
    with stderr_console().status("loading") as status:
        comparison = compare_models(
            models,
            data,
            tasks=tasks,
            progress=lambda what, done, total: status.update(f"{what}: {done} of {total}"),
            **settings,
        )
    if html is not None:
        with output_option(html, "--html"):
            write_models_page(comparison, html)
    print_line(json.dumps(comparison.to_json(), indent=2) if as_json else models_text(comparison))
