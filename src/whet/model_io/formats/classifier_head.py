"""A classifier on disk: its head, class weights and calibration beside its model."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from whet.adapters.nf4 import NF4Linear
from whet.config.objectives.classify import ClassifyObjective, Pooling
from whet.config.section import PrecisionName
from whet.errors import ModelError
from whet.model_io.file_checks import check_links
from whet.model_io.safetensors import read_tensors
from whet.models.heads import ClassificationHead
from whet.models.language_model import LanguageModel
from whet.storage import read_json, write_json, write_safetensors

INFO = "classifier.json"
HEAD = "classifier.safetensors"
SCORE = "score.weight"  # transformers' name for the head's matrix
CLASS_WEIGHTS = "class_weights.json"
CALIBRATION = "calibration.json"


@dataclass(frozen=True)
class ClassifierInfo:
    """How a classifier reads a text, and what its answers mean."""

    classes: list[str]
    multi_label: bool = False
    pooling: Pooling = "last"
    bias: bool = False
    max_length: int = 2048  # tokens, after which a text is cut
    precision: PrecisionName = "auto"  # it was trained in


@dataclass(frozen=True)
class StoredHead:
    """A head with what belongs to it."""

    head: ClassificationHead
    info: ClassifierInfo

    def write(self, directory: Path) -> None:
        """Write whet's own two files."""
        write_json(directory / INFO, asdict(self.info))
        write_safetensors(directory / HEAD, dict(self.head.named_parameters()))

    def unexportable(self, model: LanguageModel) -> str | None:
        """Why transformers' classifiers cannot compute the same; None where they can."""
        if self.head.pooling != "last":
            return (
                f"it pools the {self.head.pooling} of the tokens, and transformers' classifiers the last one"
            )
        if self.info.bias:
            return "its head has a bias, and those of transformers have none"
        return _class_problem(model)

    def tensors(self, model: LanguageModel) -> dict[str, torch.Tensor]:
        """The head as transformers names it; nothing where its classes would compute something else."""
        return {} if self.unexportable(model) else {SCORE: self.head.score.weight}

    def config(self, model: LanguageModel, tokenizer: Any) -> dict[str, Any]:  # Any: a tokenizer; JSON values
        """What of config.json is a classifier's own."""
        if self.unexportable(model):
            return {}
        hf = model.hf_config()
        pad = next(
            (
                each
                for each in (hf.get("pad_token_id"), getattr(tokenizer, "pad_token_id", None))
                if each is not None
            ),
            getattr(tokenizer, "eos_token_id", None),
        )
        return {
            "architectures": [sequence_classifier(hf).__name__],
            "id2label": {str(number): name for number, name in enumerate(self.info.classes)},
            "label2id": {name: number for number, name in enumerate(self.info.classes)},
            "problem_type": f"{'multi' if self.info.multi_label else 'single'}_label_classification",
            "pad_token_id": pad,
        }


def sequence_classifier(config: dict[str, Any]) -> Any:  # Any: JSON values; a class of transformers
    """The class of transformers that classifies with models of this config; None where there is none."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(CONFIG_MAPPING[kind], None)


def _class_problem(model: LanguageModel) -> str | None:
    """Compare the names of transformers' class, built without weights, with the model's own."""
    from transformers import CONFIG_MAPPING

    config = model.hf_config()
    found = sequence_classifier(config)
    if found is None:
        return f"transformers has no classifier for models of the type {config.get('model_type')!r}"
    with torch.device("meta"):
        theirs = {
            name
            for name, _ in found(CONFIG_MAPPING[config["model_type"]].from_dict(config)).named_parameters()
        }
    own = [name for name, _ in model.named_parameters()]
    own += [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, NF4Linear)]
    ours = {model.hf_name(name.replace(".base.", ".")) for name in own}
    if SCORE not in theirs or not (theirs - {SCORE}) <= ours | {SCORE}:
        missing = min(theirs - ours - {SCORE}, default=SCORE)
        return f"{found.__name__} of transformers is built otherwise ({missing})"
    return None


def is_classifier(directory: str | Path) -> bool:
    """Whether a directory holds a classifier."""
    return (Path(directory) / INFO).is_file()


def read_head(directory: Path) -> StoredHead:
    """The head in a classifier's directory."""
    check_links(directory)
    info = _info_from(read_json(directory / INFO), directory / INFO)
    return StoredHead(head_from(read_tensors(directory / HEAD), info, directory / HEAD), info)


def _info_from(fields: dict[str, Any], path: Path) -> ClassifierInfo:  # Any: JSON values, checked here
    try:
        info = ClassifierInfo(**fields)
    except TypeError as error:
        raise ModelError(f"{path} cannot be understood: {error}") from error
    good = {
        "classes": isinstance(info.classes, list) and all(isinstance(name, str) for name in info.classes),
        "multi_label": isinstance(info.multi_label, bool),
        "pooling": info.pooling in get_args(Pooling),
        "bias": isinstance(info.bias, bool),
        "precision": info.precision in get_args(PrecisionName),
        "max_length": type(info.max_length) is int and info.max_length > 0,
    }
    if wrong := [name for name, holds in good.items() if not holds]:
        raise ModelError(f"{path}: {wrong[0]} cannot be {str(fields[wrong[0]])[:40]!r}")
    return info


def head_from(tensors: dict[str, torch.Tensor], info: ClassifierInfo, path: Path) -> ClassificationHead:
    """A head with these weights, which must be all of them, in the shape that the classes ask for."""
    weight = tensors.get(SCORE)
    shape = [len(info.classes), weight.shape[-1] if weight is not None and weight.ndim == 2 else -1]
    wanted = {SCORE: shape} | ({"score.bias": shape[:1]} if info.bias else {})
    if {name: list(tensor.shape) for name, tensor in tensors.items()} != wanted:
        raise ModelError(f"{path} is not a head of {len(info.classes)} classes: it holds {sorted(tensors)}")
    head = ClassificationHead(shape[1], shape[0], pooling=info.pooling, bias=info.bias)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    return head


@dataclass(frozen=True)
class WeightedHead(StoredHead):
    """A head, what each of its classes counted when it was trained, and how it was calibrated."""

    class_weights: list[float]
    calibration: dict[str, float] | None = None

    def write(self, directory: Path) -> None:
        """Write the head's files, the weights by the names of the classes, and the temperature if any."""
        super().write(directory)
        write_json(directory / CLASS_WEIGHTS, dict(zip(self.info.classes, self.class_weights, strict=True)))
        if self.calibration is not None:
            write_json(directory / CALIBRATION, self.calibration)


def read_class_weights(directory: Path, classes: list[str]) -> list[float] | None:
    """What each class counted; None where it was not kept."""
    path = directory / CLASS_WEIGHTS
    if not path.is_file():
        return None
    found = read_json(path)
    good = all(type(weight) in (int, float) and weight > 0 for weight in found.values())
    if set(found) != set(classes) or not good:
        raise ModelError(f"{path} does not hold a number above 0 for each of {len(classes)} classes")
    return [float(found[name]) for name in classes]


def read_calibration(directory: Path) -> dict[str, Any] | None:  # Any: JSON values
    """The temperature that a head was divided by; None where it was not calibrated."""
    path = directory / CALIBRATION
    return read_json(path) if path.is_file() else None


def are_counted(section: ClassifyObjective) -> bool:
    """Whether the weights are those of a training set, and so not to be told from the config alone."""
    if section.class_weights == "auto":
        return not (section.multi_label or section.oversample)
    return section.class_weights in ("inverse", "sqrt_inverse", "effective")
