"""Golden runs: small CPU runs of every recipe kind, recorded so that a refactoring is checked bit for bit.

    python -m tools.golden record DIR [--only NAME ...]    run all cases, write what they computed to DIR
    python -m tools.golden check DIR [--only NAME ...]     run them again and compare
    python -m tools.golden check DIR --tolerance 1e-3      compare numbers roughly: recorded elsewhere
    python -m tools.golden keep-runs FILE.tar.xz           stop each kind of run half-way and pack them all

Each case is recorded as one JSON file: its metrics as hexadecimal floats (times excluded), its samples, the
hashes of `final/` and of the checkpoints' tensors, and its plan for an H200. `cli.json` has the help of every
command. Only public entry points are used (`import whet`, the command line), so that code may move freely.
"""

import argparse
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# what depends on the machine's speed or memory, not on what was computed
TIMED = re.compile(r"(^|_)(s|ms|sec|seconds|minutes|peak_gib|mfu)$|_per_s(ec)?$")
# what follows from sampled or greedy text, or from a threshold: one bit may change it as a whole
DISCRETE = re.compile(
    r"exact_match|reward|accuracy|f1|precision|recall|margin_rate|share|completion|clip|advantage|collapsed"
    r"|threshold|calibration|ece|temperature|mcc|kappa|auc|brier|top|best|fingerprint|baseline|bit_equal"
)
PAIRS = {"train": "synth:house-pairs:12", "valid": "synth:house-pairs-valid:5", "max_length": 256}
MOE = {"preset": "nano-moe", "tokenizer": "base", "d_model": 16, "heads": 2, "width": 16, "layers": 2}
MOE |= {"experts": 4, "balance_bias": True, "vocab_size": 260}
NANO = {"preset": "nano", "tokenizer": "base", "vocab_size": 260, "layers": 2, "d_model": 32, "width": 32}
FULL, LORA = {"kind": "full"}, {"kind": "lora", "rank": 4}
SHORT = {"function": "length", "arguments": {"longest": 2, "margin": 20}}
LABELLED = {"train": "labelled.jsonl", "valid": "labelled-valid.jsonl", "max_length": 64}
FAULTY = {"train": "faults.jsonl", "valid": "faults-valid.jsonl", "max_length": 64}
QUALITY = {"train": "synth:quality:64", "valid": "synth:quality-valid:16"}
BALANCED = {"load_balancing": 0.01, "z_loss": 0.001, "bias_rate": 0.01}

# kinds of which an interrupted run is kept, to be resumed by later versions
KEPT = (
    *("sft-lora", "sft-full", "qlora", "dpo", "distill", "mtp-moe", "distrust", "grpo", "classify"),
    *("classify-multi", "mix", "moe", "bridge", "resume", "quality-sgd"),
)

Case = dict[str, Any]  # Any: a config's sections, and `act`: how the case is run

