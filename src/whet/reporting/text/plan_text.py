"""A plan as lines for a person, and as JSON for a program."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from whet.planning.plan import MOST_TOKENS, Plan
from whet.reporting.formatting import format_count, format_estimate, format_memory

_WORDS = {
    "other_models": "other models",
    "gathered": "gathered layers",
    "optimizer": "optimizer state",
    "loss": "loss chunks",
    "cache": "keys and values",
}


def plan_lines(plan: Plan) -> list[str]:
    """One line for each thing that is known, and the parts of the memory below it."""
    rows = [*_model(plan), *_work(plan), *_memory(plan), *_advice(plan), *_traffic(plan), *_time(plan)]
    return [f"{name:<12}  {value}" for name, value in rows]


TableRows = Iterator[tuple[str, str]]


def _model(plan: Plan) -> TableRows:
    parts = ", ".join(f"{part} {count:,}" for part, count in plan.parameters.items())
    yield "model", f"{plan.model}: {plan.total:,} parameters ({parts})"
    what = {"full": "all weights", "lora": "adapters", "qlora": "adapters on 4 bits"}[plan.method]
    share = 100 * plan.trained / (plan.total if plan.method == "full" else plan.total + plan.trained)
    yield "trains", f"{plan.trained:,} parameters, {share:.3g}% of them ({what}), by {plan.objective}"
    yield "device", _device(plan)


def _device(plan: Plan) -> str:
    target, cluster = plan.target, plan.cluster
    each = f"{target.name}, {format_memory(target.memory)}, {target.tflops:.4g} TFLOP/s ({target.source})"
    if cluster.devices > 1:
        layers = f", {cluster.tensor} to a layer" if cluster.tensor > 1 else ""
        each = f"{cluster.devices} x {each}, {cluster.kind}{layers}"
    return f"{each}; {target.precision.reason.partition(':')[0]}"


def _work(plan: Plan) -> TableRows:
    flops = plan.flops
    parts = {
        "forward": flops.forward,
        "gradients of inputs": flops.input_gradients,
        "of weights": flops.weight_gradients,
        "computed again": flops.recomputed,
        "other models": flops.others,
    }
    listed = ", ".join(f"{name} {format_count(value)}" for name, value in parts.items() if value)
    yield "FLOPs", f"{format_count(flops.computed)} a token, in documents of {plan.length}: {listed}"
    steps = f"{plan.steps:,} steps of " if plan.steps else ""
    whole = f", {format_count(plan.steps * plan.tokens_a_step)} tokens in all" if plan.steps else ""
    several = "micro-batches" if plan.micro_batches > 1 else "micro-batch"
    each = f"{plan.micro_batches} {several} of at most {plan.shape.positions:,} tokens on a device"
    yield "steps", f"{steps}{plan.tokens_a_step:,.0f} tokens{whole}; {each}"


def _memory(plan: Plan) -> TableRows:
    memory = plan.memory
    share = 100 * memory.peak / plan.target.memory
    each = " on each device" if plan.cluster.devices > 1 else ""
    when = f"{share:.0f}% of what it has, in the {_moment(memory.at)}"
    yield "memory", f"{format_memory(memory.peak)} at the peak{each}, {when}; the parts at their largest:"
    for name, size in memory.components().items():
        if not size:
            continue
        more = ""
        if name == "activations":
            other = "without" if plan.recomputes else "with"
            more = f" ({format_memory(plan.other_activations)} {other} run.grad_checkpoint)"
        yield "", f"{_WORDS.get(name, name):<16} {format_memory(size):>11}{more}"
    cache = plan.cache_bytes * (plan.shape.length + 1)
    row = f"of keys and values a row of {plan.shape.length + 1} tokens"
    yield "", f"{'generating':<16} {format_memory(cache):>11} {row}"


def _moment(at: str) -> str:
    known = {
        "forward": "forward pass",
        "backward": "backward pass",
        "embedding": "backward pass",
        "reference": "reference's pass before the first step",
    }
    return known.get(at, at)


def _advice(plan: Plan) -> TableRows:
    if plan.fits is None:
        return
    room = format_memory(plan.target.room)
    if plan.fits == 0:
        hints = [] if plan.recomputes else ["run.grad_checkpoint=true"]
        hints += {"full": ["method.kind=lora"], "lora": ["method.kind=qlora"], "qlora": []}[plan.method]
        hints += ["a smaller data.max_length", "more devices (--gpus)"]
        yield "fits", f"not even one document of {plan.shape.length} in {room}: try {', or '.join(hints)}"
        return
    whole = plan.fits * plan.cluster.shares >= plan.tokens_a_step
    enough = "; a whole step fits at once" if whole else ""
    most = " or more" if plan.fits > 0.9 * MOST_TOKENS else ""
    yield "fits", f"run.micro_batch_tokens up to {plan.fits:,}{most} in {room}{enough}"


def _traffic(plan: Plan) -> TableRows:
    found = plan.traffic
    if found is None:
        return
    parts = {
        "weights gathered": found.gathered,
        "gradients added up": found.added_up,
        "layers computed together": found.layers,
    }
    listed = ", ".join(f"{name} {format_memory(value)}" for name, value in parts.items() if value)
    yield "sends", f"{format_memory(found.total)} a step from each device: {listed}"
    if not found.known:
        yield "", "how fast is not known: name a device with --device"
        return
    exposed = f" and {found.exposed_s:.3g} s beside it" if found.exposed_s else ""
    times = f"{found.hidden_s:.3g} s behind {plan.compute_s:.3g} s of computing{exposed}"
    share = f"{100 * plan.efficiency:.0f}% of the speed without it"
    yield "", f"at {found.bandwidth_gb_s:g} GB/s {times}: {share}"


def _time(plan: Plan) -> TableRows:
    speed = plan.tokens_a_step / plan.step_s
    total = f", {format_estimate(plan.steps * plan.step_s)} in all" if plan.steps else ""
    share = f"{100 * plan.utilisation:.0f}% of the peak"
    yield "time", f"{plan.step_s:.3g} s a step{total}; {speed:,.0f} tokens a second, at {share}"


def plan_json(plan: Plan) -> dict[str, Any]:  # Any: JSON values
    """Everything in it: bytes, FLOPs and seconds."""
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
        "tokens_a_step": plan.tokens_a_step,
        "micro_batches": plan.micro_batches,
        "micro_batch_tokens": plan.shape.positions,
        "bytes": {**memory.components(), "peak": memory.peak, "peak_at": memory.at},
        "activations_with_checkpoint": memory.activations if plan.recomputes else plan.other_activations,
        "activations_without_checkpoint": plan.other_activations if plan.recomputes else memory.activations,
        "cache_bytes_per_token": plan.cache_bytes,
        "largest_micro_batch_tokens": plan.fits,
        "traffic": None if plan.traffic is None else dataclasses.asdict(plan.traffic),
        "efficiency": plan.efficiency,
        "utilisation": plan.utilisation,
        "step_s": plan.step_s,
        "seconds": None if plan.steps is None else plan.steps * plan.step_s,
    }
