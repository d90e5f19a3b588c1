"""What a run of a language model would take, before any of it is allocated."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensorMode

from whet.config.load_config import ConfigLike, as_config
from whet.config.objectives.custom import CustomObjective
from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.models.spec import ModelSpec
from whet.objectives.objective import Objective
from whet.ops.dispatch import FAST, using
from whet.planning.collective_traffic import Traffic, of_one_step, traffic
from whet.planning.devices import Cluster, Target, find_cluster, find_target, share_of_layers
from whet.planning.memory_estimate import Sketch, Trace, fill, state_bytes, trace, update_bytes
from whet.planning.meta_model import (
    META,
    BatchShape,
    from_spec,
    know_constants,
    make_fake_batch,
    prepare,
    read_frozen_models,
    read_model,
)
from whet.planning.step_sizes import batch_shape, cache_bytes, parameters_by_part, settings_of
from whet.recipes.recipe import Build
from whet.recipes.registry import recipe_for
from whet.training.observe.step_flops import StepFlops, step_flops
from whet.training.optim.optimizers import create_optimizer

MOST_TOKENS = 2**17  # larger micro-batches are not looked for: they are no quicker
UTILISATION = 0.4  # of the peak: what a well-fed GPU reaches with a model of some size


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Each part is the most that it takes: they are not all there at the peak."""

    weights: int
    adapters: int  # and whatever else trains beside frozen weights
    other_models: int
    gathered: int  # fsdp: layers that are whole for a while
    optimizer: int
    gradients: int
    activations: int  # kept for the backward pass, when the loss begins
    loss: int  # chunks of logits, and what their gradients need
    update: int  # of the optimizer's largest tensor
    cache: int  # keys and values of completions that are sampled at once
    peak: int
    at: str  # when

    def components(self) -> dict[str, int]:
        """The parts by name."""
        whole = ("peak", "at")
        names = [field.name for field in dataclasses.fields(self) if field.name not in whole]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Counted:
    """What was counted in the data."""

    steps: int
    tokens_a_step: float
    length: int  # mean of a document


