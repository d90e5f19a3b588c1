"""The example notebook: a fine-tune from the data to the export, without outputs.

python -m tools.notebook            write examples/notebook.ipynb
python -m tools.notebook --check    fail if it is out of date
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "examples" / "notebook.ipynb"

# (type, source) of every cell
CELLS = (
    (
        "markdown",
        """\
# Fine-tune a language model with whet

This notebook teaches a small chat model to turn spoken house commands into JSON. It needs whet with the
`report` extra, for matplotlib. No GPU is needed.""",
    ),
    (
        "markdown",
        """\
## Write a config and sample data

`whet init` writes `sft.yaml`, `sft-train.jsonl` and `sft-valid.jsonl`. It never overwrites files.""",
    ),
    (
        "code",
        """\
!whet init sft --dir notebook""",
    ),
    (
        "code",
        """\
import json
from pathlib import Path


def read_records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


train, valid = read_records("notebook/sft-train.jsonl"), read_records("notebook/sft-valid.jsonl")
print(len(train), "conversations to train on,", len(valid), "to evaluate on")
for message in train[0]["messages"]:
    print(f"{message['role']:>9}: {message['content']}")""",
    ),
    (
        "markdown",
        """\
## Look at what the model will see

`whet data` renders conversations with the chat template and shows the tokens whose loss counts.""",
    ),
    (
        "code",
        """\
MODEL = "smollm2-135m-instruct"
!whet data notebook/sft.yaml model={MODEL} --samples 1""",
    ),
    (
        "markdown",
        """\
## Load the model and ask it

Before training, it does not know the format.""",
    ),
    (
        "code",
        """\
import whet

PROMPTS = [record["messages"][:-1] for record in valid[:3]]


def answer_prompts(path):
    model, tokenizer = whet.load(path)
    return [whet.generate(model, tokenizer, prompt, max_tokens=40) for prompt in PROMPTS]


before = answer_prompts(MODEL)""",
    ),
    (
        "markdown",
        """\
## Train

`whet.train` logs its progress below the cell. The run directory, `notebook/runs/sft`, gets metrics,
checkpoints and the adapter. Existing runs are never overwritten: to train again, change `run.name`.""",
    ),
    (
        "code",
        """\
config = {
    "model": MODEL,
    "method": {"kind": "lora", "rank": 8, "alpha": 16},
    "data": {
        "train": "notebook/sft-train.jsonl",
        "valid": "notebook/sft-valid.jsonl",
        "max_length": 512,
    },
    "optim": {"lr": 2e-3, "schedule": "cosine", "warmup": 5},
    "eval": {"every": 10},
    "log": {"every": 1},
    "run": {"name": "sft", "dir": "notebook/runs", "steps": 40, "batch_size": 8},
}
result = whet.train(config)
print(result.stopped_because, result.best)""",
    ),
    (
        "markdown",
        """\
## Plot the loss""",
    ),
    (
        "code",
        """\
import matplotlib.pyplot as plt

for key in ("loss", "eval_loss"):
    rows = [row for row in result.history if key in row]
    plt.plot([row["step"] for row in rows], [row[key] for row in rows], label=key)
plt.xlabel("step")
plt.ylabel("cross-entropy per token")
plt.legend()
plt.show()""",
    ),
    (
        "markdown",
        """\
## Compare the answers""",
    ),
    (
        "code",
        """\
after = answer_prompts(result.directory)
for prompt, old, new in zip(PROMPTS, before, after, strict=True):
    print("prompt:", prompt[-1]["content"])
    print("before:", " ".join(old.split()))
    print("after: ", " ".join(new.split()), end="\\n\\n")""",
    ),
    (
        "markdown",
        """\
## Export

`hf` writes a model directory for transformers, with the adapter merged. Other formats are `peft`, `mlx`
and `gguf`.""",
    ),
    (
        "code",
        """\
whet.export(result.directory, to="hf")""",
    ),
)


def notebook() -> dict[str, Any]:  # Any: JSON values
    """Return the notebook in format 4.5, without outputs."""
    return {
        "cells": [_cell(index, kind, source) for index, (kind, source) in enumerate(CELLS)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def notebook_text() -> str:
    """Return the text of the notebook's file."""
    return json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n"


def _cell(index: int, kind: str, source: str) -> dict[str, Any]:  # Any: JSON values
    cell = {
        "cell_type": kind,
        "id": f"cell-{index}",
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


def main() -> None:
    """Write or check the notebook."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if the notebook is out of date")
    if not parser.parse_args().check:
        PATH.write_text(notebook_text(), encoding="utf-8")
    elif not PATH.is_file() or PATH.read_text(encoding="utf-8") != notebook_text():
        sys.exit(f"{PATH.name} is out of date: run python -m tools.notebook")


if __name__ == "__main__":
    main()
