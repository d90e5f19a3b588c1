"""Read and write the files of a classifier next to its model: head, class weights and calibration."""

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
    """The classes of a classifier, and how it reads a text."""

    classes: list[str]
    multi_label: bool = False
    pooling: Pooling = "last"
    bias: bool = False
    max_length: int = 2048  # tokens; longer texts are truncated
    precision: PrecisionName = "auto"  # of the training


@dataclass(frozen=True)
class StoredHead:
    """A classification head and its classes, ready to be saved."""

    head: ClassificationHead
    info: ClassifierInfo

    def write(self, directory: Path) -> None:
        """Write classifier.json and classifier.safetensors."""
        write_json(directory / INFO, asdict(self.info))
        write_safetensors(directory / HEAD, dict(self.head.named_parameters()))

    def export_problem(self, model: LanguageModel) -> str | None:
        """Return why transformers cannot compute the same probabilities, or None if it can."""
        if self.head.pooling != "last":
            return f"it uses {self.head.pooling} pooling, but transformers' classifiers read the last token"
        if self.info.bias:
            return "its head has a bias, but those of transformers have none"
        return _class_problem(model)

    def tensors(self, model: LanguageModel) -> dict[str, torch.Tensor]:
        """Return the head under transformers' name, or {} if transformers would compute something else."""
        return {} if self.export_problem(model) else {SCORE: self.head.score.weight}

    def config(self, model: LanguageModel, tokenizer: Any) -> dict[str, Any]:  # Any: a tokenizer; JSON values
        """Return the config.json entries of a classifier, or {} if transformers cannot use its head."""
        if self.export_problem(model):
            return {}
        hf_config = model.hf_config()
        pad_token_id = next(
            (
                token_id
                for token_id in (hf_config.get("pad_token_id"), getattr(tokenizer, "pad_token_id", None))
                if token_id is not None
            ),
            getattr(tokenizer, "eos_token_id", None),
        )
        return {
            "architectures": [sequence_classifier(hf_config).__name__],
            "id2label": {str(index): name for index, name in enumerate(self.info.classes)},
            "label2id": {name: index for index, name in enumerate(self.info.classes)},
            "problem_type": f"{'multi' if self.info.multi_label else 'single'}_label_classification",
            "pad_token_id": pad_token_id,
        }


def sequence_classifier(config: dict[str, Any]) -> Any:  # Any: JSON values; a class of transformers
    """Return transformers' sequence classification class for this config, or None if there is none."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(CONFIG_MAPPING[kind], None)


def _class_problem(model: LanguageModel) -> str | None:
    """Return how the parameters of transformers' class, built without weights, differ from the model's."""
    from transformers import CONFIG_MAPPING

    config = model.hf_config()
    model_class = sequence_classifier(config)
    if model_class is None:
        return f"transformers has no classifier for models of the type {config.get('model_type')!r}"
    with torch.device("meta"):
        theirs = {
            name
            for name, _ in model_class(
                CONFIG_MAPPING[config["model_type"]].from_dict(config)
            ).named_parameters()
        }
    names = [name for name, _ in model.named_parameters()]
    names += [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, NF4Linear)]
    ours = {model.hf_name(name.replace(".base.", ".")) for name in names}
    if SCORE not in theirs or not (theirs - {SCORE}) <= ours | {SCORE}:
        missing = min(theirs - ours - {SCORE}, default=SCORE)
        return f"transformers' {model_class.__name__} has a different structure ({missing})"
    return None


def is_classifier(directory: str | Path) -> bool:
    """Return whether a directory contains a classifier."""
    return (Path(directory) / INFO).is_file()


def read_head(directory: Path) -> StoredHead:
    """Read the head from a classifier's directory."""
    check_links(directory)
    info = _info_from(read_json(directory / INFO), directory / INFO)
    return StoredHead(build_head(read_tensors(directory / HEAD), info, directory / HEAD), info)


def _info_from(fields: dict[str, Any], path: Path) -> ClassifierInfo:  # Any: JSON values, checked here
    try:
        info = ClassifierInfo(**fields)
    except TypeError as error:
        raise ModelError(f"{path} is invalid: {error}") from error
    is_valid = {
        "classes": isinstance(info.classes, list) and all(isinstance(name, str) for name in info.classes),
        "multi_label": isinstance(info.multi_label, bool),
        "pooling": info.pooling in get_args(Pooling),
        "bias": isinstance(info.bias, bool),
        "precision": info.precision in get_args(PrecisionName),
        "max_length": type(info.max_length) is int and info.max_length > 0,
    }
    if invalid := [name for name, valid in is_valid.items() if not valid]:
        raise ModelError(f"{path}: {invalid[0]} has the invalid value {str(fields[invalid[0]])[:40]!r}")
    return info


def build_head(tensors: dict[str, torch.Tensor], info: ClassifierInfo, path: Path) -> ClassificationHead:
    """Build a head from its weights, and raise ModelError if names or shapes do not match the classes."""
    weight = tensors.get(SCORE)
    shape = [len(info.classes), weight.shape[-1] if weight is not None and weight.ndim == 2 else -1]
    expected = {SCORE: shape} | ({"score.bias": shape[:1]} if info.bias else {})
    if {name: list(tensor.shape) for name, tensor in tensors.items()} != expected:
        raise ModelError(
            f"{path} is not a head for {len(info.classes)} classes: it contains {sorted(tensors)}"
        )
    head = ClassificationHead(shape[1], shape[0], pooling=info.pooling, bias=info.bias)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    return head


@dataclass(frozen=True)
class WeightedHead(StoredHead):
    """A head with the class weights of its training and its calibration."""

    class_weights: list[float]
    calibration: dict[str, float] | None = None

    def write(self, directory: Path) -> None:
        """Write the head's files, class_weights.json, and calibration.json if the head was calibrated."""
        super().write(directory)
        write_json(directory / CLASS_WEIGHTS, dict(zip(self.info.classes, self.class_weights, strict=True)))
        if self.calibration is not None:
            write_json(directory / CALIBRATION, self.calibration)


def read_class_weights(directory: Path, classes: list[str]) -> list[float] | None:
    """Read the class weights in the order of `classes`, or return None if they were not saved."""
    path = directory / CLASS_WEIGHTS
    if not path.is_file():
        return None
    weights = read_json(path)
    all_positive = all(type(weight) in (int, float) and weight > 0 for weight in weights.values())
    if set(weights) != set(classes) or not all_positive:
        raise ModelError(f"{path} does not contain a positive number for each of {len(classes)} classes")
    return [float(weights[name]) for name in classes]


def read_calibration(directory: Path) -> dict[str, Any] | None:  # Any: JSON values
    """Read the calibration of a head, or return None if it was not calibrated."""
    path = directory / CALIBRATION
    return read_json(path) if path.is_file() else None


def are_class_weights_counted(section: ClassifyObjective) -> bool:
    """Return whether class weights are computed from the training set, not given by the config alone."""
    if section.class_weights == "auto":
        return not (section.multi_label or section.oversample)
    return section.class_weights in ("inverse", "sqrt_inverse", "effective")
