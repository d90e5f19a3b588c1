"""whet tokenizer: train a tokenizer on a corpus."""

from enum import Enum

import typer

app = typer.Typer(help="Train a tokenizer.", no_args_is_help=True, rich_markup_mode=None)


class Kind(Enum):
    """The values of --kind. A byte tokenizer needs no training."""

    bpe = "bpe"
    chars = "chars"


@app.callback()
def _group() -> None:
    """Train a tokenizer."""


@app.command("train")
def train(
    data: str = typer.Argument(help="Training records: a file of text or records, or synth:NAME:N."),
    out: str = typer.Option(..., "--out", help="Output directory."),
    vocab_size: int = typer.Option(
        8192, help="Vocabulary size of a BPE tokenizer, including special tokens."
    ),
    kind: Kind = typer.Option(Kind.bpe, help="Byte-level BPE, or one token per character."),  # noqa: B008
) -> None:
    """Train a tokenizer on DATA.

    Use it with `model: {preset: ..., tokenizer: OUT}`, or load it with transformers.
    """
    from itertools import islice
    from pathlib import Path

    from whet.data.sources.source import open_source
    from whet.data.tokens.chat_template import record_text
    from whet.model_io.tokenizer_files import save_tokenizer
    from whet.models.from_scratch.train_tokenizer import make_tokenizer
    from whet.storage import create_directory_atomically

    source = open_source(data)
    spec = f"bpe:{vocab_size}" if kind is Kind.bpe else "chars"
    tokenizer = make_tokenizer(spec, map(record_text, source))
    with create_directory_atomically(Path(out)) as staging:
        save_tokenizer(tokenizer, staging)
    texts = [record_text(record)[:100_000] for record in islice(source, 100)]
    count = sum(len(tokens) for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"])
    size = sum(len(text.encode()) for text in texts)
    print(
        f"{len(tokenizer):,} tokens in {out}; {size / max(count, 1):.2f} bytes per token on the first records"
    )
