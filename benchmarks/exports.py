"""Quantized exports: `python -m benchmarks.exports` writes benchmarks/results/exports.json.

Exports SmolLM2-135M-Instruct with each quantization, and compares it with the float model on the text that is bundled with
whet: size, KL divergence and perplexity, as `whet export smollm2-135m-instruct --to hf --quantize KIND --check` does. fp8 is
measured with float8 activations. Each export is opened by transformers, whose logits must be those of whet. `--run` adds the
exact match of a finished run on synth:house, measured on records of synth:house-test. "int4-largest" has scales from the
largest magnitude of a group (/ 7.5) instead of those with the least squared error.
"""

import argparse
import json
import tempfile
from pathlib import Path
from unittest import mock

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "exports.json"
KINDS = ("fp8", "int8", "int4", "nf4", "fp8-tensor", "int4-largest")
MODEL = "smollm2-135m-instruct"


def largest_magnitude(groups, *, bits):
    return groups.abs().amax(1) / (2 ** (bits - 1) - 0.5)


def load(run, records):
    """Return the merged model and the evaluation data."""
    from whet.data.sources.source import open_source
    from whet.evaluation.evaluate_model import ModelEvaluation
    from whet.evaluation.quantization_loss import EvaluationData, sample_data
    from whet.model_io.export.export_model import load_for_export, merge_adapter

    loaded = load_for_export(run or MODEL)
    if run is None:
        return loaded, sample_data(loaded.model, loaded.tokenizer)
    if loaded.has_adapter:
        merge_adapter(loaded, loaded.dtype)
    source = f"synth:house-test:{records}"
    evaluation = ModelEvaluation(loaded.model, loaded.tokenizer, open_source(source), max_length=256)
    return loaded, EvaluationData(source, evaluation.batches, evaluation.questions)


def measure(loaded, name, data, directory):
    """Return the measurements of one quantization."""
    from whet.evaluation.quantized_export import measure_export, weight_bytes
    from whet.model_io.export.quantize_model import quantize_model
    from whet.model_io.export.quantized_check import check_quantized
    from whet.model_io.formats import compressed_tensors

    kind, _, variant = name.partition("-")
    scales = variant if variant == "tensor" else None
    model = quantize_model(loaded, kind, dtype=loaded.dtype, scales=scales)
    search = largest_magnitude if variant == "largest" else compressed_tensors.best_scales
    with mock.patch.object(compressed_tensors, "best_scales", search):
        model.write(directory)
    loss, reloaded = measure_export(model, directory, data, generate=True)
    check = check_quantized(directory, reloaded, loaded.tokens, dtype=model.dtype, has_experts=False)
    row = {
        "description": model.description,
        "megabytes": weight_bytes(directory) / 1e6,
        "kl": loss.kl,
        "perplexity": loss.perplexity,
        "exact_match": loss.exact_match,
        "opened_by": "transformers" if check.passed else None,
    }
    plain = {
        "description": str(model.dtype).removeprefix("torch."),
        "megabytes": model.float_bytes / 1e6,
        "kl": 0.0,
        "perplexity": loss.float_perplexity,
        "exact_match": loss.float_exact_match,
    }
    return rounded(plain), rounded(row)


def rounded(row):
    """Return a row with four significant digits, as whet export prints them."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def table(report):
    """Return the table of docs/export.md."""
    rows = {f"none ({report['float']['description']})": report["float"]}
    labels = {"fp8-tensor": "`fp8` with `--scales tensor`", "int4-largest": "`int4` without the search"}
    rows |= {labels.get(name, f"`{name}`"): row for name, row in report["quantizations"].items()}
    matches = {name: f"{value:.0%}" for name, value in report["run"]["exact_match"].items()}
    lines = ["| `--quantize` | size | KL divergence | perplexity | exact match |", "|---|---|---|---|---|"]
    lines += [
        f"| {label} | {row['megabytes']:.0f} MB | {row['kl']:.2g} | {row['perplexity']:.1f} | {matches.get(name, '-')} |"
        for (label, row), name in zip(rows.items(), ["float", *report["quantizations"]], strict=True)
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, help="quantizations (default: all)"
    )
    parser.add_argument("--run", help="a finished run on synth:house, instead of SmolLM2")
    parser.add_argument("--records", type=int, default=24, help="evaluated records of --run (default: 24)")
    arguments = parser.parse_args()
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    loaded, data = load(arguments.run, arguments.records)
    facts = {"data": data.label, "tokens": sum(batch.supervised for batch in data.batches)}
    if arguments.run is None:
        facts = {
            "command": "python -m benchmarks.exports",
            "model": MODEL,
            **facts,
            "machine": describe_machine(),
        }
        report |= facts | {"quantizations": report.get("quantizations", {})}
    else:
        report["run"] = {**facts, "exact_match": {}}
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as directory:
            plain, row = measure(loaded, name, data, Path(directory) / name)
        print(name, json.dumps(row), flush=True)
        if arguments.run is None:
            report |= {"float": plain, "quantizations": report["quantizations"] | {name: row}}
        else:
            matches = report["run"]["exact_match"]
            matches |= {"float": plain["exact_match"], name: row["exact_match"]}
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
