"""Probes, samples and sinks of a distributed run: one process writes, and training does not change."""

import json
from pathlib import Path

import tiny
from distributed.harness import run_world

PROBES = dict.fromkeys(("gradients", "weights", "activations", "attention", "noise", "rank"), 2)
SAMPLES = {"prompts": ["Hello"], "every": 2, "max_tokens": 3}


def test_main_rank_writes_and_training_is_unchanged(tiny_directory, tmp_path):
    configs = {}
    for kind in ("ddp", "fsdp"):
        probes = {"probes": PROBES} if kind == "ddp" else {}  # they are rejected with fsdp
        for name, log in (("plain", {}), ("watched", {**probes, "samples": SAMPLES})):
            run = {"steps": 4, "batch_size": 4, "name": f"{kind}-{name}"}
            method = {"kind": "lora", "rank": 4, "dropout": 0.2}
            config = tiny.run_config(tiny_directory, tmp_path, method=method, run=run, log=log)
            configs[f"{kind}-{name}"] = {**config, "parallel": {"kind": kind}}
    ranks = run_world(2, "train_logged", out=tmp_path / "out", timeout=120, configs=configs)
    for kind in ("ddp", "fsdp"):
        for rank in ranks:
            assert rank[f"{kind}-watched"]["hash"] == rank[f"{kind}-plain"]["hash"]
        directory = Path(ranks[0][f"{kind}-watched"]["directory"])
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert ["exp_grad_norm_mean" in row for row in rows] == [False, kind == "ddp"] * 2
        samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
        assert [row["step"] for row in samples] == [0, 2, 4]
