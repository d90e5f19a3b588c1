"""Probes on a CUDA device: the numbers of the CPU, and a run that is the same without them."""

import json

import pytest
import torch
from safetensors.torch import load_file

import whet
from tiny import run_config
from whet.training.observe.attention_maps import attention_maps
from whet.training.observe.layer_stats import effective_rank

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAMES = ("gradients", "weights", "activations", "attention", "noise", "rank")


def probed(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key.startswith("exp_")} for row in rows if "probe_s" in row]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_is_the_same_with_probes_and_without(tiny_directory, tmp_path, compiled):
    keys = {
        "method": {"kind": "lora", "rank": 4, "dropout": 0.2},
        "run": {"device": "cuda", "precision": "bf16", "steps": 6, "compile": compiled},
    }
    log = {"probes": dict.fromkeys(NAMES, 2), "samples": {"prompts": ["Hello"], "every": 3, "max_tokens": 4}}
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", **keys))
    watched = whet.train(run_config(tiny_directory, tmp_path / "watched", **keys, log=log))
    name = "checkpoints/step-000006/weights.safetensors"
    expected, found = load_file(plain.directory / name), load_file(watched.directory / name)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert len(probed(watched.directory)) == 3
    assert all(
        "exp_attn_entropy_mean" in row and "exp_grad_noise" in row for row in probed(watched.directory)
    )


def test_the_numbers_are_those_of_the_cpu(tiny_directory, tmp_path):
    log = {"probes": dict.fromkeys(NAMES, 1)}
    found = []
    for device in ("cpu", "cuda"):
        run = {"device": device, "precision": "fp32", "steps": 1}
        config = run_config(tiny_directory, tmp_path / device, method={"kind": "full"}, run=run, log=log)
        found.append(probed(whet.train(config).directory)[0])
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert found[1][key] == pytest.approx(value, rel=2e-2, abs=1e-3), key


def test_maps_and_ranks_are_those_of_the_cpu(tiny_directory):
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    maps = []
    for device in ("cpu", "cuda"):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device=device)
        maps.append(attention_maps(model, tokens.to(device)))
    for layer, weights in maps[0].items():
        torch.testing.assert_close(maps[1][layer].cpu(), weights, rtol=1e-3, atol=1e-4)
    matrix = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(effective_rank(matrix.cuda()).cpu(), effective_rank(matrix))
