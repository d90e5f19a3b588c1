"""Quantized exports: `python -m benchmarks.exports` writes benchmarks/results/exports.json.

Exports SmolLM2-135M-Instruct with each quantization, and compares it with the float model: size, KL divergence and
perplexity on the text that is bundled with whet, and the share of prompts of synth:house-test whose first 16 greedy tokens
stay the same (exact match, with the answers of the float model as expected answers). fp8 is measured with float8
activations. Each export is opened by transformers, whose logits must be those of whet. "int4-largest" has scales from the
largest magnitude of a group (/ 7.5) instead of those with the least squared error.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "exports.json"
KINDS = ("fp8", "fp8-tensor", "int8", "int4", "int4-largest", "nf4")
MODEL = "smollm2-135m-instruct"
ANSWER_TOKENS = 16


def largest_magnitude(groups, *, bits):
    return groups.abs().amax(1) / (2 ** (bits - 1) - 0.5)


def answered_questions(loaded, count):
    """Return questions whose expected answers are those of the float model."""
    from whet.data.sources.source import open_source
    from whet.evaluation.evaluate_model import ModelEvaluation
    from whet.evaluation.exact_match import greedy_answers

    source = open_source(f"synth:house-test:{count}")
    questions = ModelEvaluation(loaded.model, loaded.tokenizer, source, max_length=256).questions
    answers = greedy_answers(loaded.model, loaded.tokenizer, questions, max_tokens=ANSWER_TOKENS)
    return [replace(question, answer=answer) for question, answer in zip(questions, answers, strict=True)]


def measure(loaded, name, data, directory):
    """Return the measurements of one quantization."""
    from whet.evaluation.exact_match import exact_match
    from whet.evaluation.quantization_loss import quantized_activations
    from whet.evaluation.quantized_export import measure_export, weight_bytes
    from whet.model_io.export.quantize_model import quantize_model
    from whet.model_io.export.quantized_check import check_quantized
    from whet.model_io.formats import compressed_tensors

    kind, _, variant = name.partition("-")
    started = time.process_time()
    scales = variant if variant == "tensor" else None
    model = quantize_model(loaded, kind, dtype=loaded.dtype, scales=scales)
    search = largest_magnitude if variant == "largest" else compressed_tensors.best_scales
    with mock.patch.object(compressed_tensors, "best_scales", search):
        model.write(directory)
    seconds = time.process_time() - started
    loss, reloaded = measure_export(model, directory, data)
    check = check_quantized(directory, reloaded, loaded.tokens, dtype=model.dtype, has_experts=False)
    with quantized_activations(reloaded, model.weights.quantized if kind == "fp8" else ()):
        match = exact_match(reloaded, loaded.tokenizer, data.questions, max_tokens=ANSWER_TOKENS)
    return {
        "description": model.description,
        "cpu_seconds_to_write": round(seconds, 1),
        "megabytes": round(weight_bytes(directory) / 1e6, 1),
        "kl": round(loss.kl, 5),
        "perplexity": round(loss.perplexity, 3),
        "same_answers": match.metrics()["exact_match"],
        "opened_by": "transformers" if check.passed else None,
        "float": {
            "dtype": str(model.dtype).removeprefix("torch."),
            "megabytes": round(model.float_bytes / 1e6, 1),
            "perplexity": round(loss.float_perplexity, 3),
        },
        "tokens": loss.tokens,
    }


def table(report):
    """Return the table of docs/export.md."""
    rows = report["quantizations"]
    lines = ["| `--quantize` | size | KL divergence | perplexity | same answers |", "|---|---|---|---|---|"]
    plain = rows["int8"]["float"]
    lines.append(_row(f"none ({plain['dtype']})", {**plain, "kl": 0, "same_answers": 1}))
    labels = {"fp8-tensor": "`fp8` with `--scales tensor`", "int4-largest": None}
    for name, row in rows.items():
        if (label := labels.get(name, f"`{name}`")) is not None:
            lines.append(_row(label, row))
    return "\n".join(lines)


def _row(label, row):
    size, kl, perplexity = f"{row['megabytes']:.0f} MB", f"{row['kl']:.2g}", f"{row['perplexity']:.1f}"
    return f"| {label} | {size} | {kl} | {perplexity} | {row['same_answers']:.0%} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="prompts for greedy answers (default: 16)")
    arguments = parser.parse_args()

    from whet.evaluation.quantization_loss import sample_data
    from whet.model_io.export.export_model import load_for_export

    loaded = load_for_export(MODEL)
    data = replace(
        sample_data(loaded.model, loaded.tokenizer), questions=answered_questions(loaded, arguments.prompts)
    )
    report = {
        "model": MODEL,
        "prompts": arguments.prompts,
        "answer_tokens": ANSWER_TOKENS,
        "machine": describe_machine(),
        "quantizations": {},
    }
    for name in KINDS:
        with tempfile.TemporaryDirectory() as directory:
            report["quantizations"][name] = measure(loaded, name, data, Path(directory) / name)
        print(name, json.dumps(report["quantizations"][name]), flush=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