CASES: dict[str, Case] = {
    "sft-lora": {
        "eval": {"every": 2, "generate": True, "max_new_tokens": 4},
        "log": {"samples": {"prompts": ["Who?"], "every": 2, "max_tokens": 4}},
    },
    "sft-full": {"method": FULL},
    "sft-packed": {"method": FULL, "data": {"pack": True}, "run": {"batch_size": None, "batch_tokens": 512}},
    "sft-unpacked-recomputed": {"method": FULL, "data": {"pack": False}, "run": {"grad_checkpoint": True}},
    "sft-epochs": {"run": {"steps": None, "epochs": 1}, "data": {"test": "synth:house-test:4"}},
    "sft-bf16": {"method": FULL, "run": {"precision": "bf16"}},
    "sft-probes": {
        "method": FULL,
        "log": {
            "every": 2,
            "probes": {
                "gradients": 2,
                "weights": 2,
                "activations": 2,
                "attention": 2,
                "noise": 4,
                "rank": 4,
            },
        },
    },
    "sft-mixed-sources": {
        "data": {
            "train": [
                {"source": "synth:house:12", "weight": 1},
                {"source": "synth:house-styles:12", "weight": 2},
            ]
        }
    },
    "curriculum": {"data": {"curriculum": {"kind": "length", "stages": 2}}},
    "dora": {"method": {**LORA, "variant": "dora"}},
    "pissa": {"method": {**LORA, "variant": "pissa"}},
    "rslora-embedding": {"method": {**LORA, "variant": "rslora", "modules_to_save": ["embed_tokens"]}},
    "lora-plus": {"method": {**LORA, "lr_ratio": 4}},
    "qlora": {"method": {"kind": "qlora", "rank": 4}},
    "dpo": {"objective": {"kind": "dpo"}, "data": PAIRS},
    "dpo-online": {"method": FULL, "objective": {"kind": "dpo", "reference": "online"}, "data": PAIRS},
    "dpo-named": {"objective": {"kind": "dpo", "reference_model": "teacher"}, "data": PAIRS},
    "ipo": {"objective": {"kind": "ipo"}, "data": PAIRS},
    "orpo": {"objective": {"kind": "orpo"}, "data": PAIRS},
    "simpo": {"objective": {"kind": "simpo"}, "data": PAIRS},
    "distill": {
        "method": FULL,
        "objective": {"kind": "distill", "teacher": "teacher", "hidden": {"layers": {1: 1, 2: 2}}},
    },
    "distill-offline": {
        "objective": {"kind": "distill", "teacher": "teacher", "offline": {"top_k": 4}},
        "act": "teach",
    },
    "mtp": {"method": FULL, "objective": {"kind": "mtp", "n_predict": 2}},
    "mtp-moe": {
        "model": MOE,
        "method": FULL,
        "objective": {"kind": "mtp", "n_predict": 2},
        "experts": BALANCED,
    },
    "distrust": {
        "method": FULL,
        "objective": {"kind": "distrust"},
        "data": {"train": "synth:disputes:16", "valid": None, "max_length": 128},
    },
    "grpo": {
        "objective": {
            "kind": "grpo",
            "group_size": 3,
            "max_new_tokens": 6,
            "reward_workers": 1,
            "beta": 0.1,
            "rewards": [SHORT],
        },
        "data": {"train": "synth:sums:10", "valid": "synth:sums-valid:5", "test": "synth:sums-valid:3"},
        "run": {"batch_size": 2},
    },
    "grpo-moe": {
        "model": MOE,
        "method": FULL,
        "experts": BALANCED,
        "objective": {
            "kind": "grpo",
            "group_size": 2,
            "max_new_tokens": 4,
            "reward_workers": 1,
            "rewards": [SHORT],
        },
        "data": {"train": "synth:sums:10", "valid": "synth:sums-valid:5"},
        "run": {"batch_size": 2},
    },
    "classify": {
        "objective": {"kind": "classify", "classes": ["a", "b"], "calibrate": True},
        "data": LABELLED,
        "optim": {"lr": 1e-2},
    },
    "classify-full": {
        "method": FULL,
        "objective": {"kind": "classify", "classes": ["a", "b"], "probe": False},
        "data": {**LABELLED, "valid": None},
    },
    "classify-multi": {
        "objective": {"kind": "classify", "classes": ["x", "y", "z"], "multi_label": True, "calibrate": True},
        "data": FAULTY,
    },
    "classify-moe": {
        "model": MOE,
        "method": FULL,
        "objective": {"kind": "classify", "classes": ["a", "b"], "probe": False},
        "data": LABELLED,
        "experts": BALANCED,
    },
    "mix": {
        "objective": {
            "kind": "mix",
            "parts": [
                {
                    "objective": {"kind": "sft"},
                    "data": {"train": "synth:house:12", "valid": "synth:house-valid:4"},
                },
                {"objective": {"kind": "dpo", "reference": "online"}, "data": PAIRS, "batch_size": 3},
            ],
        },
        "data": None,
    },
    "moe": {"model": MOE, "method": FULL, "experts": BALANCED, "eval": {"every": 2}},
    "moe-lora": {"model": "moe", "method": {**LORA, "targets": "all-linear"}},
    "mup": {
        "model": NANO,
        "method": FULL,
        "optim": {"mup": {"base_width": 16}},
    },
    "bridge": {"model": "falcon", "method": {**LORA, "targets": ["query_key_value"]}},
    "bridge-full": {"model": "falcon", "method": FULL},
    "early-stop": {
        "eval": {"every": 1, "early_stop": {"patience": 1, "min_delta": 10.0}},
        "run": {"steps": 6},
    },
    "resume": {
        "method": FULL,
        "eval": {"every": 1, "early_stop": {"patience": 4}},
        "log": {"every": 3, "probes": {"weights": 2}},
        "checkpoint": {"every": 1, "keep": 2},
        "act": "resume",
    },
    "resume-moe": {
        "model": MOE,
        "method": FULL,
        "experts": BALANCED,
        "checkpoint": {"every": 1},
        "act": "resume",
    },
    "two-processes": {"method": FULL, "parallel": {"kind": "ddp"}, "act": "two processes"},
    "two-processes-fsdp": {
        "model": MOE,
        "method": FULL,
        "experts": BALANCED,
        "parallel": {"kind": "fsdp"},
        "act": "two processes",
    },
    **{
        f"optim-{name}": {"method": FULL, "optim": {"name": name, "lr": lr}, "data": {"valid": None}}
        for name, lr in {
            "adam": 1e-3,
            "sgd": 1e-2,
            "lion": 1e-4,
            "adafactor": 1e-2,
            "muon": 1e-2,
            "adamw8bit": 1e-3,
        }.items()
    },
    "quality-sgd": {
        "model": {"quality": "nano", "arm": "sheaf-padic"},
        "data": QUALITY,
        "optim": {"name": "sgd", "momentum": 0.0, "lr": 1e-2},
        "act": "quality",
    },
    **{
        f"quality-{arm}": {"model": {"quality": "nano", "arm": arm}, "data": QUALITY, "act": "quality"}
        for arm in ("softmax", "sheaf-padic", "dense")
    },
}


