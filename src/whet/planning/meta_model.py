"""Models on the meta device, and batches of fake tensors, for plans and dry runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from whet.adapters.attach import make_trainable
from whet.adapters.nf4 import code_table
from whet.adapters.qlora import quantize_base
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.error_boundary import invalid_input_errors
from whet.errors import ConfigError, ModelError, prefix_errors
from whet.hardware import Precision
from whet.model_io.base_models import starting_model
from whet.model_io.config_json import read_config, read_spec
from whet.model_io.resolve_model import config_directory
from whet.models import families
from whet.models.decoder import Decoder
from whet.models.from_scratch.new_model import preset_model_spec
from whet.models.from_scratch.train_tokenizer import is_builtin_tokenizer
from whet.models.language_model import LanguageModel
from whet.models.spec import ModelSpec
from whet.models.transformers_bridge import Bridge
from whet.ops.grouped_experts import grouped_mm_problem
from whet.planning.model_facts import weights_directory
from whet.recipes.frozen_models import initial_model
from whet.recipes.recipe import INITIAL_MODEL, ColumnShape, Frozen, Recipe
from whet.storage import read_json

META = torch.device("meta")
_BYTE_VOCAB_SIZE = 256


def build_meta_model(model: str | Preset) -> LanguageModel:
    """Return a model on the meta device, built from its config.json or its preset without reading weights."""
    if isinstance(model, Preset):
        return build_meta_decoder(preset_model_spec(model, vocab_size=_vocab_size(model)))
    if (base := starting_model(model)) is not None:
        return build_meta_model(base)
    directory = weights_directory(model, config_directory)
    config = read_config(directory)
    family = families.choose_family(config).family
    if family is None:
        return _build_bridge(directory, model)
    spec = read_spec(family, config, directory)
    with invalid_input_errors(f"{directory / 'config.json'} does not describe a valid model"):
        return build_meta_decoder(spec)


def build_meta_decoder(spec: ModelSpec) -> LanguageModel:
    """Return a decoder on the meta device."""
    with META:
        return Decoder(spec)


def _vocab_size(preset: Preset) -> int:
    """Return the vocabulary size of a preset's tokenizer without training the tokenizer."""
    kind, _, size = preset.tokenizer.partition(":")
    if kind == "bytes":
        return _BYTE_VOCAB_SIZE
    if kind == "bpe" and size.isdecimal():
        return int(size)
    if preset.vocab_size is not None:
        return preset.vocab_size
    if is_builtin_tokenizer(preset.tokenizer):
        raise ConfigError(
            "model.tokenizer chars: its vocabulary size is not known before the training records are read",
            hint="set model.vocab_size, too",
        )
    return int(read_json(config_directory(preset.tokenizer) / "config.json")["vocab_size"])


def _build_bridge(directory: Any, name: str) -> LanguageModel:  # Any: a path
    """Return a transformers model on the meta device."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        text_config = config.get_text_config(decoder=True)
        uses_text_config = model_class.config_class is type(text_config)
        with META:
            return Bridge(model_class._from_config(text_config if uses_text_config else config))
    except Exception as error:  # transformers can raise anything for an unknown architecture
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"transformers cannot build {name} from its config.json: {reason}") from error


def prepare_for_training(model: LanguageModel, config: RunConfig, precision: Precision) -> LanguageModel:
    """Prepare a meta model for training as a run does: dtypes, quantization and adapters."""
    method = config.method
    if method.kind == "qlora":
        quantize_base(model, device=META, dtype=precision.frozen)
    model.to(dtype=precision.trained if method.kind == "full" else precision.frozen)
    if method.continues:
        from whet.model_io.continued_adapter import attach_continued

        attach_continued(model, config)
    if method.variant == "pissa":  # has the shapes of LoRA, but would decompose weights that have no values
        method = method.model_copy(update={"variant": "lora"})
    make_trainable(model, method, dtype=precision.trained)
    model.grad_checkpoint = config.run.grad_checkpoint
    return model


def read_frozen_models(
    recipe: Recipe[Any],  # Any: its section
    model: LanguageModel,
    precision: Precision,
) -> dict[str, Frozen]:
    """Return the frozen models of a run by role, on the meta device, with the dtypes that the run uses.

    Args:
        recipe: The recipe of the run.
        model: The model that the run trains, on the meta device.
        precision: The dtypes of the run.
    """
    config = recipe.config
    is_full = config.method.kind == "full"
    frozen: dict[str, Frozen] = {}
    for role, spec in recipe.frozen_models().items():
        if spec.name == INITIAL_MODEL and spec.before_training:
            continue
        if spec.name == INITIAL_MODEL and not is_full:
            frozen[role] = initial_model(model, config)
            continue
        dtype = precision.trained if spec.trained_dtype and is_full else precision.frozen
        name = config.language_model if spec.name == INITIAL_MODEL else spec.name
        with prefix_errors(spec.key):
            frozen[role] = build_meta_model(name).to(dtype=dtype).requires_grad_(False).eval()
    return frozen


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch: documents of equal length, packed in one row or one per row."""

    documents: int
    length: int
    packed: bool

    @property
    def positions(self) -> int:
        """The number of tokens in the micro-batch."""
        return self.documents * self.length


def make_fake_batch(
    shape: BatchShape, *, device: str, columns: Mapping[str, ColumnShape] = MappingProxyType({})
) -> Batch:
    """Return a batch with every position supervised. Call it inside a FakeTensorMode.

    Args:
        shape: The documents of the batch.
        device: The type of the planned device.
        columns: The shapes of the objective's columns.
    """
    in_one_row = shape.packed and shape.documents > 1 and device == "cpu"
    rows = 1 if in_one_row else shape.documents  # on GPUs packed documents need the memory of separate rows
    indices = torch.zeros(rows, shape.positions // rows, dtype=torch.long)
    supervised = torch.zeros(shape.positions, dtype=torch.long)
    batch = Batch(
        tokens=indices,
        targets=indices.clone(),
        positions=indices.clone(),
        supervised_positions=supervised,
        documents=((shape.length,) * shape.documents,) if in_one_row else None,
        supervised=shape.positions,
        examples=supervised.clone(),
        real_tokens=shape.positions,
        origins=("",) * shape.documents,
    )
    for name, column in columns.items():
        length = shape.positions if column.axis == "token" else shape.documents
        tensor = torch.zeros(length, *column.sizes, dtype=column.dtype)
        batch = batch.with_columns(column.axis, **{name: tensor})
    return batch


def fill_process_caches() -> None:
    """Create the tensors that are cached per process now, so that no fake tensor is cached later."""
    cpu = torch.device("cpu")
    for kind in ("values", "scales"):
        code_table(kind, cpu)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grouped_mm_problem("cpu", dtype, (16, 16))
