"""whet chat: talk to a model."""

import shlex

import typer

from whet.cli.generate import MAX_TOKENS, MIN_P, REPETITION_PENALTY, SEED, STOP, TEMPERATURE, TOP_K, TOP_P

HELP = "q ends, r starts over, h shows this line"


def command(
    model: str = typer.Argument(help="A model's name, a model or adapter directory, a GGUF file, or a run."),
    system: str | None = typer.Option(None, help="A system message."),
    max_tokens: int = MAX_TOKENS,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    top_k: int = TOP_K,
    min_p: float = MIN_P,
    repetition_penalty: float = REPETITION_PENALTY,
    stop: list[str] = STOP,
    seed: int | None = SEED,
) -> None:
    """Chat with a model; answers appear as they are made."""
    from whet.errors import DataError
    from whet.generation.generate import generate
    from whet.model_io.load import load
    from whet.reporting.console import notes

    talker, tokenizer = load(model)
    if tokenizer is None:
        raise DataError(f"{model} cannot chat: it has no tokenizer")
    if not tokenizer.chat_template:
        raise DataError(
            f"{model} cannot chat: its tokenizer has no chat template",
            hint=f'whet generate {shlex.quote(model)} "some text" goes on with a text',
        )
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    notes().print(f"{model}: {HELP}", highlight=False)
    while (said := _ask()) is not None:
        if said in ("", "h"):
            notes().print(HELP, highlight=False)
        elif said == "q":
            return
        elif said == "r":
            messages = list(start)
        else:
            messages.append({"role": "user", "content": said})
            try:
                answer = generate(
                    talker,
                    tokenizer,
                    messages,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    min_p=min_p,
                    repetition_penalty=repetition_penalty,
                    stop=stop,
                    seed=seed,
                    on_text=lambda piece: print(piece, end="", flush=True),
                )
            except DataError as error:  # too long, say: the conversation goes on without it
                notes().print(f"error: {error}", highlight=False)
                messages.pop()
                continue
            print()
            messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    """The next line of the person at the keyboard (or of a pipe), None at its end."""
    import sys

    if sys.stdin is None:  # closed
        return None
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
