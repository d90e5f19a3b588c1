"""Models and batches without numbers: what a config describes, on the meta device."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from whet.adapters.attach import make_trainable
from whet.adapters.nf4 import code_table
from whet.adapters.qlora import quantise_base
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.batches import Batch
from whet.error_boundary import wrong_input
from whet.errors import ConfigError, ModelError, blamed_on
from whet.hardware import Precision
from whet.model_io.config_json import read_config, read_spec
from whet.model_io.hub import config_directory
from whet.model_io.resolve import below_checkpoint
from whet.models import families
from whet.models.decoder import Decoder
from whet.models.from_scratch.new_model import new_spec
from whet.models.from_scratch.train_tokenizer import is_homemade
from whet.models.language_model import LanguageModel
from whet.models.spec import ModelSpec
from whet.models.transformers_bridge import Bridge
from whet.ops.grouped_experts import grouped_problem
from whet.planning.model_facts import weights_directory
from whet.recipes.recipe import UNTRAINED, ColumnShape, Frozen, Recipe
from whet.storage import read_json

META = torch.device("meta")
_BYTES = 256


def read_model(model: str | Preset) -> LanguageModel:
    """The model that a config names, on the meta device: from its config.json or its preset alone."""
    if isinstance(model, Preset):
        return from_spec(new_spec(model, tokens=_tokens(model)))
    if (below := below_checkpoint(model)) is not None:
        return read_model(below)
    directory = weights_directory(model, config_directory)
    config = read_config(directory)
    family = families.choose(config).family
    if family is None:
        return _bridged(directory, model)
    spec = read_spec(family, config, directory)
    with wrong_input(f"{directory / 'config.json'} cannot be understood"):
        return from_spec(spec)


def from_spec(spec: ModelSpec) -> LanguageModel:
    """The decoder of a description, on the meta device."""
    with META:
        return Decoder(spec)


def _tokens(preset: Preset) -> int:
    """How many tokens a preset's tokenizer has, without making one from texts."""
    kind, _, size = preset.tokenizer.partition(":")
    if kind == "bytes":
        return _BYTES
    if kind == "bpe" and size.isdecimal():
        return int(size)
    if preset.vocab_size is not None:
        return preset.vocab_size
    if is_homemade(preset.tokenizer):
        raise ConfigError(
            "model.tokenizer chars: how many tokens it has is known once the texts were read",
            hint="give model.vocab_size, too",
        )
    return int(read_json(config_directory(preset.tokenizer) / "config.json")["vocab_size"])


def _bridged(directory: Any, name: str) -> LanguageModel:  # Any: a path
    """A class of transformers without weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        text = config.get_text_config(decoder=True)
        with META:
            return Bridge(kind._from_config(text if kind.config_class is type(text) else config))
    except Exception as error:  # an unknown architecture may lead to any of them
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"transformers cannot build {name} from its config.json: {reason}") from error


def prepare(model: LanguageModel, config: RunConfig, precision: Precision) -> LanguageModel:
    """What a run makes of the model before it trains: dtypes, 4 bits, adapters."""
    method = config.method
    if method.kind == "qlora":
        quantise_base(model, device=META, dtype=precision.frozen)
    model.to(dtype=precision.trained if method.kind == "full" else precision.frozen)
    if method.variant == "pissa":  # the same tensors, but for a decomposition of weights that are not there
        method = method.model_copy(update={"variant": "lora"})
    make_trainable(model, method, dtype=precision.trained)
    model.grad_checkpoint = config.run.grad_checkpoint
    return model


def read_frozen_models(
    recipe: Recipe[Any],  # Any: its section
    precision: Precision,
) -> dict[str, Frozen]:
    """Return the frozen models of a run by role, on the meta device, as the run opens them."""
    config = recipe.config
    full = config.method.kind == "full"
    frozen: dict[str, Frozen] = {}
    for role, spec in recipe.frozen_models().items():
        if spec.name == UNTRAINED and spec.before_training:
            continue
        if spec.name == UNTRAINED and not full:
            frozen[role] = "adapters-off"
            continue
        dtype = precision.trained if spec.trained_dtype and full else precision.frozen
        name = config.language_model if spec.name == UNTRAINED else spec.name
        with blamed_on(spec.key):
            frozen[role] = read_model(name).to(dtype=dtype).requires_grad_(False).eval()
    return frozen


@dataclass(frozen=True)
class BatchShape:
    """A micro-batch: documents of one length, in one row or in a row each."""

    documents: int
    length: int
    packed: bool

    @property
    def positions(self) -> int:
        """All of them."""
        return self.documents * self.length


def make_fake_batch(
    shape: BatchShape, *, device: str, columns: Mapping[str, ColumnShape] = MappingProxyType({})
) -> Batch:
    """A batch of that shape, every position supervised; call it while tensors are fake."""
    in_one_row = shape.packed and shape.documents > 1 and device == "cpu"
    rows = 1 if in_one_row else shape.documents  # elsewhere packed documents take what rows of them do
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


def know_constants() -> None:
    """Make what is kept for the whole process while tensors are real: a fake one must not be kept."""
    cpu = torch.device("cpu")
    for kind in ("values", "scales"):
        code_table(kind, cpu)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grouped_problem("cpu", dtype, (16, 16))
