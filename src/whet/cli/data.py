"""whet data: show the training data as the model sees it."""

import typer


def command(
    config: str = typer.Argument(help="A YAML config, as for whet train."),
    overrides: list[str] = typer.Argument(  # noqa: B008
        None, help="Overrides: section.key=value, e.g. data.max_length=512"
    ),
    html: str | None = typer.Option(
        None, "--html", help="Also write an HTML page to this file (one page per part of a mix)."
    ),
    check: bool = typer.Option(
        False, "--check", help="List every problem, and exit with code 2 if there is one."
    ),
    samples: int = typer.Option(2, min=0, help="Number of examples to show per split."),
    device: str | None = typer.Option(
        None, "--device", help="Also estimate the time on a device, as in whet plan; this: this machine."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything as one JSON object."),
) -> None:
    """Show tokenized examples, loss masks and packing.

    Also reports lengths, duplicates and other problems of the data in CONFIG. No model weights are loaded.
    """
    import json
    from dataclasses import replace
    from pathlib import Path

    from whet.cli.console import output_option, print_line, set_up_logging, stdout_console
    from whet.config.load_config import load_config
    from whet.data.inspect.problems import find_problems
    from whet.planning.devices import find_target
    from whet.reporting.data.data_json import data_json
    from whet.reporting.data.data_page import data_page
    from whet.reporting.data.data_text import DataText
    from whet.runs.inspect_data import estimate_cost, view_data_by_part
    from whet.storage import replace_text

    set_up_logging()
    text = DataText(stdout_console())
    has_problems = False
    parts = {}
    settings = load_config(config, overrides or ())
    if device is not None:
        find_target(device, settings)  # report an unknown name before reading the data
    for part, data_view in view_data_by_part(settings, samples=samples).items():
        cost = None if device is None else estimate_cost(data_view, device)
        view = replace(data_view, cost=cost)
        problems = find_problems(view)
        if html is not None:
            page, title = Path(html), config
            if part:
                page, title = page.with_stem(f"{page.stem}-{part}"), f"{config}, part {part}"
            with output_option(html, "--html"):
                replace_text(page, data_page(view, problems, title=title))
        has_problems = has_problems or bool(problems)
        if as_json:
            parts[part] = data_json(view, problems)
            continue
        text.show_part(part)
        text.show(view)
        text.show_problems(problems, every_record=check)
    if as_json:
        print_line(json.dumps(parts.get("", {"parts": parts}), indent=2))
    if check and has_problems:
        raise typer.Exit(2)


def print_dry_run(config: str, overrides: list[str], *, processes: int) -> None:
    """Print what `whet train` would do; exit with code 2 if it would raise an error."""
    from whet.cli.console import set_up_logging, stdout_console
    from whet.config.checks.unread_keys import unused_key_messages
    from whet.config.load_config import load_config
    from whet.data.inspect.problems import Problem, find_problems
    from whet.reporting.data.data_text import DataText
    from whet.runs.inspect_data import find_run_errors, view_data_by_part

    set_up_logging()
    settings = load_config(config, overrides)
    text = DataText(stdout_console())
    problems: list[Problem] = []
    directory = settings.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        message = f"{directory} already exists, and existing runs are never overwritten"
        problems.append(Problem(message, "choose another name (run.name=...)", is_fatal=True))
    for part, view in view_data_by_part(settings, samples=0).items():
        text.show_part(part)
        text.show_plan(view)
        problems += find_problems(view)
        problems += (Problem(error.message, error.hint, is_fatal=True) for error in view.missing_inputs)
        steps = settings.run.steps or (view.steps.steps if view.steps is not None else None)
        tokens = view.tokenizer.size if view.tokenizer is not None else None
    refusals = find_run_errors(settings, steps=steps, tokens=tokens, processes=processes)
    known = {problem.message for problem in problems}
    problems += map(Problem, unused_key_messages(settings))
    problems = [*(problem for problem in refusals if problem.message not in known), *problems]
    text.show_problems(problems, every_record=False)
    if any(problem.is_fatal for problem in problems):
        raise typer.Exit(2)
