"""make demo: evaluate a real language model on unseen commands before and after forty steps of LoRA."""

import time
from pathlib import Path

from rich.console import Console

import whet
from whet.cli.console import set_up_logging
from whet.config.load_config import load_config
from whet.data.sources.source import open_source
from whet.evaluation.evaluate_model import ModelEvaluation
from whet.hardware import choose_device, peak_gib

CONFIG = Path(__file__).with_name("demo.yaml")
TEST = "synth:house-test:200"


def show_answers(model, tokenizer, console: Console) -> None:
    """Print two sample answers, and the exact match on the test set."""
    evaluation = ModelEvaluation(model, tokenizer, open_source(TEST), max_length=512)
    for question, answer in evaluation.answers(2, max_tokens=40):
        console.print(f"  prompt    {question.text}", markup=False)
        console.print(f"  expected  {question.answer}", markup=False)
        console.print(f"  response  {' '.join(answer.split())}\n", markup=False)
    total = len(evaluation.questions)
    console.print(f"  generating answers to {total} test commands")
    with console.status("") as status:
        matches = evaluation.exact_match(
            max_tokens=40, progress=lambda answered: status.update(f"{answered} of {total} answered")
        )
    metrics = matches.metrics()
    console.print(
        f"  exact match on {total} test commands: {metrics['exact_match']:.1%}"
        f"  (known sentence templates {metrics['exact_match_known']:.1%},"
        f" unseen templates {metrics['exact_match_unseen']:.1%})\n"
    )


def main() -> None:
    set_up_logging()
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    started = time.perf_counter()
    config = load_config(CONFIG)
    name, number = config.run.name, 2
    while (Path(config.run.dir) / config.run.name).exists():  # existing runs are never overwritten
        config = load_config(CONFIG, [f"run.name={name}-{number}"])
        number += 1

    console.rule(f"before: {config.model}, not fine-tuned")
    show_answers(*whet.load(config.model), console)
    console.rule("training")
    result = whet.train(config)
    if result.unfinished:
        console.print(f"stopped; resume with: .venv/bin/whet resume {result.directory}")
        return
    console.rule("after")
    show_answers(*whet.load(result.directory), console)
    seconds, gib = time.perf_counter() - started, peak_gib(choose_device())
    console.print(f"{seconds:.0f} s, peak memory {gib:.1f} GiB. The adapter is in {result.directory}/final.")
    console.print(
        f"Talk to it: .venv/bin/whet chat {result.directory}  (try: dim the kitchen lights in 10 minutes)"
    )


if __name__ == "__main__":
    main()
