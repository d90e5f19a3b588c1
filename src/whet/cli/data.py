"""whet data: what the model will see."""

import typer


def command(
    config: str = typer.Argument(help="A YAML file, as for whet train."),
    overrides: list[str] = typer.Argument(None, help="section.key=value, e.g. data.max_length=512"),  # noqa: B008
    html: str | None = typer.Option(
        None, "--html", help="Also write it as a page, into this file; of a mix, one page a part."
    ),
    check: bool = typer.Option(False, "--check", help="List every problem; exit 2 if there is one."),
    samples: int = typer.Option(2, min=0, help="Show this many examples of each split."),
) -> None:
    """Show what the model sees of the data in CONFIG: tokens, masks, lengths, packing. No model is built."""
    from pathlib import Path

    from whet.cli.console import results, set_up_logging, writing_to
    from whet.config.load_config import load_config
    from whet.data.inspect.problems import find_problems
    from whet.reporting.data.data_page import data_page
    from whet.reporting.data.data_text import DataText
    from whet.runs.inspect_data import view_parts
    from whet.storage import replace_text

    set_up_logging()
    text = DataText(results())
    wrong = False
    for part, view in view_parts(load_config(config, overrides or ()), samples=samples).items():
        problems = find_problems(view)
        if html is not None:
            page, title = Path(html), config
            if part:
                page, title = page.with_stem(f"{page.stem}-{part}"), f"{config}, part {part}"
            with writing_to(html, "--html"):
                replace_text(page, data_page(view, problems, title=title))
        text.show_part(part)
        text.show(view)
        text.show_problems(problems, every_record=check)
        wrong = wrong or bool(problems)
    if check and wrong:
        raise typer.Exit(2)


def plan(config: str, overrides: list[str], *, processes: int) -> None:
    """What `whet train` would do, from all of its files; exit 2 when it would refuse."""
    from whet.cli.console import results, set_up_logging
    from whet.config.checks.unread_keys import unread_lines
    from whet.config.load_config import load_config
    from whet.data.inspect.problems import Problem, find_problems
    from whet.reporting.data.data_text import DataText
    from whet.runs.inspect_data import find_refusals, view_parts

    set_up_logging()
    settings = load_config(config, overrides)
    text = DataText(results())
    problems: list[Problem] = []
    directory = settings.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        taken = f"{directory} exists already, and whet overwrites no run"
        problems.append(Problem(taken, "choose another name (run.name=...)", stops=True))
    for part, view in view_parts(settings, samples=0).items():
        text.show_part(part)
        text.show_plan(view)
        problems += find_problems(view)
        problems += (Problem(error.message, error.hint, stops=True) for error in view.missing)
        steps = settings.run.steps or (view.steps.steps if view.steps is not None else None)
        tokens = view.tokenizer.size if view.tokenizer is not None else None
    refusals = find_refusals(settings, steps=steps, tokens=tokens, processes=processes)
    known = {problem.message for problem in problems}
    problems += map(Problem, unread_lines(settings))
    problems = [*(problem for problem in refusals if problem.message not in known), *problems]
    text.show_problems(problems, every_record=False)
    if any(problem.stops for problem in problems):
        raise typer.Exit(2)
