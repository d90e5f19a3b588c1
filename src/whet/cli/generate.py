"""whet generate: generate a completion for one prompt."""

from functools import partial

import typer

MAX_TOKENS = typer.Option(256, min=1, help="Maximum number of generated tokens.")
TEMPERATURE = typer.Option(0.0, min=0.0, help="Sampling temperature; 0 decodes greedily.")
TOP_P = typer.Option(
    1.0, help="Nucleus sampling: sample from the smallest set of tokens with this total probability."
)
TOP_K = typer.Option(0, min=0, help="Sample from the k most likely tokens; 0: from all.")
MIN_P = typer.Option(0.0, help="Drop tokens whose probability is below this share of the most likely one.")
REPETITION_PENALTY = typer.Option(1.0, help="Values above 1 make tokens that already occurred less likely.")
STOP = typer.Option([], help="Stop before this text. Can be repeated.")
SEED = typer.Option(None, help="Random seed for sampling.")


def command(
    model: str = typer.Argument(help="A model's name, a model or adapter directory, a GGUF file, or a run."),
    prompt: str = typer.Argument(
        help="The prompt. It becomes a user message if the model has a chat template."
    ),
    compare: bool = typer.Option(False, "--compare", help="Also show the completion of the base model."),
    max_tokens: int = MAX_TOKENS,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    top_k: int = TOP_K,
    min_p: float = MIN_P,
    repetition_penalty: float = REPETITION_PENALTY,
    stop: list[str] = STOP,
    seed: int | None = SEED,
) -> None:
    """Generate a completion for a prompt."""
    from whet.adapters.adapter import adapters_off, named_adapters
    from whet.errors import ModelError
    from whet.generation.generate import generate
    from whet.model_io.load import load

    fine_tuned, tokenizer = load(model)
    complete = partial(
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
        print(complete(fine_tuned, tokenizer))
        return
    if any(True for _ in named_adapters(fine_tuned)):
        with adapters_off(fine_tuned):
            base_text = complete(fine_tuned, tokenizer)
    elif (name := _base_of_run(model)) is not None:
        base, base_tokenizer = load(name)
        base_text = complete(base, base_tokenizer)
    else:
        hint = "--compare needs an adapter, or a run that fine-tuned an existing model"
        raise ModelError(f"{model} has no base model to compare with", hint=hint)
    print(f"base:       {base_text}")
    print(f"fine-tuned: {complete(fine_tuned, tokenizer)}")


def _base_of_run(path: str) -> str | None:
    """Return the base model of a run, given its directory or one of its checkpoints, or None."""
    from pathlib import Path

    from whet.config.load_config import load_config
    from whet.run_directory import CONFIG_FILE, run_directory_of

    for run in (Path(path), run_directory_of(Path(path))):
        if (run / CONFIG_FILE).is_file():
            base = load_config(run / CONFIG_FILE).model
            return base if isinstance(base, str) else None  # a preset starts from random weights
    return None