def config_of(name: str) -> dict[str, Any]:  # Any: the values of a config
    """Return the complete config of a case; its paths are relative to the directory of write_inputs."""
    case = copy.deepcopy(CASES[name])
    act = case.pop("act", None)
    run = {"name": name, "dir": "runs", "steps": 4, "device": "cpu", "precision": "fp32"}
    if act == "quality":
        return {**case, "run": run}
    config: dict[str, Any] = {  # Any: as above
        "model": "base",
        "method": LORA,
        "data": {"train": "synth:house:24", "valid": "synth:house-valid:6", "max_length": 256},
        "optim": {"lr": 1e-3, "warmup": 1},
        "run": {**run, "batch_size": 4, "micro_batch_tokens": 512},
    }
    for section, keys in case.items():
        merged = section in ("data", "optim", "run") and isinstance(keys, dict)
        config[section] = {**config[section], **keys} if merged else keys
    return config


def write_inputs(directory: Path) -> None:
    """Write the models and records that the cases read: random, from fixed seeds."""
    import torch
    from transformers import FalconConfig, FalconForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import write_tiny_model, write_tokenizer  # type: ignore[import-not-found]

    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_tiny_model(directory / "base", **small)
    write_tiny_model(directory / "teacher", **{**small, "hidden_size": 24})
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "num_hidden_layers": 2, "eos_token_id": 256}
    falcon = FalconConfig(hidden_size=16, num_attention_heads=2, **sizes)
    FalconForCausalLM(falcon).save_pretrained(directory / "falcon")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, **sizes, **experts)).save_pretrained(directory / "moe")
    for name in ("falcon", "moe"):
        write_tokenizer(directory / name)
    for name, count in (("labelled", 24), ("labelled-valid", 12)):
        texts = [{"text": f"{'yes ' * (n * 7 % 5)}{n}", "label": "ab"[n % 2]} for n in range(count)]
        _write_rows(directory / f"{name}.jsonl", texts)
    for name, count in (("faults", 24), ("faults-valid", 12)):
        chosen = [[c for i, c in enumerate("xyz") if n * 5 % (i + 2) == 0] for n in range(count)]
        rows = [{"input": f"{'no ' * (n % 4)}{n}", "labels": labels} for n, labels in enumerate(chosen)]
        _write_rows(directory / f"{name}.jsonl", rows)


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_case(name: str) -> None:
    """Run one case into runs/NAME below the current directory."""
    import whet

    config, act = config_of(name), CASES[name].get("act")
    if act == "teach":
        _command("teach", _config_file(name, config))
        whet.train(config, verbose=0)
    elif act == "resume":
        stop_half_way(config)
        whet.resume(Path("runs") / name, verbose=0)
    elif act == "two processes":
        command = [sys.executable, "-m", "whet", "train", _config_file(name, config), "--nproc", "2"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    else:
        whet.train(config, verbose=0)


def stop_half_way(config: Mapping[str, Any]) -> None:  # Any: the values of a config
    """Train for two steps, then stop with a checkpoint."""
    import whet

    class Stop(whet.Callback):
        def on_step_end(self, step: int, metrics: dict[str, Any]) -> whet.StopRun | None:  # Any: metrics
            return whet.StopRun("enough", unfinished=True) if step == 2 else None

    whet.train(config, [Stop()], verbose=0)


def keep_runs(path: Path) -> None:
    """Pack an interrupted run of each kind in KEPT, and the models and records they need, into an archive."""
    for name in KEPT:
        stop_half_way(config_of(name))
        (Path("runs") / name / ".lock").unlink(missing_ok=True)
    with tarfile.open(path, "w:xz") as archive:
        for item in sorted(Path().iterdir()):
            if item.name != "tokens":  # token stores are caches: made again where they are missing
                archive.add(item)


def _config_file(name: str, config: Mapping[str, Any]) -> str:  # Any: the values of a config
    path = Path(f"{name}.yaml")
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


def _command(*arguments: str) -> str:
    """Return what a command of whet prints, run in this process."""
    from whet.cli.app import main

    printed, before = io.StringIO(), sys.argv
    sys.argv = ["whet", *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"whet {' '.join(arguments)} ended with {end.code}") from end
    finally:
        sys.argv = before
    return printed.getvalue()


def record_case(name: str) -> dict[str, Any]:  # Any: JSON values
    """Run a case in the current directory and return everything it computed."""
    run_case(name)
    directory = Path("runs") / name
    return {
        "metrics": _rows(directory / "metrics.jsonl"),
        "samples": _rows(directory / "samples.jsonl"),
        "files": sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()),
        "described": {name: _hash(directory / name) for name in ("config.yaml", "arch.json")},
        "final": _hashes(directory / "final"),
        "checkpoints": {
            path: digest
            for path, digest in _hashes(directory / "checkpoints").items()
            if path.endswith(".safetensors")
        },
        "plan": _plan(name),
    }


