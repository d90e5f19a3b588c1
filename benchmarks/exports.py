"""Quantized exports: `python -m benchmarks.exports` writes benchmarks/results/exports.json.

Fine-tunes SmolLM2-135M-Instruct for 40 steps on synth:house (examples/demo.yaml), exports the run with each quantization,
and measures size, KL divergence, perplexity and exact match on synth:house-test against the merged model in float, with
float8 activations for fp8. Each export is opened by transformers, whose logits must be those of whet. "int4-largest" has
scales from the largest magnitude of a group (/ 7.5) instead of those with the least squared error, for comparison.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "exports.json"
KINDS = ("fp8", "fp8-tensor", "int8", "int4", "int4-largest", "nf4")


def train(directory, steps):
    """Return the run directory of a short fine-tune."""
    import whet
    from whet.config.load_config import load_config

    config = load_config(ROOT / "examples" / "demo.yaml").model_dump(exclude_unset=True)
    config["run"] |= {"dir": str(directory), "steps": steps}
    return whet.train(config, verbose=0).directory


def largest_magnitude(groups, *, bits):
    return groups.abs().amax(1) / (2 ** (bits - 1) - 0.5)


def measure(loaded, name, data, directory):
    """Return the measurements of one quantization."""
    from whet.evaluation.quantized_export import measure_export, weight_bytes
    from whet.model_io.export.quantize_model import quantize_model
    from whet.model_io.export.quantized_check import check_quantized
    from whet.model_io.formats import compressed_tensors

    kind, _, variant = name.partition("-")
    started = time.perf_counter()
    model = quantize_model(loaded, kind, dtype=loaded.dtype, scales=variant if variant == "tensor" else None)
    if variant == "largest":
        with mock.patch.object(compressed_tensors, "best_scales", largest_magnitude):
            model.write(directory)
    else:
        model.write(directory)
    seconds = time.perf_counter() - started
    loss, reloaded = measure_export(model, directory, data, generate=True)
    check = check_quantized(directory, reloaded, loaded.tokens, dtype=model.dtype, has_experts=False)
    return {
        "description": model.description,
        "seconds_to_write": round(seconds, 1),
        "megabytes": round(weight_bytes(directory) / 1e6, 1),
        "kl": round(loss.kl, 5),
        "perplexity": round(loss.perplexity, 4),
        "exact_match": loss.exact_match,
        "float": {
            "dtype": str(model.dtype).removeprefix("torch."),
            "megabytes": round(model.float_bytes / 1e6, 1),
            "perplexity": round(loss.float_perplexity, 4),
            "exact_match": loss.float_exact_match,
        },
        "tokens": loss.tokens,
        "opened_by": "transformers" if check.passed else None,
    }


def table(report):
    """Return the table of docs/export.md."""
    rows = report["quantizations"]
    lines = ["| `--quantize` | size | KL divergence | perplexity | exact match |", "|---|---|---|---|---|"]
    plain = rows["int8"]["float"]
    lines.append(_row(f"none ({plain['dtype']})", {**plain, "kl": 0}))
    labels = {"fp8-tensor": "`fp8` with `--scales tensor`", "int4-largest": None}
    for name, row in rows.items():
        if (label := labels.get(name, f"`{name}`")) is not None:
            lines.append(_row(label, row))
    return "\n".join(lines)


def _row(label, row):
    size, kl, perplexity = f"{row['megabytes']:.0f} MB", f"{row['kl']:.2g}", f"{row['perplexity']:.3f}"
    return f"| {label} | {size} | {kl} | {perplexity} | {row['exact_match']:.0%} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help="a finished run on synth:house (default: train one)")
    parser.add_argument("--steps", type=int, default=40, help="steps of the fine-tune (default: 40)")
    parser.add_argument("--records", type=int, default=24, help="evaluated records (default: 24)")
    arguments = parser.parse_args()

    from whet.data.sources.source import open_source
    from whet.evaluation.evaluate_model import ModelEvaluation
    from whet.evaluation.quantization_loss import EvaluationData
    from whet.model_io.export.export_model import load_for_export, merge_adapter

    with tempfile.TemporaryDirectory() as directory:
        run = arguments.run or train(Path(directory), arguments.steps)
        loaded = load_for_export(run)
        merge_adapter(loaded, loaded.dtype)
        source = f"synth:house-test:{arguments.records}"
        evaluation = ModelEvaluation(loaded.model, loaded.tokenizer, open_source(source), max_length=256)
        data = EvaluationData(source, evaluation.batches, evaluation.questions)
        results = {}
        for name in KINDS:
            results[name] = measure(loaded, name, data, Path(directory) / name)
            print(name, json.dumps(results[name]), flush=True)
    report = {
        "model": "SmolLM2-135M-Instruct",
        "steps": arguments.steps,
        "data": source,
        "machine": describe_machine(),
        "quantizations": results,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
