"""Models, objectives and batches without numbers: what a config describes, on the meta device."""

from dataclasses import dataclass
from typing import Any, assert_never

import torch

from whet.adapters.attach import make_trainable
from whet.adapters.nf4 import code_table
from whet.adapters.qlora import quantise_base
from whet.config.objectives.classify import ClassifyObjective
from whet.config.objectives.custom import CustomObjective
from whet.config.objectives.distill import DistillObjective
from whet.config.objectives.distrust import DistrustObjective
from whet.config.objectives.grpo import GRPOObjective
from whet.config.objectives.mix import MixObjective
from whet.config.objectives.mtp import MTPObjective
from whet.config.objectives.preference import PreferenceObjective
from whet.config.objectives.union import AnyObjective, SFTObjective
from whet.config.preset import Preset
from whet.config.quality import RegressionObjective
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
from whet.models.heads import ClassificationHead, pool
from whet.models.language_model import LanguageModel
from whet.models.mtp import block_of
from whet.models.spec import ModelSpec
from whet.models.transformers_bridge import Bridge
from whet.objectives.distill import Distillation
from whet.objectives.mtp import MultiTokenPrediction
from whet.objectives.objective import Loss, Objective
from whet.objectives.preference import Preference
from whet.objectives.sft import SFT
from whet.ops.grouped_experts import grouped_problem
from whet.ops.logprobs import token_logprobs
from whet.planning.model_facts import weights_directory
from whet.recipes.reference_model import frozen_key, named_models
from whet.storage import read_json

META = torch.device("meta")
_BYTES = 256
_TAUGHT = 64  # tokens of a stored teacher, where nothing says how many


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


def other_models(config: RunConfig, precision: Precision) -> list[LanguageModel]:
    """Frozen models beside the one that is trained: teachers, or a copy as the reference."""
    section, full = config.objective, config.method.kind == "full"
    names: list[str | Preset] = [*named_models(config)]
    if not names and full and _compares_online(section):
        names = [config.language_model]
    as_trained = full and not isinstance(section, DistillObjective)  # see load_reference
    dtype = precision.trained if as_trained else precision.frozen
    with blamed_on(frozen_key(section)):
        return [read_model(name).to(dtype=dtype).requires_grad_(False).eval() for name in names]


def _compares_online(section: AnyObjective | MixObjective | CustomObjective) -> bool:
    if isinstance(section, PreferenceObjective):
        return section.has_reference and section.reference == "online"
    return isinstance(section, GRPOObjective) and section.beta > 0


class Logprobs(Objective):
    """Log-probabilities of the supervised tokens: all that GRPO keeps for its gradient."""

    recomputes_logits = True

    def weights(self, batch: Batch) -> dict[str, float]:
        """Tokens."""
        return {"loss": float(batch.supervised)}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """Their sum."""
        logprobs = token_logprobs(model.states(batch), model.head(), batch.supervised_targets)
        return Loss({"loss": logprobs.sum()})


class Pooled(Objective):
    """A head on whole texts: all that a classifier keeps for its gradient."""

    reads_lm_head = False

    def __init__(self, head: ClassificationHead) -> None:
        self.head = head
        self.heads = head

    def weights(self, batch: Batch) -> dict[str, float]:
        """Texts."""
        return {"loss": float(len(batch.origins))}

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """The sum of the logits."""
        hidden = model.hidden(batch.tokens, batch.positions, batch.layout())
        pooled = pool(
            hidden,
            batch.supervised_positions,
            batch.examples,
            texts=len(batch.origins),
            pooling=self.head.pooling,
        )
        return Loss({"loss": self.head(pooled).sum()})


def make_objective(
    section: AnyObjective | CustomObjective,
    model: LanguageModel,
    others: list[LanguageModel],
    precision: Precision,
) -> Objective:
    """An objective that does to memory what the config's does, for a model on the meta device."""
    match section:
        case PreferenceObjective():
            reference: Any = None  # Any: a model or a word
            if section.has_reference and section.reference == "online":
                reference = others[0] if others else "adapters-off"
            return Preference(section.kind, beta=section.strength, reference=reference)
        case DistillObjective():
            weights = [weight for _, weight in section.teachers]
            return Distillation(
                list(zip(others, weights, strict=False)),
                temperature=section.temperature,
                alpha=section.alpha,
                divergence=section.divergence,
                taught=weights if section.offline else (),
            )
        case MTPObjective():
            found = MultiTokenPrediction(model, section.n_predict, section.weight, block_of(model, section))
            found.heads.to(precision.trained)
            return found
        case ClassifyObjective():
            size, classes = model.head().weight.shape[1], len(section.names or ()) or 2
            with META:
                return Pooled(ClassificationHead(size, classes, pooling=section.pooling))
        case GRPOObjective():
            return Logprobs()
        case SFTObjective() | DistrustObjective():
            return SFT()
        case RegressionObjective():
            raise ConfigError("objective.kind regression is not for language models")
        case CustomObjective():
            raise ConfigError(f"what objective.kind {section.kind} takes cannot be told before it runs")
    assert_never(section)


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


def make_fake_batch(shape: BatchShape, *, device: str, taught: int = 0) -> Batch:
    """A batch of that shape, every position supervised; call it while tensors are fake."""
    in_one_row = shape.packed and shape.documents > 1 and device == "cpu"
    rows = 1 if in_one_row else shape.documents  # elsewhere packed documents take what rows of them do
    places = torch.zeros(rows, shape.positions // rows, dtype=torch.long)
    chosen = torch.zeros(shape.positions, dtype=torch.long)
    batch = Batch(
        tokens=places,
        targets=places.clone(),
        positions=places.clone(),
        supervised_positions=chosen,
        documents=((shape.length,) * shape.documents,) if in_one_row else None,
        supervised=shape.positions,
        examples=chosen.clone(),
        real_tokens=shape.positions,
        origins=("",) * shape.documents,
    ).with_columns("document", values=torch.zeros(shape.documents, 1))
    if not taught:
        return batch
    return batch.with_columns(
        "token",
        taught_ids=torch.zeros(shape.positions, taught, _TAUGHT, dtype=torch.long),
        taught_logprobs=torch.zeros(shape.positions, taught, _TAUGHT + 1),
    )


def know_constants() -> None:
    """Make what is kept for the whole process while tensors are real: a fake one must not be kept."""
    cpu = torch.device("cpu")
    for kind in ("values", "scales"):
        code_table(kind, cpu)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grouped_problem("cpu", dtype, (16, 16))
