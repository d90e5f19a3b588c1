"""A plan as text and as JSON."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from whet.planning.plan import MAX_MICRO_BATCH_TOKENS, Plan
from whet.reporting.formatting import format_count, format_estimate, format_memory

_LABELS = {
    "other_models": "other models",
    "gathered": "gathered layers",
    "optimizer": "optimizer state",
    "loss": "loss chunks",
    "cache": "KV cache",
}


def plan_lines(plan: Plan) -> list[str]:
    """Return the plan as a table, with the components of the memory on separate lines."""
    rows = [*_model(plan), *_work(plan), *_memory(plan), *_advice(plan), *_traffic(plan), *_time(plan)]
    return [f"{name:<12}  {value}" for name, value in rows]


TableRows = Iterator[tuple[str, str]]


def _model(plan: Plan) -> TableRows:
    parts = ", ".join(f"{part} {count:,}" for part, count in plan.parameters.items())
    yield "model", f"{plan.model}: {plan.total:,} parameters ({parts})"
    method = {"full": "all weights", "lora": "adapters", "qlora": "adapters on a 4-bit base"}[plan.method]
    share = 100 * plan.trained / (plan.total if plan.method == "full" else plan.total + plan.trained)
    yield "trainable", f"{plan.trained:,} parameters, {share:.3g}% ({method}), objective {plan.objective}"
    yield "device", _device(plan)


def _device(plan: Plan) -> str:
    target, cluster = plan.target, plan.cluster
    description = (
        f"{target.name}, {format_memory(target.memory)}, {target.tflops:.4g} TFLOP/s ({target.source})"
    )
    if cluster.devices > 1:
        tensor = f", tensor parallel over {cluster.tensor}" if cluster.tensor > 1 else ""
        description = f"{cluster.devices} x {description}, {cluster.kind}{tensor}"
    return f"{description}; {target.precision.reason.partition(':')[0]}"


def _work(plan: Plan) -> TableRows:
    flops = plan.flops
    parts = {
        "forward": flops.forward,
        "input gradients": flops.input_gradients,
        "weight gradients": flops.weight_gradients,
        "recomputed": flops.recomputed,
        "other models": flops.others,
    }
    listed = ", ".join(f"{name} {format_count(value)}" for name, value in parts.items() if value)
    yield "FLOPs", f"{format_count(flops.computed)} per token, in documents of {plan.length} tokens: {listed}"
    steps = f"{plan.steps:,} steps of " if plan.steps else ""
    total = f", {format_count(plan.steps * plan.tokens_per_step)} tokens in total" if plan.steps else ""
    unit = "micro-batches" if plan.micro_batches > 1 else "micro-batch"
    micro_batches = f"{plan.micro_batches} {unit} of at most {plan.shape.positions:,} tokens per device"
    yield "steps", f"{steps}{plan.tokens_per_step:,.0f} tokens{total}; {micro_batches}"


def _memory(plan: Plan) -> TableRows:
    memory = plan.memory
    share = 100 * memory.peak / plan.target.memory
    scope = " per device" if plan.cluster.devices > 1 else ""
    details = f"{share:.0f}% of the device, during the {_describe_phase(memory.at)}"
    yield "memory", f"{format_memory(memory.peak)} peak{scope}, {details}; peak of each component:"
    for name, size in memory.components().items():
        if not size:
            continue
        alternative = ""
        if name == "activations":
            preposition = "without" if plan.grad_checkpoint else "with"
            alternative = f" ({format_memory(plan.other_activations)} {preposition} run.grad_checkpoint)"
        yield "", f"{_LABELS.get(name, name):<16} {format_memory(size):>11}{alternative}"
    cache = plan.cache_bytes * (plan.shape.length + 1)
    sequence = f"of KV cache per sequence of {plan.shape.length + 1} tokens"
    yield "", f"{'generation':<16} {format_memory(cache):>11} {sequence}"


def _describe_phase(phase: str) -> str:
    descriptions = {
        "forward": "forward pass",
        "backward": "backward pass",
        "embedding": "backward pass",
        "reference": "reference model's pass before the first step",
    }
    return descriptions.get(phase, phase)


def _advice(plan: Plan) -> TableRows:
    if plan.max_micro_batch_tokens is None:
        return
    available = format_memory(plan.target.usable_memory)
    if plan.max_micro_batch_tokens == 0:
        hints = [] if plan.grad_checkpoint else ["run.grad_checkpoint=true"]
        hints += {"full": ["method.kind=lora"], "lora": ["method.kind=qlora"], "qlora": []}[plan.method]
        hints += ["a smaller data.max_length", "more devices (--gpus)"]
        yield (
            "fits",
            f"not even one document of {plan.shape.length} tokens in {available}: try {', or '.join(hints)}",
        )
        return
    fits_step = plan.max_micro_batch_tokens * plan.cluster.shares >= plan.tokens_per_step
    step_note = "; a step fits into one micro-batch" if fits_step else ""
    or_more = " or more" if plan.max_micro_batch_tokens > 0.9 * MAX_MICRO_BATCH_TOKENS else ""
    yield (
        "fits",
        f"run.micro_batch_tokens up to {plan.max_micro_batch_tokens:,}{or_more} in {available}{step_note}",
    )


def _traffic(plan: Plan) -> TableRows:
    traffic = plan.traffic
    if traffic is None:
        return
    parts = {
        "all-gather of weights": traffic.gathered,
        "reduction of gradients": traffic.added_up,
        "tensor-parallel layers": traffic.layers,
    }
    listed = ", ".join(f"{name} {format_memory(value)}" for name, value in parts.items() if value)
    yield "traffic", f"{format_memory(traffic.total)} per step and device: {listed}"
    if not traffic.known:
        yield "", "time unknown: name a device with --device"
        return
    exposed = f", {traffic.exposed_s:.3g} s not overlapped" if traffic.exposed_s else ""
    times = f"{traffic.hidden_s:.3g} s overlapped with {plan.compute_s:.3g} s of compute{exposed}"
    share = f"{100 * plan.efficiency:.0f}% of the throughput without communication"
    yield "", f"at {traffic.bandwidth_gb_s:g} GB/s: {times}; {share}"


def _time(plan: Plan) -> TableRows:
    speed = plan.tokens_per_step / plan.step_s
    total = f", {format_estimate(plan.steps * plan.step_s)} in total" if plan.steps else ""
    share = f"{100 * plan.utilisation:.0f}% of peak FLOP/s"
    yield "time", f"{plan.step_s:.3g} s per step{total}; {speed:,.0f} tokens/s at {share}"


def plan_json(plan: Plan) -> dict[str, Any]:  # Any: JSON values
    """Return the plan as JSON values, in bytes, FLOPs and seconds."""
    memory = plan.memory
    return {
        "model": plan.model,
        "method": plan.method,
        "objective": plan.objective,
        "parameters": {**plan.parameters, "total": plan.total, "trained": plan.trained},
        "device": {
            "name": plan.target.name,
            "memory": plan.target.memory,
            "tflops": plan.target.tflops,
            "source": plan.target.source,
            "precision": plan.target.precision.reason,
        },
        "cluster": dataclasses.asdict(plan.cluster),
        "flops_per_token": {**dataclasses.asdict(plan.flops), "computed": plan.flops.computed},
        "steps": plan.steps,
        "tokens_a_step": plan.tokens_per_step,
        "micro_batches": plan.micro_batches,
        "micro_batch_tokens": plan.shape.positions,
        "bytes": {**memory.components(), "peak": memory.peak, "peak_at": memory.at},
        "activations_with_checkpoint": memory.activations if plan.grad_checkpoint else plan.other_activations,
        "activations_without_checkpoint": plan.other_activations
        if plan.grad_checkpoint
        else memory.activations,
        "cache_bytes_per_token": plan.cache_bytes,
        "largest_micro_batch_tokens": plan.max_micro_batch_tokens,
        "traffic": None if plan.traffic is None else dataclasses.asdict(plan.traffic),
        "efficiency": plan.efficiency,
        "utilisation": plan.utilisation,
        "step_s": plan.step_s,
        "seconds": None if plan.steps is None else plan.steps * plan.step_s,
    }
