"""whet chat: an interactive conversation with a model."""

import shlex

import typer

from whet.cli.generate import MAX_TOKENS, MIN_P, REPETITION_PENALTY, SEED, STOP, TEMPERATURE, TOP_K, TOP_P

HELP = "q: quit, r: restart the conversation, h: show this help"


def command(
    model: str = typer.Argument(help="A model's name, a model or adapter directory, a GGUF file, or a run."),
    system: str | None = typer.Option(None, help="System message."),
    max_tokens: int = MAX_TOKENS,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    top_k: int = TOP_K,
    min_p: float = MIN_P,
    repetition_penalty: float = REPETITION_PENALTY,
    stop: list[str] = STOP,
    seed: int | None = SEED,
) -> None:
    """Chat with a model. Responses are streamed."""
    from whet.errors import DataError
    from whet.generation.generate import generate
    from whet.model_io.load import load
    from whet.reporting.console import stderr_console

    chat_model, tokenizer = load(model)
    if tokenizer is None:
        raise DataError(f"{model} cannot chat: it has no tokenizer")
    if not tokenizer.chat_template:
        raise DataError(
            f"{model} cannot chat: its tokenizer has no chat template",
            hint=f'complete a text instead: whet generate {shlex.quote(model)} "some text"',
        )
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    stderr_console().print(f"{model}: {HELP}", highlight=False)
    while (line := _read_line()) is not None:
        if line in ("", "h"):
            stderr_console().print(HELP, highlight=False)
        elif line == "q":
            return
        elif line == "r":
            messages = list(start)
        else:
            messages.append({"role": "user", "content": line})
            try:
                response = generate(
                    chat_model,
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
            except DataError as error:  # e.g. too long: continue without this message
                stderr_console().print(f"error: {error}", highlight=False)
                messages.pop()
                continue
            print()
            messages.append({"role": "assistant", "content": response})


def _read_line() -> str | None:
    """Return the next line from the terminal or a pipe, or None at the end of the input."""
    import sys

    if sys.stdin is None:  # closed
        return None
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
