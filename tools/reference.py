"""Generated reference pages: every command with its options, and every public Python name.

    python -m tools.reference            write docs/cli.md and docs/api.md
    python -m tools.reference --check    fail if they are out of date

The API page holds mkdocstrings directives: the site fills in signatures and docstrings when it is built.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# the public names of `import whet`, by topic
TOPICS = {
    "Train": ("train", "resume", "plan", "RunConfig", "RunResult", "Trainer"),
    "Clean data": ("clean_data", "CleanReport"),
    "Evaluate and export": (*("evaluate", "evaluate_code", "benchmark", "compare_models", "export", "push"),),
    "Models and adapters": (
        *("load", "save", "attach_lora", "load_adapter", "save_adapter", "adapters_off", "merge"),
        *("AdapterSet", "merge_models", "load_checkpoint", "save_checkpoint", "reference"),
    ),
    "Generate": (
        "generate",
        "complete",
        "Completion",
        "Sampling",
        "beam_search",
        "best_of_n",
        "majority_vote",
    ),
    "Classify": ("Classifier",),
    "Objectives": ("Objective", "Loss"),
    "Callbacks": (
        *("Callback", "ModelCallback", "Injector", "StopRun", "EarlyStopping", "Budget", "MetricsLogger"),
        *("SampleGenerations", "ThroughputMonitor", "GradientStats", "WeightStats", "ActivationStats"),
        *("AttentionEntropy", "GradientNoise", "EffectiveRank", "LossCurvature"),
    ),
    "Optimizers and hardware": ("create_optimizer", "create_schedule", "detect_peak_tflops"),
    "Errors": ("WhetError",),
}
SUBMODULES = {
    "whet.callbacks": "every callback, also the limits on time and memory",
    "whet.optim": "optimizers, and the config section that creates them",
    "whet.data": "sources, records, examples, batches and curricula",
    "whet.objectives": "the objectives that whet trains",
    "whet.rl": "rewards and rollouts",
    "whet.ops": "attention, cross-entropy, log-probabilities, divergences",
    "whet.merging": "methods that merge models",
    "whet.analysis": "activations, attention maps, linear probes",
    "whet.parallel": "process groups",
    "whet.errors": "every error that whet raises",
}


def api_page() -> str:
    """Return the API page: one mkdocstrings directive per public name."""
    import whet

    listed = [name for names in TOPICS.values() for name in names]
    if set(listed) != set(whet.__all__) or len(listed) != len(set(listed)):
        raise SystemExit(f"TOPICS and whet.__all__ differ: {sorted(set(listed) ^ set(whet.__all__))}")
    lines = [
        "# Python API",
        "",
        "Everything below is imported as `whet.NAME`. [Use whet from Python](python.md) has examples.",
        "",
        "| submodule | what it offers |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in SUBMODULES.items()),
    ]
    for topic, names in TOPICS.items():
        lines += ["", f"## {topic}"]
        for name in names:
            lines += ["", f"::: whet.{whet._MODULE_OF[name]}.{name}"]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Return the page of all commands, with their arguments and options."""
    from typer.main import get_command

    from whet.cli.app import app

    root: Any = get_command(app)  # Any: click's types, which typer may vendor
    lines = [
        "# Command line",
        "",
        "`whet COMMAND --help` shows the same text. `--debug` adds the traceback to an error.",
    ]
    panels: dict[str, list[str]] = {}
    for path, command in _commands(root, ()):
        panel = getattr(root.commands[path[0]], "rich_help_panel", None) or "Commands"
        panels.setdefault(panel, []).extend(_section(f"whet {' '.join(path)}", command))
    for panel, sections in panels.items():
        lines += ["", f"## {panel}", *sections]
    return "\n".join(lines) + "\n"


def _commands(
    group: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:  # Any: click's types
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        elif not command.hidden:
            yield (*path, name), command


def _section(name: str, command: Any) -> list[str]:  # Any: click's types
    usage = " ".join([name, "[OPTIONS]", *(_metavar(p) for p in command.params if _is_argument(p))])
    lines = ["", f"### {name}", "", _plain(command.help or ""), "", "```text", usage, "```"]
    if rows := list(_parameters(command)):
        lines += ["", "| argument or option | default | meaning |", "|---|---|---|", *rows]
    return lines


def _is_argument(parameter: Any) -> bool:  # Any: click's types
    return not any(name.startswith("-") for name in parameter.opts)


def _metavar(parameter: Any) -> str:  # Any: click's types
    name = str(parameter.metavar or parameter.name).upper().strip("[]").removesuffix("...")
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _parameters(command: Any) -> Iterator[str]:  # Any: click's types
    for parameter in command.params:
        text = _plain(getattr(parameter, "help", None) or "").replace("|", "\\|")
        if "help" in (parameter.name or ""):
            continue
        names = [f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]
        if _is_argument(parameter):
            names = [f"`{_metavar(parameter)}`"]
        default = parameter.default
        shown = (
            ""
            if default in (None, (), False) or callable(default)
            else f"`{getattr(default, 'value', default)}`"
        )
        yield f"| {', '.join(names)} | {'required' if parameter.required else shown} | {text} |"


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


PAGES = {"cli.md": cli_page, "api.md": api_page}


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    check = parser.parse_args().check
    outdated = []
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / name, make()
        if check and (not path.exists() or path.read_text() != text):
            outdated.append(name)
        elif not check:
            path.write_text(text)
    if outdated:
        sys.exit(f"out of date: {', '.join(outdated)}; run python -m tools.reference")


if __name__ == "__main__":
    main()
