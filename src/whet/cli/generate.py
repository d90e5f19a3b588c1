"""whet generate: one prompt, one answer."""

from functools import partial

import typer

MAX_TOKENS = typer.Option(256, min=1, help="Longest answer, in tokens.")
TEMPERATURE = typer.Option(0.0, min=0.0, help="0 is greedy; higher is more varied.")
TOP_P = typer.Option(1.0, help="Sample from the smallest set with this probability.")
TOP_K = typer.Option(0, min=0, help="Sample from this many likeliest tokens; 0: all.")
MIN_P = typer.Option(0.0, help="Drop tokens below this share of the likeliest one.")
REPETITION_PENALTY = typer.Option(1.0, help="Above 1, tokens that were there already are less likely.")
STOP = typer.Option([], help="End the answer before this text; may be given several times.")
SEED = typer.Option(None, help="Seed of the sampling.")


def command(
    model: str = typer.Argument(help="A model's name, a model or adapter directory, a GGUF file, or a run."),
    prompt: str = typer.Argument(help="The prompt; one user message where the model has a chat template."),
    compare: bool = typer.Option(False, "--compare", help="Show the base model's answer beside."),
    max_tokens: int = MAX_TOKENS,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    top_k: int = TOP_K,
    min_p: float = MIN_P,
    repetition_penalty: float = REPETITION_PENALTY,
    stop: list[str] = STOP,
    seed: int | None = SEED,
) -> None:
    """Generate an answer to PROMPT."""
    from whet.adapters.adapter import adapted, adapters_off
    from whet.errors import ModelError
    from whet.generation.generate import generate
    from whet.model_io.load import load

    fine_tuned, tokenizer = load(model)
    answer = partial(
        generate,
        prompt_or_messages=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
    )
    if not compare:
        print(answer(fine_tuned, tokenizer))
        return
    if any(True for _ in adapted(fine_tuned)):
        with adapters_off(fine_tuned):
            before = answer(fine_tuned, tokenizer)
    elif (name := _base_of_run(model)) is not None:
        base, base_tokenizer = load(name)
        before = answer(base, base_tokenizer)
    else:
        hint = "--compare takes an adapter, or a run that did not start from scratch"
        raise ModelError(f"{model} has no base to compare with", hint=hint)
    print(f"base:       {before}")
    print(f"fine-tuned: {answer(fine_tuned, tokenizer)}")


def _base_of_run(path: str) -> str | None:
    """What a run started from, if the path is a run or one of its checkpoints."""
    from pathlib import Path

    from whet.config.load_config import load_config
    from whet.run_directory import CONFIG_FILE, run_of

    for run in (Path(path), run_of(Path(path))):
        if (run / CONFIG_FILE).is_file():
            base = load_config(run / CONFIG_FILE).model
            return base if isinstance(base, str) else None  # a preset began with nothing to compare with
    return None
