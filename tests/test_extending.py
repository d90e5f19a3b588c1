"""The examples of docs/architecture.md, applied to a copy of the source: each addition works as written."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import SeedOssConfig, SeedOssForCausalLM

from test_docs import ROOT, fences
from tiny import write_tokenizer

PAGE = ROOT / "docs" / "architecture.md"

USE = """
import json, sys
import torch, whet
from transformers import AutoModelForCausalLM
from whet.data.sources.source import open_source, validate_record
from whet.rl.rewards.builtin import BUILTIN

config = {
    "model": "tiny",
    "objective": {"kind": "smoothed", "smoothing": 0.2},
    "data": {"train": "problems.jsonl"},
    "optim": {"name": "signum", "lr": 1e-3},
    "run": {"steps": 2, "batch_size": 2, "device": "cpu", "precision": "fp32"},
}
result = whet.train(config, verbose=0)
model, _ = whet.load("seed", dtype=torch.float32, device="cpu")
theirs = AutoModelForCausalLM.from_pretrained("seed", dtype=torch.float32).eval()
tokens = torch.arange(12).reshape(2, 6)
with torch.no_grad():
    distance = (model.eval()(tokens) - theirs(tokens).logits).abs().max().item()
json.dump(
    {
        "losses": [row["loss"] for row in result.history if "loss" in row],
        "family": model.spec.family,
        "distance": distance,
        "reward": [BUILTIN["contains"]("", text, {}, text="4") for text in ("24", "5")],
        "formats": [validate_record(record).record_format for record in open_source("problems.jsonl")],
    },
    open("results.json", "w"),
)
from whet.cli.app import main
sys.argv = ["whet", "size", "tiny"]
main()
"""


def additions():
    """Yield the path, kind and text of each block, in the order of the page."""
    for fence in fences(PAGE):
        if fence.info[0] in ("python", "diff"):
            kind, path = fence.info
            yield Path(path), kind, fence.text


def apply_diff(source, diff):
    """Return the source with a hunk applied; its context and removed lines must occur exactly once."""
    lines = diff.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    assert source.count(before) == 1, f"the page shows lines that the source does not have once:\n{before}"
    return source.replace(before, after)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A directory with a copy of the source, extended as the page says."""
    directory = tmp_path_factory.mktemp("extended")
    shutil.copytree(
        ROOT / "src", directory / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for path, kind, text in additions():
        target = directory / path
        if kind == "python":
            assert not target.exists()
            target.write_text(text)
        else:
            target.write_text(apply_diff(target.read_text(), text))
    return directory


def test_examples_of_additions_work(extended, tiny_directory):
    shutil.copytree(tiny_directory, extended / "tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 260}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = SeedOssConfig(**sizes, **heads, attention_dropout=0.0, residual_dropout=0.0)
    model = SeedOssForCausalLM(config)
    for parameter in model.parameters():  # biases are 0 at first
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(extended / "seed")
    write_tokenizer(extended / "seed")
    rows = [{"problem": f"{n} + {n} = ?", "solution": str(2 * n)} for n in range(6)]
    (extended / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    used = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=extended,
        env={**os.environ, "PYTHONPATH": str(extended / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert used.returncode == 0, used.stderr[-3000:]
    results = json.loads((extended / "results.json").read_text())
    assert len(results["losses"]) == 2
    assert results["losses"][1] < results["losses"][0]
    assert results["family"] == "seed_oss"
    assert results["distance"] < 1e-4
    assert results["reward"] == [1.0, 0.0]
    assert results["formats"] == ["completion"] * 6
    assert re.search(r"^[\d,]+ parameters$", used.stdout, flags=re.MULTILINE)


def test_an_objective_takes_less_than_60_lines():
    page = PAGE.read_text()
    section = page[page.index("## Add an objective") : page.index("## Add an optimizer")]
    blocks = re.findall(r"```(python|diff)[^\n]*\n(.*?)```", section, flags=re.DOTALL)
    lines = [
        line
        for kind, block in blocks
        for line in block.splitlines()
        if line.strip() and (kind == "python" or line.startswith("+"))
    ]
    assert 30 < len(lines) < 60
