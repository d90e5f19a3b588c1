"""Probes on a CUDA device match those on the CPU, and do not change the run."""

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


def probe_rows(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key.startswith("exp_")} for row in rows if "probe_s" in row]


@pytest.mark.parametrize("compiled", [False, True])
def test_probes_do_not_change_the_run(tiny_directory, tmp_path, compiled):
    keys = {
        "method": {"kind": "lora", "rank": 4, "dropout": 0.2},
        "run": {"device": "cuda", "precision": "bf16", "steps": 6, "compile": compiled},
    }
    log = {"probes": dict.fromkeys(NAMES, 2), "samples": {"prompts": ["Hello"], "every": 3, "max_tokens": 4}}
    plain = whet.train(run_config(tiny_directory, tmp_path / "plain", **keys))
    probed = whet.train(run_config(tiny_directory, tmp_path / "watched", **keys, log=log))
    name = "checkpoints/step-000006/weights.safetensors"
    expected, weights = load_file(plain.directory / name), load_file(probed.directory / name)
    assert all(torch.equal(expected[key], weights[key]) for key in expected)
    assert len(probe_rows(probed.directory)) == 3
    assert all(
        "exp_attn_entropy_mean" in row and "exp_grad_noise" in row for row in probe_rows(probed.directory)
    )


def test_probe_metrics_match_the_cpu(tiny_directory, tmp_path):
    log = {"probes": dict.fromkeys(NAMES, 1)}
    metrics = []
    for device in ("cpu", "cuda"):
        run = {"device": device, "precision": "fp32", "steps": 1}
        config = run_config(tiny_directory, tmp_path / device, method={"kind": "full"}, run=run, log=log)
        metrics.append(probe_rows(whet.train(config).directory)[0])
    assert metrics[0].keys() == metrics[1].keys()
    for key, value in metrics[0].items():
        assert metrics[1][key] == pytest.approx(value, rel=2e-2, abs=1e-3), key


def test_attention_maps_and_effective_rank_match_the_cpu(tiny_directory):
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    maps = []
    for device in ("cpu", "cuda"):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device=device)
        maps.append(attention_maps(model, tokens.to(device)))
    for layer, weights in maps[0].items():
        torch.testing.assert_close(maps[1][layer].cpu(), weights, rtol=1e-3, atol=1e-4)
    matrix = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(effective_rank(matrix.cuda()).cpu(), effective_rank(matrix))