def _rows(path: Path) -> list[Any]:  # Any: JSON values
    if not path.exists():
        return []
    return [_comparable(json.loads(line)) for line in path.read_text().splitlines()]


def _comparable(value: Any) -> Any:  # Any: JSON values
    """Return a value without times, its floats in hexadecimal."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items() if not TIMED.search(key)}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def _hash(path: Path) -> str | None:
    """Return the hash of a file, in which the path of the current directory does not count."""
    if not path.exists():
        return None
    content = path.read_bytes()
    if path.suffix == ".json":
        content = content.replace(str(Path.cwd()).encode(), b".")
    return hashlib.sha256(content).hexdigest()


def _hashes(directory: Path) -> dict[str, str | None]:
    return {
        str(path.relative_to(directory)): _hash(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _plan(name: str) -> Any:  # Any: JSON values
    text = _command("plan", _config_file(name, config_of(name)), "--device", "h200", "--json")
    return _comparable(json.loads(text))


def record_cli() -> dict[str, str]:
    """Return the help of whet and of each of its commands and sub-commands."""
    from typer.main import get_command

    from whet.cli.app import app

    texts: dict[str, str] = {}

    def visit(path: tuple[str, ...], command: Any) -> None:  # Any: click's types, which typer may vendor
        texts[" ".join(("whet", *path))] = _command(*path, "--help")
        for name, sub_command in getattr(command, "commands", {}).items():
            visit((*path, *name.split()), sub_command)

    visit((), get_command(app))
    return texts


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A temporary directory with all inputs, entered, with token stores of its own and one thread."""
    import torch

    os.environ.update(WHET_OFFLINE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", COLUMNS="100")
    os.environ.update(NO_COLOR="1", TERM="dumb", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="whet-golden-") as directory:
        os.environ["WHET_TOKENS"] = str(Path(directory) / "tokens")
        write_inputs(Path(directory))
        os.chdir(directory)
        try:
            yield Path(directory)
        finally:
            os.chdir(before)


def recordings(only: list[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:  # Any: JSON values
    """Yield the name of each recording, and what makes it."""
    for name in CASES:
        if not only or name in only:
            yield name, lambda name=name: record_case(name)  # type: ignore[misc]
    if not only or "cli" in only:
        yield "cli", record_cli


def differences(before: Any, after: Any, where: str = "", *, tolerance: float | None = None) -> Iterator[str]:
    """Yield where two recordings differ; with a tolerance, only in what does not depend on the machine."""
    # Any: JSON values
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if tolerance is not None and (key in ("checkpoints", "described") or DISCRETE.search(key)):
                continue
            if key not in before or key not in after:
                yield f"{where}.{key}: {'new' if key in after else 'gone'}"
            elif tolerance is not None and key in ("final", "samples"):
                if len(before[key]) != len(after[key]):
                    yield f"{where}.{key}: {len(before[key])} became {len(after[key])}"
            else:
                yield from differences(before[key], after[key], f"{where}.{key}", tolerance=tolerance)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{index}]", tolerance=tolerance)
    elif before != after and not _is_near(before, after, tolerance):
        yield f"{where}: {str(before)[:300]!r} became {str(after)[:300]!r}"


def _is_near(before: object, after: object, tolerance: float | None) -> bool:
    if tolerance is None or not isinstance(before, str) or not isinstance(after, str):
        return False
    try:
        return math.isclose(
            float.fromhex(before), float.fromhex(after), rel_tol=tolerance, abs_tol=tolerance / 10
        )
    except ValueError:
        return False


def main() -> int:
    """Record or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.golden")
    parser.add_argument("action", choices=("record", "check", "keep-runs"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these cases")
    parser.add_argument("--tolerance", type=float, help="relative; for a recording of another machine")
    arguments = parser.parse_args()
    directory, wrong, names = arguments.directory.resolve(), 0, []
    with workspace():
        if arguments.action == "keep-runs":
            keep_runs(directory)
            return 0
        directory.mkdir(parents=True, exist_ok=True)
        for name, make in recordings(arguments.only):
            path, now = directory / f"{name}.json", make()
            names.append(name)
            if arguments.action == "record":
                path.write_text(json.dumps(now) + "\n")
                print(f"recorded {name}", flush=True)
                continue
            before = json.loads(path.read_text())
            found = list(differences(before, json.loads(json.dumps(now)), tolerance=arguments.tolerance))
            wrong += bool(found)
            print(f"{'DIFFERS' if found else 'same   '} {name}", *found[:10], sep="\n    ", flush=True)
    print(f"{len(names)} cases, {wrong} differ" if arguments.action == "check" else f"{len(names)} cases")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
