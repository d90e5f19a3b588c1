"""Estimate the memory, FLOPs and time of a language model's run before anything is allocated."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensorMode

from whet.config.load_config import ConfigLike, to_config
from whet.config.objectives.custom import CustomObjective
from whet.config.run_config import RunConfig
from whet.errors import ConfigError
from whet.models.decoder import Decoder
from whet.models.heads import ModelWithHeads
from whet.models.language_model import LanguageModel
from whet.models.spec import ModelSpec
from whet.objectives.objective import Objective
from whet.ops.dispatch import FAST, use_paths
from whet.planning.collective_traffic import Traffic, estimate_traffic, sum_traffic
from whet.planning.devices import Cluster, Target, find_cluster, find_target, shard_layers
from whet.planning.memory_estimate import (
    FakeModel,
    Trace,
    replace_meta_tensors,
    state_bytes,
    trace,
    update_bytes,
)
from whet.planning.meta_model import (
    META,
    BatchShape,
    build_meta_decoder,
    build_meta_model,
    fill_process_caches,
    make_fake_batch,
    prepare_for_training,
    read_frozen_models,
)
from whet.planning.step_sizes import batch_shape, cache_bytes, parameters_by_part, step_settings
from whet.recipes.recipe import Build
from whet.recipes.registry import complete_config, recipe_for
from whet.training.observe.step_flops import StepFlops, step_flops
from whet.training.optim.optimizers import create_optimizer

MAX_MICRO_BATCH_TOKENS = 2**17  # the largest micro-batch that is tried; larger ones are not faster
UTILISATION = 0.4  # fraction of the peak FLOPS that a GPU reaches with a model that is not tiny


@dataclass(frozen=True)
class Memory:
    """The memory of one device in bytes. Each part is its own maximum, so their sum can exceed the peak."""

    weights: int
    adapters: int  # also other trainable parameters, if the base model is frozen
    other_models: int  # teachers and reference models
    gathered: int  # FSDP: unsharded layers
    optimizer: int  # optimizer state
    gradients: int
    activations: int  # stored for the backward pass, at the start of the loss
    loss: int  # chunks of logits and their gradients
    update: int  # temporary memory of the largest parameter's update
    cache: int  # KV cache of completions that are sampled together
    peak: int
    at: str  # the part of the step with the peak: forward, loss, backward, update, sampling, ...

    def components(self) -> dict[str, int]:
        """Return the parts by name, without the peak."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("peak", "at")]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DatasetCounts:
    """Counts from the tokenized training data."""

    steps: int
    tokens_per_step: float
    length: int  # mean tokens per document


@dataclass(frozen=True)
class Plan:
    """The estimated parameters, FLOPs, memory, communication and time of a run."""

    model: str
    method: str
    objective: str
    parameters: dict[str, int]
    trained: int
    flops: StepFlops  # per token
    length: int  # tokens per document, for the FLOPs
    shape: BatchShape  # a full micro-batch on one device
    tokens_per_step: float
    micro_batches: int  # per step and device
    steps: int | None
    memory: Memory
    other_activations: int  # activations if run.grad_checkpoint had the opposite value
    grad_checkpoint: bool  # run.grad_checkpoint
    max_micro_batch_tokens: (
        int | None
    )  # largest micro_batch_tokens that fits; 0: not even one document; None: not computed
    cache_bytes: int  # KV cache per token
    target: Target
    cluster: Cluster
    utilisation: float
    traffic: Traffic | None

    @property
    def total(self) -> int:
        """The number of parameters of the model without adapters."""
        return sum(self.parameters.values())

    @property
    def compute_s(self) -> float:
        """Seconds of computation per step."""
        flops_per_s = self.cluster.devices * self.target.tflops * 1e12 * self.utilisation
        return self.tokens_per_step * self.flops.computed / flops_per_s

    @property
    def efficiency(self) -> float:
        """The fraction of a step that is computation; collectives of weights and gradients overlap."""
        if self.traffic is None or not self.traffic.known:
            return 1.0
        return self.compute_s / (max(self.compute_s, self.traffic.hidden_s) + self.traffic.exposed_s)

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.compute_s / self.efficiency


