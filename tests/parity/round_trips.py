"""Print the table of docs/adapters.md: each variant through each layout and library, on a tiny llama and Granite.

WHET_MLX_PYTHON names a Python that has mlx_lm.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_adapter_variants import VARIANTS as PEFT_VARIANTS
from test_mlx_layout import GIVEN, MLX_SETTINGS, mlx_side

import whet
from tiny import write_tokenizer
from tiny_adapters import load, load_theirs, shake, write_base

ROWS = {
    "lora": {},
    "rslora": {"variant": "rslora"},
    "dora": {"variant": "dora"},
    "pissa": {"variant": "pissa"},
    "patterns": PEFT_VARIANTS["patterns"][0],
    "embedding": PEFT_VARIANTS["embedding"][0],
    "saved": PEFT_VARIANTS["saved"][0],
}


def difference(a, b):
    return f"{(a - b).abs().max().item():.0e}"


@torch.no_grad()
def to_peft(base, model, directory):
    whet.save_adapter(model, directory)
    theirs = PeftModel.from_pretrained(load_theirs(base), directory)
    return difference(theirs(input_ids=torch.tensor([GIVEN])).logits, model(torch.tensor([GIVEN])))


@torch.no_grad()
def from_peft(base, name, directory):
    if name not in PEFT_VARIANTS:
        return "-"
    settings = {"target_modules": "all-linear"} | PEFT_VARIANTS[name][1]
    twin = shake(
        get_peft_model(load_theirs(base), LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, **settings))
    )
    twin.save_pretrained(directory)
    return difference(load(directory)(torch.tensor([GIVEN])), twin(input_ids=torch.tensor([GIVEN])).logits)


@torch.no_grad()
def compare(model, result):
    logits = difference(model(torch.tensor([GIVEN])), torch.tensor(result["logits"]))
    tokens = list(GIVEN)
    for _ in result["tokens"]:
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return f"{logits}, {'same tokens' if tokens[len(GIVEN) :] == result['tokens'] else 'OTHER TOKENS'}"


def to_mlx(base, model, directory):
    try:
        whet.save_adapter(model, directory, layout="mlx")
    except whet.WhetError:
        return "refused"
    return compare(model, mlx_side("use", base, directory, directory.parent))


def from_mlx(base, name, directory):
    if name not in MLX_SETTINGS:
        return "-"
    result = mlx_side("make", base, directory, directory.parent, MLX_SETTINGS[name] | {"model": str(base)})
    return compare(load(directory), result)


def main():
    print(
        "| base | variant | whet to PEFT | PEFT to whet | whet to mlx-lm | mlx-lm to whet |\n|---|---|---|---|---|---|"
    )
    for kind in ("llama", "bridge"):
        for name, settings in ROWS.items():
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                base = write_base(root / "base", kind)
                write_tokenizer(base)
                config = base / "config.json"
                config.write_text(
                    config.read_text().replace('"vocab_size"', '"rope_theta": 10000.0,\n  "vocab_size"')
                )
                model = shake(whet.attach_lora(load(base), rank=4, alpha=6, **settings))
                cells = [
                    to_peft(base, model, root / "a"),
                    from_peft(base, name, root / "b"),
                    to_mlx(base, model, root / "c"),
                    from_mlx(base, name, root / "d"),
                ]
            print(f"| {kind} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