@dataclass(frozen=True)
class Plan:
    """A run in numbers."""

    model: str
    method: str
    objective: str
    parameters: dict[str, int]
    trained: int
    flops: StepFlops  # of a token
    length: int  # of the documents that FLOPs were counted for
    shape: BatchShape  # a full micro-batch on one device
    tokens_a_step: float
    micro_batches: int  # of a step, on one device
    steps: int | None
    memory: Memory
    other_activations: int  # with gradient checkpointing where it is off, and the other way around
    recomputes: bool
    fits: int | None  # the largest micro_batch_tokens; 0: not even one document; None: not asked
    cache_bytes: int  # of a token, when it generates
    target: Target
    cluster: Cluster
    utilisation: float
    traffic: Traffic | None

    @property
    def total(self) -> int:
        """All parameters of the model, adapters aside."""
        return sum(self.parameters.values())

    @property
    def compute_s(self) -> float:
        """Seconds that a step computes."""
        rate = self.cluster.devices * self.target.tflops * 1e12 * self.utilisation
        return self.tokens_a_step * self.flops.computed / rate

    @property
    def efficiency(self) -> float:
        """The share of a step that is computing, when gathering and adding up hide behind it."""
        if self.traffic is None or not self.traffic.known:
            return 1.0
        return self.compute_s / (max(self.compute_s, self.traffic.hidden_s) + self.traffic.exposed_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s / self.efficiency


class Planner:
    """A config's model and objective without numbers, to be asked for the memory of batches."""

    def __init__(
        self, config: RunConfig, target: Target, cluster: Cluster, spec: ModelSpec | None = None
    ) -> None:
        self.config, self.target, self.cluster = config, target, cluster
        know_constants()
        precision = target.precision
        model = read_model(config.language_model) if spec is None else from_spec(spec)
        self.parameters = parameters_by_part(model)
        self.cache_bytes = cache_bytes(model, precision.frozen)
        self.model = prepare(model, config, precision)
        self.recipe = recipe_for(config)
        self.step = self.recipe.step_shape()
        self.frozen = read_frozen_models(self.recipe, precision)
        self.others = [other for other in self.frozen.values() if isinstance(other, LanguageModel)]
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.trained_bytes = _bytes(p for p in self.model.parameters() if p.requires_grad)
        self.held = _bytes([*self.model.parameters(), *self.model.buffers()])
        self.other_held = sum(_bytes(other.parameters()) for other in self.others)
        self.whole_at_once = self._gathered()
        self.layers = len(list(self.model.blocks()))
        self.d_model = self.model.head().weight.shape[1]
        self.objective = self._make_objective()
        optimizer = create_optimizer(config.optim_groups, self.model, quiet=True)
        self.state = state_bytes(optimizer)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.update = update_bytes(optimizer, self.fake)
        self.sketch: Sketch | None = None

    def flops(self, length: int) -> StepFlops:
        """Of a token; to be asked before the first trace."""
        self.model.grad_checkpoint = self.config.run.grad_checkpoint
        return step_flops(self.model, self.objective, length=length)

    def trace(self, shape: BatchShape, *, recompute: bool, accumulate: bool) -> Trace:
        """One micro-batch."""
        if self.sketch is None:
            self.sketch = self._make_sketch()
        kind = self.target.kind
        self.sketch.model.grad_checkpoint = recompute
        with self.fake:
            batch = make_fake_batch(shape, device=kind, columns=self.step.columns)
        return trace(
            self.sketch,
            self.objective,
            batch,
            fake=self.fake,
            precision=self.computed_in,
            device=kind,
            accumulate=accumulate and not self.cluster.cuts_weights,
            compiled=self.config.run.compile,
            scattered=self.cluster.cuts_weights,
        )

    def memory(self, found: Trace, *, accumulate: bool) -> Memory:
        """All that one device holds, around one micro-batch."""
        cuts = self.cluster.shares * self.cluster.tensor if self.cluster.cuts_weights else self.cluster.tensor
        held, trained = self.held // cuts, self.trained_bytes // cuts
        state, others = self.state // cuts, self.other_held // cuts
        gathered = self.whole_at_once if self.cluster.cuts_weights else 0
        fixed = held + state
        before = 0
        if self._asked_before():  # both models are whole then, and nothing has been updated yet
            others = self.other_held
            before = self.held + others + found.loss - fixed
        else:
            fixed += others
        earlier = trained if accumulate or self.cluster.cuts_weights else 0
        # gradients are copied into vectors that are added up over the devices
        gradients = 2 * trained if self.cluster.kind == "ddp" else trained
        cache = self.step.cached_tokens * self.cache_bytes
        moments = {
            found.at: gathered + found.peak + earlier,
            "update": gradients + self.update // cuts,
            "sampling": cache,
            "reference": before,
        }
        full = self.config.method.kind == "full"
        return Memory(
            weights=held if full else held - trained,
            adapters=0 if full else trained,
            other_models=others,
            gathered=gathered,
            optimizer=state,
            gradients=gradients,
            activations=found.activations,
            loss=found.loss,
            update=self.update // cuts,
            cache=cache,
            peak=fixed + max(moments.values()),
            at=max(moments, key=lambda moment: moments[moment]),
        )

    def largest_batch(self, shape: BatchShape, peak: int, *, accumulate: bool) -> int:
        """How many documents of a length fit at once; `peak` is that of the batch of this shape."""
        room = self.target.room
        step = self.step.multiple
        known = {shape.documents: peak}

        def peak_of(documents: int) -> int:
            if documents not in known:
                # as rows: packed ones take as much, and a trace of many of them longer
                found = self.trace(
                    BatchShape(documents, shape.length, packed=False),
                    recompute=self.config.run.grad_checkpoint,
                    accumulate=accumulate,
                )
                known[documents] = self.memory(found, accumulate=accumulate).peak
            return known[documents]

        before, latest = shape.documents, 2 * shape.documents
        if shape.positions >= MOST_TOKENS and peak <= room:
            return shape.documents
        for _ in range(4):  # nearly a straight line, once the chunks of the loss are full
            slope = max(1.0, (peak_of(latest) - peak_of(before)) / (latest - before))
            wanted = int(latest + (room - peak_of(latest)) / slope)
            wanted = max(step, min(wanted, MOST_TOKENS // shape.length) // step * step)
            if wanted in known:
                break
            before, latest = latest, wanted
            if 0.98 * room < peak_of(latest) <= room:
                break
        return max((documents for documents, size in known.items() if size <= room), default=0)

    def _asked_before(self) -> bool:
        """Whether another model is asked before the first step and gone by then."""
        wanted = self.recipe.frozen_models()
        return any(wanted[role].before_training for role in self.frozen)

    def _make_sketch(self) -> Sketch:
        self.computed_in = self.target.precision
        model = self.model
        if self.cluster.cuts_weights or self.cluster.tensor > 1:
            # layers are gathered in the dtype that is computed in, so nothing is cast as it goes
            compute = self.computed_in.compute
            self.computed_in = dataclasses.replace(self.computed_in, trained=compute, frozen=compute)
            if isinstance(model, Decoder) and self.cluster.tensor > 1:
                model = from_spec(share_of_layers(model.spec, self.cluster.tensor))
                prepare(model, self.config, self.computed_in)
            else:
                model.to(compute)
        sketch = Sketch(model, self.fake)
        for other in self.others:
            Sketch(other, self.fake)
        if self.objective.heads is not None:
            fill(self.objective.heads, self.fake)
        return sketch

    def _make_objective(self) -> Objective:
        b = Build(self.config, self.model, self.target.precision, frozen=self.frozen)
        with META:
            return self.recipe.objective(b)

    def _gathered(self) -> int:
        """fsdp: what surrounds the layers, two layers, and the gradients of one, in the computed dtype."""
        size = self.target.precision.compute.itemsize
        blocks = list(self.model.blocks())
        inside = {id(p) for block in blocks for p in block.parameters()}
        root = sum(p.numel() for p in self.model.parameters() if id(p) not in inside)
        largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
        learned = max(sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks)
        return size * (root + 2 * largest + learned) // self.cluster.tensor


def plan(
    config: ConfigLike,
    *,
    device: str | None = None,
    gpus: int = 1,
    network_gb_s: float = 50.0,
    utilisation: float = UTILISATION,
) -> Plan:
    """Return parameters, FLOPs, memory and time of a run; nothing is downloaded or allocated.

    Args:
        config: a RunConfig, a mapping, or the path of a YAML file.
        device: a chip such as "h200" or "rtx4090", or "cpu"; None for the device of this machine.
        gpus: how many of them, as the `parallel` section says.
        network_gb_s: bandwidth from a GPU to those of other machines, in GB/s.
        utilisation: the share of the peak that is reached, above 0 and at most 1.

    Raises:
        ConfigError: the config, the device or a number makes no sense.
    """
    from whet.planning.dataset_count import count_cheaply  # which imports this module

    config = as_config(config)
    if not 0 < utilisation <= 1:
        raise ConfigError(f"utilisation {utilisation:g}: it is a share, above 0 and at most 1")
    return plan_run(
        config,
        device=device,
        gpus=gpus,
        network_gb_s=network_gb_s,
        utilisation=utilisation,
        counted=count_cheaply(config),
    )


@using(FAST)  # what is planned is a run as it is meant to be
def plan_run(
    config: RunConfig,
    *,
    device: str | None = None,
    gpus: int = 1,
    network_gb_s: float = 50.0,
    utilisation: float = UTILISATION,
    counted: Counted | None = None,
    spec: ModelSpec | None = None,
    suggest: bool = True,
    user_code: bool = True,
) -> Plan:
    """What a run takes. With a `spec`, of that decoder instead of the model that the config names.

    Without `user_code`, a custom objective is refused instead of imported.
    """
    if isinstance(config.objective, CustomObjective) and not user_code:
        raise ConfigError(f"a plan of objective.kind {config.objective.kind} would run its code")
    cluster = find_cluster(config, gpus, network_gb_s=network_gb_s)
    target = find_target(device, config)
    parts = config.parts()
    if parts:  # the part that takes the most; all of them are in every step
        plans = [
            plan_run(
                part,
                device=device,
                gpus=gpus,
                network_gb_s=network_gb_s,
                utilisation=utilisation,
                spec=spec,
                suggest=suggest,
            )
            for part in parts.values()
        ]
        largest = max(plans, key=lambda plan: plan.memory.peak)
        tokens = sum(plan.tokens_a_step for plan in plans)
        flops = sum((plan.flops * plan.tokens_a_step for plan in plans), StepFlops()) * (1 / tokens)
        micro = sum(plan.micro_batches for plan in plans)
        return dataclasses.replace(
            largest,
            objective="mix",
            tokens_a_step=tokens,
            flops=flops,
            micro_batches=micro,
            traffic=of_one_step(cluster, [plan.traffic for plan in plans]),
        )
    planner = Planner(config, target, cluster, spec)
    shape, tokens_a_step = batch_shape(config, planner.step)
    length = shape.length if counted is None else counted.length
    tokens = float(tokens_a_step) if counted is None else counted.tokens_a_step
    micro_batches = max(
        1, math.ceil(tokens / cluster.shares / max(shape.positions, settings_of(config).micro_tokens))
    )
    accumulate, recompute = micro_batches > 1, config.run.grad_checkpoint
    flops = planner.flops(length)
    found = planner.trace(shape, recompute=recompute, accumulate=accumulate)
    memory = planner.memory(found, accumulate=accumulate)
    other, fits = found, None
    if suggest:
        other = planner.trace(shape, recompute=not recompute, accumulate=accumulate)
        fits = shape.length * planner.largest_batch(shape, memory.peak, accumulate=accumulate)
    return Plan(
        model=config.model if isinstance(config.model, str) else f"{config.model.preset} from scratch",  # type: ignore[union-attr]  # no quality
        method=config.method.kind,
        objective=config.objective.kind,
        parameters=planner.parameters,
        trained=planner.trained,
        flops=flops,
        length=length,
        shape=shape,
        tokens_a_step=tokens,
        micro_batches=micro_batches,
        steps=config.run.steps if counted is None else counted.steps,
        memory=memory,
        other_activations=other.activations,
        recomputes=recompute,
        fits=fits,
        cache_bytes=planner.cache_bytes,
        target=target,
        cluster=cluster,
        utilisation=utilisation,
        traffic=traffic(
            cluster,
            target,
            trained=planner.trained,
            weights=planner.held,
            micro_batches=micro_batches,
            positions=shape.positions,
            d_model=planner.d_model,
            layers=planner.layers,
        ),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
