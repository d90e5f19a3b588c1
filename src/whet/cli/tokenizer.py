"""whet tokenizer: train one from a corpus."""

from enum import Enum

import typer

app = typer.Typer(help="Make tokenizers.", no_args_is_help=True, rich_markup_mode=None)


class Kind(Enum):
    """What can be trained; a byte tokenizer needs no training."""

    bpe = "bpe"
    chars = "chars"


@app.callback()
def _group() -> None:
    """Make tokenizers."""


@app.command("train")
def train(
    data: str = typer.Argument(help="Records to learn from: a file of text or records, or synth:NAME:N."),
    out: str = typer.Option(..., "--out", help="The directory to write."),
    vocab_size: int = typer.Option(8192, help="Tokens of a BPE, special ones included."),
    kind: Kind = typer.Option(Kind.bpe, help="Byte-level BPE, or one token a character."),  # noqa: B008
) -> None:
    """Train a tokenizer on DATA; `model: {preset: ..., tokenizer: OUT}` and transformers read it."""
    from itertools import islice
    from pathlib import Path

    from whet.data.sources.source import open_source
    from whet.data.tokens.chat_template import text_of
    from whet.model_io.tokenizer_files import save_tokenizer
    from whet.models.from_scratch.train_tokenizer import make_tokenizer
    from whet.storage import new_directory

    source = open_source(data)
    spec = f"bpe:{vocab_size}" if kind is Kind.bpe else "chars"
    tokenizer = make_tokenizer(spec, map(text_of, source))
    with new_directory(Path(out)) as staging:
        save_tokenizer(tokenizer, staging)
    texts = [text_of(record)[:100_000] for record in islice(source, 100)]
    count = sum(len(tokens) for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"])
    size = sum(len(text.encode()) for text in texts)
    print(
        f"{len(tokenizer):,} tokens in {out}; {size / max(count, 1):.2f} bytes a token on the first records"
    )
