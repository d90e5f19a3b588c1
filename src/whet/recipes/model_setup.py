"""The default steps of a recipe for language models: load, compile, evaluate and save."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whet.adapters.attach import make_trainable
from whet.config.eval import Evaluation
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.batches import Batch, make_batch
from whet.data.run_data import EvaluationSplit
from whet.data.tokens.examples import Example
from whet.errors import ConfigError, ModelError
from whet.hardware import Precision
from whet.model_io.fingerprints import weights_digest
from whet.model_io.formats.adapter_files import save_adapter
from whet.model_io.load import load_base, load_quantized
from whet.model_io.tokenizer import load_model_tokenizer, new_tokenizer
from whet.model_io.tokenizer_files import save_tokenizer
from whet.models.decoder import Decoder
from whet.models.language_model import LanguageModel
from whet.ops.attention import describe_backend
from whet.ops.fp8 import FP8_MULTIPLE
from whet.ops.linear import Linear
from whet.parallel.fsdp import full_parameters_on_main
from whet.recipes.recipe import Build, Evaluators, RecipeData, describe_parameters
from whet.run_directory import BASE_DIRECTORY, TOKENIZER_DIRECTORY

if TYPE_CHECKING:
    from whet.evaluation.answer_metrics import AnswerMetrics
    from whet.model_io.formats.classifier_head import StoredHead

log = logging.getLogger("whet")


def find_tokenizer(
    config: RunConfig, data: RecipeData, directory: Path
) -> Any:  # Any: a transformers tokenizer
    """Return the model's tokenizer, or a new one trained on the data."""
    model = config.language_model
    if isinstance(model, Preset):
        return new_tokenizer(model, data.training_texts(), stored_in=directory / TOKENIZER_DIRECTORY)
    if (tokenizer := load_model_tokenizer(model)) is None:
        raise ModelError(f"{model} has no tokenizer, so it cannot read records")
    return tokenizer


def build_language_model(
    config: RunConfig,
    tokenizer: Any,  # Any: a transformers tokenizer
    *,
    device: torch.device,
    precision: Precision,
) -> tuple[LanguageModel, str]:
    """Return the model with its adapters, ready to train, and the hash of its weights before training.

    With method.continue, the hash includes the adapter that the run starts from.
    """
    method = config.method
    log.info("device: %s; precision %s; attention: %s", device, precision.reason, describe_backend(device))
    dtype = precision.trained if method.kind == "full" else precision.frozen
    model = _load_untrained_model(config, tokenizer, device=device, dtype=dtype)
    base_digest = weights_digest(model)
    make_trainable(model, method, dtype=precision.trained)
    model.grad_checkpoint = config.run.grad_checkpoint
    if config.run.fp8:
        log.info("fp8: %s", use_fp8(model, method.kind))
    log.info("parameters: %s", describe_parameters(model))
    return model, base_digest


def _load_untrained_model(
    config: RunConfig,
    tokenizer: Any,  # Any: as above
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> LanguageModel:
    name = config.language_model
    if config.method.continues:
        from whet.model_io.continued_adapter import load_continued

        return load_continued(config, dtype=dtype, device=device)
    if isinstance(name, Preset):
        from whet.models.from_scratch.new_model import new_model

        model = new_model(name, tokenizer, seed=config.run.seed, mup=config.optim.mup)
        return model.to(device, dtype)
    if config.method.kind == "qlora":
        return load_quantized(name, dtype=dtype, device=device)
    model, _ = load_base(name, dtype=dtype, device=device)
    if config.optim.mup is not None:
        from whet.models.from_scratch.mup import check_mup_multipliers

        spec = model.spec if isinstance(model, Decoder) else None
        check_mup_multipliers(spec, config.optim.mup, name=name)
    return model


def compile_model(b: Build) -> None:
    """Compile the layers of a language model, and run them on one micro-batch."""
    from whet.training.compile import compile_blocks

    log.info("compile: %s", compile_blocks(b.model, _first_batch(b), b.precision))


def _first_batch(b: Build) -> Batch:
    """Return the first micro-batch, or a dummy if batches do not exist yet or FSDP will shard the model."""
    if b.steps is None or b.config.parallel.kind == "fsdp":
        return make_batch([[Example([0] * 9, [True] * 9, "a dummy example")]])
    first: Batch = b.steps.peek()[0]
    return first


def text_evaluators(
    section: Evaluation,
    metrics: "AnswerMetrics | None",
    b: Build,
    data: EvaluationSplit | None,
    pause: Callable[[], None],
) -> Evaluators:
    """Return the evaluator of generated text: exact match and the metrics of eval.metrics.

    The list is empty if the split has no questions.
    """
    if data is None or not data.questions:
        return []
    from whet.evaluation.answer_metrics import answer_evaluator

    evaluate = answer_evaluator(
        b.model,
        b.tokenizer,
        data.questions,
        max_tokens=section.max_new_tokens,
        exact=section.generate,
        metrics=metrics,
        pause=pause,
        world=b.world,
    )
    return [evaluate]


def stage_tokenizer(config: RunConfig, b: Build, staging: Path) -> None:
    """Save a tokenizer that was trained for this run, because no model directory has it yet."""
    if isinstance(config.model, Preset):
        save_tokenizer(b.tokenizer, staging / TOKENIZER_DIRECTORY)


def save_language_model(
    config: RunConfig, b: Build, final: Path, *, head: "StoredHead | None" = None
) -> None:
    """Write a Hugging Face model directory or a PEFT adapter directory."""
    with full_parameters_on_main(b.model, b.world), b.world.sync_errors():
        if b.world.is_main:
            _save(config, b, final, head)


def _save(config: RunConfig, b: Build, final: Path, head: "StoredHead | None") -> None:
    if config.method.kind == "full":
        from whet.model_io.save import save

        save(b.model, b.tokenizer, final, classifier=head)
        return
    base = None
    if b.model.name is None:  # an adapter was merged into these weights, so they exist nowhere else
        from whet.model_io.save import save_base

        base = b.directory / BASE_DIRECTORY
        if not base.exists():
            save_base(b.model, b.tokenizer, base)
    save_adapter(b.model, final, tokenizer=b.tokenizer, base=base, classifier=head)


def use_fp8(model: LanguageModel, method: str, *, device: torch.device | None = None) -> str:
    """Use fp8 matmuls in the linear layers of all blocks while training.

    Args:
        model: The model to change.
        method: method.kind of the config, which must be "full".
        device: The device of the run, if it is not the model's.

    Returns:
        The number of layers that use fp8, as text.

    Raises:
        ConfigError: The method, the device or the model does not support fp8.
    """
    device = device or model.device
    if method != "full":
        raise ConfigError(
            f"run.fp8 needs method.kind full, not {method}",
            hint="set method.kind to full, or run.fp8 to false",
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"run.fp8: {name} does not support fp8 matmuls", hint="set run.fp8 to false")
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"run.fp8 is not supported on {device.type}", hint="set run.fp8 to false")
    layers = [module for block in model.blocks() for module in block.modules() if type(module) is Linear]
    fitting = [
        layer
        for layer in layers
        if not (layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE)
    ]
    if not fitting:
        raise ConfigError(
            f"run.fp8: no linear layer of this model has dimensions that are multiples of {FP8_MULTIPLE}",
            hint="set run.fp8 to false; only models with whet's native implementation support it",
        )
    for layer in fitting:
        layer.fp8 = True
    note = " (slow on a CPU, for testing only)" if device.type == "cpu" else ""
    return f"{len(fitting)} of {len(layers)} linear layers use fp8 matmuls in training{note}"
