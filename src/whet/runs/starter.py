"""Starter projects for `whet init`: a commented config per task, and sample records that it trains on."""

import json
from dataclasses import dataclass
from pathlib import Path

from whet.data.sources.source import open_source
from whet.errors import ConfigError
from whet.storage import create_file_atomically, write_text


@dataclass(frozen=True)
class Starter:
    """A config, and the generators of the sample records beside it."""

    summary: str
    config: str  # YAML with comments; TRAIN and VALID are the file names of the records
    train: str
    valid: str
    suffix: str = ".jsonl"
    prompts_only: bool = False  # leave out the last message of each conversation


_COMMON = """\
eval:
  every: 10                  # evaluate before the first step, every 10 steps, and at the end
run:
  name: {name}                  # results go to runs/{name}
  steps: {steps}                  # or epochs: 3
"""

STARTERS = {
    "sft": Starter(
        "fine-tune a chat model on conversations",
        """\
# Supervised fine-tuning with LoRA. Replace the data with your own: docs/data.md lists the formats.
model: smollm2-135m-instruct   # a name on the Hugging Face hub, a directory, or a GGUF file
method:
  kind: lora                 # lora; qlora (4-bit base, least memory); full (every weight)
  rank: 8
  alpha: 16
data:
  train: TRAIN
  valid: VALID
  max_length: 512            # longer conversations are truncated; see data.too_long
  supervise: assistant       # the loss counts the assistant's turns only
optim:
  lr: 2.0e-3                 # LoRA on a small model; 1e-4 to 2e-4 is usual for 1B and more
  schedule: cosine
  warmup: 5
"""
        + _COMMON.format(name="sft", steps=40)
        + "  batch_size: 8              # examples per optimizer step; memory is set by micro_batch_tokens\n",
        "synth:house:400",
        "synth:house-valid:40",
    ),
    "dpo": Starter(
        "align a model with preferences",
        """\
# Direct preference optimization: each record has a prompt, a chosen and a rejected response.
model: smollm2-135m-instruct   # usually a model that was fine-tuned on similar prompts first
method:
  kind: lora
  rank: 8
  alpha: 16
objective:
  kind: dpo                  # or ipo, orpo, simpo
  beta: 0.1                  # larger values stay closer to the reference model
data:
  train: TRAIN
  valid: VALID
  max_length: 256
optim:
  lr: 3.0e-4
  warmup: 3
"""
        + _COMMON.format(name="dpo", steps=20)
        + "  batch_size: 8              # pairs per optimizer step\n",
        "synth:house-pairs:200",
        "synth:house-pairs-valid:40",
    ),
    "grpo": Starter(
        "train a model with rewards",
        """\
# Group relative policy optimization: the model answers each prompt several times, and rewards score the
# answers.
model: smollm2-135m-instruct
method:
  kind: lora
  rank: 8
  alpha: 16
objective:
  kind: grpo
  rewards:                   # your own functions: docs/grpo.md
    - function: length       # 0 up to 40 characters, falling to -1 at 160: the model learns to be brief
      arguments: {longest: 40, margin: 120}
  group_size: 4              # completions per prompt
  max_new_tokens: 48
  samples_every: 5           # completions with their rewards go to samples.jsonl
data:
  train: TRAIN
  valid: VALID
optim:
  lr: 1.0e-3
  schedule: constant
  warmup: 2
"""
        + _COMMON.format(name="grpo", steps=20)
        + "  batch_size: 4              # prompts per optimizer step\n",
        "synth:house:200",
        "synth:house-valid:20",
        prompts_only=True,
    ),
    "classify": Starter(
        "train a text classifier",
        """\
# A classification head on a language model. Records are {"input": text, "label": class}.
model: smollm2-135m-instruct
method:
  kind: lora
  rank: 16
  alpha: 32
objective:
  kind: classify
  classes: [safe, needs quoting, non-deterministic, not idempotent, unsafe]
data:
  train: TRAIN
  valid: VALID
  max_length: 128
optim:
  lr: 1.0e-3
  schedule: cosine
  warmup: 5
"""
        + _COMMON.format(name="classify", steps=30)
        + "  batch_size: 16\n",
        "synth:shell-safety:600",
        "synth:shell-safety-valid:100",
    ),
    "pretrain": Starter(
        "train a small language model from scratch",
        """\
# Pretraining from random weights. The tokenizer is trained on the training text.
model:
  preset: nano               # about a million parameters; docs/pretraining.md lists the presets
  tokenizer: "bpe:1024"
method:
  kind: full
data:
  train: TRAIN
  valid: VALID
  max_length: 257
  too_long: split            # cut the text into windows instead of truncating it
optim:
  lr: 3.0e-3
  betas: [0.9, 0.95]
  weight_decay: 0.1
  schedule: cosine
  warmup: 10
"""
        + _COMMON.format(name="pretrain", steps=100)
        .replace("every: 10 ", "every: 50 ")
        .replace("every 10", "every 50")
        + "  batch_tokens: 1024         # tokens per optimizer step\n",
        "synth:python-topics",
        "synth:python-topics-valid",
        ".txt",
    ),
    "distill": Starter(
        "train a small model to imitate a larger one",
        """\
# Knowledge distillation: the student learns the teacher's distribution over the next token.
model:
  preset: nano
  tokenizer: smollm2-135m-instruct   # student and teacher must share their tokenizer
method:
  kind: full
objective:
  kind: distill
  teacher: smollm2-135m-instruct
  temperature: 2.0
  alpha: 0.7                 # weight of the teacher; the rest is the usual cross-entropy
data:
  train: TRAIN
  valid: VALID
  max_length: 129
  too_long: split
optim:
  lr: 3.0e-3
  warmup: 5
"""
        + _COMMON.format(name="distill", steps=20)
        + "  batch_tokens: 1024         # tokens per optimizer step\n",
        "synth:python-topics",
        "synth:python-topics-valid",
        ".txt",
    ),
}


def write_starter(kind: str, directory: Path) -> list[Path]:
    """Write the config and the sample records of a starter project; existing files are never overwritten.

    Returns:
        The files written: KIND.yaml, KIND-train and KIND-valid.
    """
    starter = STARTERS[kind]
    names = {split: f"{kind}-{split}{starter.suffix}" for split in ("train", "valid")}
    config = starter.config.replace("TRAIN", names["train"]).replace("VALID", names["valid"])
    contents = {f"{kind}.yaml": config}
    for split, source in (("train", starter.train), ("valid", starter.valid)):
        contents[names[split]] = _records_text(source, starter)
    if existing := [name for name in contents if (directory / name).exists()]:
        raise ConfigError(
            f"{', '.join(existing)} exist{'s' * (len(existing) == 1)} in {directory}; nothing was written",
            hint="choose another directory with --dir, or remove the files",
        )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        with create_file_atomically(directory / name) as staging:
            write_text(staging, text)
    return [directory / name for name in contents]


def _records_text(source: str, starter: Starter) -> str:
    records = [record.fields for record in open_source(source)]
    if starter.suffix == ".txt":
        return "".join(fields["text"] for fields in records)
    if starter.prompts_only:
        records = [{"prompt": fields["messages"][:-1]} for fields in records]
    return "".join(json.dumps(fields, ensure_ascii=False) + "\n" for fields in records)
