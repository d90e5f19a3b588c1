"""The data of a run as JSON values: everything that the text shows. docs/data-json.md describes the keys."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from whet.config.preset import Preset
from whet.data.inspect.data_facts import DataView, Sample, SplitFacts, TokenizerFacts
from whet.data.inspect.problems import Problem
from whet.data.inspect.step_facts import RunCost, StepFacts

JsonObject = dict[str, Any]  # Any: JSON values


def data_json(view: DataView, problems: Sequence[Problem]) -> JsonObject:
    """Return the data of a run, and its problems."""
    return {
        "model": _model(view),
        "tokenizer": None if view.tokenizer is None else _tokenizer(view.tokenizer),
        "splits": [_split(split) for split in view.splits],
        "overlaps": [
            {
                "held_out": overlap.held_out_split,
                "training": overlap.training_split,
                "records": overlap.duplicates.count,
                "example": list(overlap.duplicates.pair) if overlap.duplicates.count else None,
            }
            for overlap in view.overlaps
        ],
        "prompts": _prompts(view) if view.prompts else None,
        "held_out": view.held_out,
        "remaining_classes": view.remaining_classes or None,
        "steps": None if view.steps is None else _steps(view.steps),
        "cost": None if view.cost is None or view.steps is None else _cost(view.cost, view.steps),
        "problems": [
            {
                "kind": "error" if problem.is_fatal else "warning",
                "message": problem.message,
                "hint": problem.hint,
                "details": list(problem.details),
            }
            for problem in problems
        ],
    }


def _model(view: DataView) -> JsonObject:
    if view.model is not None:
        return {
            "name": view.model.name,
            "parameters": view.model.parameters,
            "vocabulary": view.model.vocab_size,
            "context": view.model.max_positions,
        }
    model = view.config.language_model
    name = f"{model.preset} from scratch" if isinstance(model, Preset) else model
    return {"name": name, "parameters": None, "vocabulary": None, "context": None}


def _tokenizer(tokenizer: TokenizerFacts) -> JsonObject:
    return {
        "tokens": tokenizer.size,
        "special": tokenizer.special,
        "end_tokens": list(tokenizer.end_tokens),
        "template": tokenizer.template,
        "template_sha256": tokenizer.template_digest,
        "template_facts": None if tokenizer.probe is None else asdict(tokenizer.probe),
        "split_markers": tokenizer.split_markers,
    }


def _split(split: SplitFacts) -> JsonObject:
    shortest, median, p95, longest = split.lengths
    return {
        "name": split.name,
        "source": split.source,
        "records": split.records,
        "pairs": split.pairs,
        "formats": dict(split.record_formats),
        "examples": split.examples,
        "tokens": split.tokens,
        "supervised": None if split.is_classification else split.supervised,
        "weights": None
        if split.weights is None
        else [{"weight": weight, "tokens": count} for weight, count in split.weights.items()],
        "classes": split.classes or None,
        "sources": [asdict(share) for share in split.sources],
        "lengths": {"min": shortest, "median": median, "p95": p95, "max": longest},
        "histogram": [asdict(each) for each in split.bins],
        "shortened": split.shortened,
        "cut_tokens": split.cut_tokens,
        "cut_supervised": split.cut_supervised,
        "rejected": split.too_long_count,
        "bad_records": split.skipped,
        "duplicates": split.duplicates.count,
        "duplicate_example": list(split.duplicates.pair) if split.duplicates.count else None,
        "double_bos": split.doubled_bos,
        "with_end_token": split.with_supervised_end,
        "only_last_turn": split.only_last,
        "special_tokens_in_text": [asdict(use) for use in split.markers],
        "unread_fields": [{"message": message, "hint": hint} for message, hint in split.unread_fields],
        "samples": [_sample(sample) for sample in split.samples],
    }


def _sample(sample: Sample) -> JsonObject:
    pieces = [
        {
            "text": piece.text,
            "ids": list(piece.ids),
            "supervised": piece.supervised,
            "special": piece.special,
            "weight": piece.weight if piece.supervised else 0.0,
        }
        for piece in (*sample.head, *sample.tail)
    ]
    return {
        "origin": sample.origin,
        "kind": sample.kind or None,
        "range": sample.token_range or None,
        "tokens": sample.tokens,
        "supervised": sample.supervised,
        "pieces": pieces,
        "omitted": {"after": len(sample.head), "tokens": sample.omitted_tokens},
    }


def _prompts(view: DataView) -> JsonObject:
    return {
        "splits": dict(view.prompts),
        "completions": view.completions,
        "completion_tokens": view.completion_tokens,
    }


def _steps(steps: StepFacts) -> JsonObject:
    return {
        "steps": steps.steps,
        "epochs": steps.epochs,
        "tokens": steps.tokens,
        "steps_per_epoch": steps.steps_per_epoch,
        "tokens_per_epoch": steps.tokens_per_epoch,
        "supervised_per_epoch": steps.supervised_per_epoch,
        "examples_per_step": steps.examples_per_step,
        "tokens_per_step": steps.tokens_per_step,
        "micro_batches_per_step": steps.micro_batches,
        "micro_batch_tokens": steps.micro_tokens,
        "micro_batch_fill": steps.micro_batch_fill,
        "padding": 1 - steps.efficiency,
        "measured_steps": steps.measured,
        "curriculum": steps.has_curriculum,
    }


def _cost(cost: RunCost, steps: StepFacts) -> JsonObject:
    return {
        "device": cost.device,
        "step_s": cost.step_s,
        "epoch_s": cost.step_s * steps.steps_per_epoch,
        "run_s": cost.step_s * steps.steps,
        "utilization": cost.utilization,
        "peak_bytes": cost.peak_bytes,
        "memory_bytes": cost.memory_bytes,
    }