class Planner:
    """Measures the memory of micro-batches with a config's model and objective, without allocating them.

    Args:
        config: The run's config.
        target: The kind of device.
        cluster: The devices and how they share the work.
        spec: A decoder to plan for instead of the config's model.
    """

    def __init__(
        self, config: RunConfig, target: Target, cluster: Cluster, spec: ModelSpec | None = None
    ) -> None:
        self.config, self.target, self.cluster = config, target, cluster
        fill_process_caches()
        precision = target.precision
        model = build_meta_model(config.language_model) if spec is None else build_meta_decoder(spec)
        self.parameters = parameters_by_part(model)
        self.cache_bytes = cache_bytes(model, precision.frozen)
        self.model = prepare_for_training(model, config, precision)
        self.recipe = recipe_for(config)
        self.step = self.recipe.step_shape()
        self.frozen = read_frozen_models(self.recipe, self.model, precision)
        self.frozen_models = [model for model in self.frozen.values() if isinstance(model, LanguageModel)]
        self.objective = self._make_objective()
        heads = self.objective.heads
        trained_module = self.model if heads is None else ModelWithHeads(self.model, heads)
        self.trained = sum(p.numel() for p in trained_module.parameters() if p.requires_grad)
        self.trained_bytes = _bytes(p for p in trained_module.parameters() if p.requires_grad)
        self.model_bytes = _bytes([*trained_module.parameters(), *self.model.buffers()])
        own = {id(p) for p in self.model.parameters()}  # a reference may share the base weights
        self.frozen_model_bytes = sum(
            _bytes(p for p in model.parameters() if id(p) not in own) for model in self.frozen_models
        )
        self.gathered_bytes = self._count_gathered_bytes()
        self.layers = len(list(self.model.blocks()))
        self.d_model = self.model.head().weight.shape[1]
        optimizer = create_optimizer(config.optim_groups, trained_module, quiet=True)
        self.optimizer_bytes = state_bytes(optimizer)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.update_bytes = update_bytes(optimizer, self.fake)
        self.fake_model: FakeModel | None = None

    def flops(self, length: int) -> StepFlops:
        """Return the FLOPs per token in documents of a length. Call it before the first `trace`."""
        self.model.grad_checkpoint = self.config.run.grad_checkpoint
        return step_flops(self.model, self.objective, length=length)

    def trace(self, shape: BatchShape, *, recompute: bool, accumulate: bool) -> Trace:
        """Return the memory of one micro-batch.

        Args:
            shape: The micro-batch.
            recompute: Whether gradient checkpointing is on.
            accumulate: Whether gradients of an earlier micro-batch exist.
        """
        if self.fake_model is None:
            self.fake_model = self._make_fake_model()
        kind = self.target.kind
        self.fake_model.model.grad_checkpoint = recompute
        with self.fake:
            batch = make_fake_batch(shape, device=kind, columns=self.step.columns)
        return trace(
            self.fake_model,
            self.objective,
            batch,
            fake=self.fake,
            precision=self.trace_precision,
            device=kind,
            accumulate=accumulate and not self.cluster.shards_weights,
            compiled=self.config.run.compile,
            scattered=self.cluster.shards_weights,
        )

    def memory(self, micro_batch: Trace, *, accumulate: bool) -> Memory:
        """Return the memory of one device in a step.

        Args:
            micro_batch: The memory of a micro-batch, from `trace`.
            accumulate: Whether a step has more than one micro-batch.
        """
        is_sharded = self.cluster.shards_weights
        shards = self.cluster.shares * self.cluster.tensor if is_sharded else self.cluster.tensor
        weights, trained = self.model_bytes // shards, self.trained_bytes // shards
        optimizer, frozen_models = self.optimizer_bytes // shards, self.frozen_model_bytes // shards
        gathered = self.gathered_bytes if is_sharded else 0
        fixed = weights + optimizer
        reference_pass = 0
        if self._has_reference_pass():  # both models are unsharded then, and there is no optimizer state yet
            frozen_models = self.frozen_model_bytes
            reference_pass = self.model_bytes + frozen_models + micro_batch.loss - fixed
        else:
            fixed += frozen_models
        accumulated = trained if accumulate or is_sharded else 0
        # DDP copies gradients into flat vectors for the all-reduce
        gradients = 2 * trained if self.cluster.kind == "ddp" else trained
        cache = self.step.cached_tokens * self.cache_bytes
        peaks = {
            micro_batch.at: gathered + micro_batch.peak + accumulated,
            "update": gradients + self.update_bytes // shards,
            "sampling": cache,
            "reference": reference_pass,
        }
        is_full = self.config.method.kind == "full"
        return Memory(
            weights=weights if is_full else weights - trained,
            adapters=0 if is_full else trained,
            other_models=frozen_models,
            gathered=gathered,
            optimizer=optimizer,
            gradients=gradients,
            activations=micro_batch.activations,
            loss=micro_batch.loss,
            update=self.update_bytes // shards,
            cache=cache,
            peak=fixed + max(peaks.values()),
            at=max(peaks, key=lambda part: peaks[part]),
        )

    def largest_batch(self, shape: BatchShape, peak: int, *, accumulate: bool) -> int:
        """Return how many documents fit into a micro-batch.

        Args:
            shape: A micro-batch with documents of the planned length.
            peak: The peak memory of that micro-batch.
            accumulate: Whether a step has more than one micro-batch.
        """
        available = self.target.usable_memory
        multiple = self.step.multiple
        peaks = {shape.documents: peak}  # by number of documents

        def peak_of(documents: int) -> int:
            if documents not in peaks:
                # not packed: the memory is the same, and the trace of many packed documents is slower
                micro_batch = self.trace(
                    BatchShape(documents, shape.length, packed=False),
                    recompute=self.config.run.grad_checkpoint,
                    accumulate=accumulate,
                )
                peaks[documents] = self.memory(micro_batch, accumulate=accumulate).peak
            return peaks[documents]

        previous, current = shape.documents, 2 * shape.documents
        if shape.positions >= MAX_MICRO_BATCH_TOKENS and peak <= available:
            return shape.documents
        for _ in range(4):  # secant method: the peak is almost linear once the chunks of the loss are full
            slope = max(1.0, (peak_of(current) - peak_of(previous)) / (current - previous))
            candidate = int(current + (available - peak_of(current)) / slope)
            candidate = max(
                multiple, min(candidate, MAX_MICRO_BATCH_TOKENS // shape.length) // multiple * multiple
            )
            if candidate in peaks:
                break
            previous, current = current, candidate
            if 0.98 * available < peak_of(current) <= available:
                break
        return max((documents for documents, size in peaks.items() if size <= available), default=0)

    def _has_reference_pass(self) -> bool:
        """Return whether a frozen model runs before the first step and is freed afterwards."""
        specs = self.recipe.frozen_models()
        return any(specs[role].before_training for role in self.frozen)

    def _make_fake_model(self) -> FakeModel:
        self.trace_precision = self.target.precision
        model = self.model
        if self.cluster.shards_weights or self.cluster.tensor > 1:
            # layers are gathered in the compute dtype, so autocast does not cast them
            compute = self.trace_precision.compute
            self.trace_precision = dataclasses.replace(self.trace_precision, trained=compute, frozen=compute)
            if isinstance(model, Decoder) and self.cluster.tensor > 1:
                model = build_meta_decoder(shard_layers(model.spec, self.cluster.tensor))
                prepare_for_training(model, self.config, self.trace_precision)
            else:
                model.to(compute)
        fake_model = FakeModel(model, self.fake)
        for frozen_model in self.frozen_models:
            FakeModel(frozen_model, self.fake)
        if self.objective.heads is not None:
            replace_meta_tensors(self.objective.heads, self.fake)
        return fake_model

    def _make_objective(self) -> Objective:
        b = Build(self.config, self.model, self.target.precision, frozen=self.frozen)
        with META:
            return self.recipe.objective(b)

    def _count_gathered_bytes(self) -> int:
        """Return the bytes that FSDP unshards at once, in the compute dtype.

        These are the parameters outside of the layers, two layers, and the gradients of one layer.
        """
        size = self.target.precision.compute.itemsize
        blocks = list(self.model.blocks())
        block_parameters = {id(p) for block in blocks for p in block.parameters()}
        root = sum(p.numel() for p in self.model.parameters() if id(p) not in block_parameters)
        largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
        trainable = max(sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks)
        return size * (root + 2 * largest + trainable) // self.cluster.tensor


def plan(
    config: ConfigLike,
    *,
    device: str | None = None,
    gpus: int = 1,
    network_gb_s: float = 50.0,
    utilisation: float = UTILISATION,
) -> Plan:
    """Estimate the parameters, FLOPs, memory and time of a run without downloading or allocating anything.

    Args:
        config: A RunConfig, a mapping, or the path of a YAML file.
        device: A chip such as "h200" or "rtx4090", or "cpu"; None for the device of this machine.
        gpus: The number of devices, which the `parallel` section of the config distributes the run over.
        network_gb_s: Bandwidth of one GPU to other machines, in GB/s.
        utilisation: The fraction of the peak FLOPS that is reached, above 0 and at most 1.

    Returns:
        The estimate: `memory.peak` in bytes, `step_s` in seconds, and more.

    Raises:
        ConfigError: The config is invalid, the device is unknown, or a value is out of range.
    """
    from whet.planning.dataset_count import count_small_dataset  # which imports this module

    config = to_config(config)
    if not 0 < utilisation <= 1:
        raise ConfigError(f"utilisation {utilisation:g}: it must be above 0 and at most 1")
    return plan_run(
        config,
        device=device,
        gpus=gpus,
        network_gb_s=network_gb_s,
        utilisation=utilisation,
        counts=count_small_dataset(config),
    )


@use_paths(FAST)  # plan for the fast paths, even within whet.reference()
def plan_run(
    config: RunConfig,
    *,
    device: str | None = None,
    gpus: int = 1,
    network_gb_s: float = 50.0,
    utilisation: float = UTILISATION,
    counts: DatasetCounts | None = None,
    spec: ModelSpec | None = None,
    suggest: bool = True,
    user_code: bool = True,
) -> Plan:
    """Estimate the cost of a run; see `plan` for the first arguments.

    Args:
        config: The run's config.
        device: The kind of device.
        gpus: The number of devices.
        network_gb_s: Bandwidth of one GPU to other machines, in GB/s.
        utilisation: The fraction of the peak FLOPS that is reached.
        counts: Counts from the data, if they are known.
        spec: A decoder to plan for instead of the config's model.
        suggest: Whether to compute the largest micro-batch that fits.
        user_code: Whether a custom objective may be imported; if not, it raises a ConfigError.
    """
    if isinstance(config.objective, CustomObjective) and not user_code:
        raise ConfigError(f"a plan of objective.kind {config.objective.kind} would run the user's code")
    config = complete_config(config)
    cluster = find_cluster(config, gpus, network_gb_s=network_gb_s)
    target = find_target(device, config)
    parts = config.parts()
    if parts:  # every step contains all parts, one after the other, so the largest part has the peak
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
        tokens = sum(plan.tokens_per_step for plan in plans)
        flops = sum((plan.flops * plan.tokens_per_step for plan in plans), StepFlops()) * (1 / tokens)
        micro_batches = sum(plan.micro_batches for plan in plans)
        return dataclasses.replace(
            largest,
            objective="mix",
            tokens_per_step=tokens,
            flops=flops,
            micro_batches=micro_batches,
            traffic=sum_traffic(cluster, [plan.traffic for plan in plans]),
        )
    planner = Planner(config, target, cluster, spec)
    shape, step_tokens = batch_shape(config, planner.step)
    length = shape.length if counts is None else counts.length
    tokens = float(step_tokens) if counts is None else counts.tokens_per_step
    micro_batches = max(
        1, math.ceil(tokens / cluster.shares / max(shape.positions, step_settings(config).micro_tokens))
    )
    accumulate, recompute = micro_batches > 1, config.run.grad_checkpoint
    flops = planner.flops(length)
    micro_batch = planner.trace(shape, recompute=recompute, accumulate=accumulate)
    memory = planner.memory(micro_batch, accumulate=accumulate)
    toggled, fits = micro_batch, None
    if suggest:
        toggled = planner.trace(shape, recompute=not recompute, accumulate=accumulate)
        fits = shape.length * planner.largest_batch(shape, memory.peak, accumulate=accumulate)
    return Plan(
        model=config.model if isinstance(config.model, str) else f"{config.model.preset} from scratch",  # type: ignore[union-attr]  # quality models are planned elsewhere
        method=config.method.kind,
        objective=config.objective.kind,
        parameters=planner.parameters,
        trained=planner.trained,
        flops=flops,
        length=length,
        shape=shape,
        tokens_per_step=tokens,
        micro_batches=micro_batches,
        steps=config.run.steps if counts is None else counts.steps,
        memory=memory,
        other_activations=toggled.activations,
        grad_checkpoint=recompute,
        max_micro_batch_tokens=fits,
        cache_bytes=planner.cache_bytes,
        target=target,
        cluster=cluster,
        utilisation=utilisation,
        traffic=estimate_traffic(
            cluster,
            target,
            trained=planner.trained,
            weights=planner.model_bytes,
            micro_batches=micro_batches,
            positions=shape.positions,
            d_model=planner.d_model,
            layers=planner.layers,
        ),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
