"""The settings of a `whet.Classifier`: from a run, from a saved classifier, or from the caller."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from whet.config.load_config import load_config, to_dict, validate_config
from whet.config.method import Method
from whet.config.objectives.classify import ClassifyObjective
from whet.config.optim import Optim
from whet.config.run_config import RunConfig
from whet.config.section import PrecisionName
from whet.errors import ConfigError, ModelError
from whet.model_io.base_models import config_of_checkpoint, expand_user, local_model_directory
from whet.model_io.checkpoint_weights import read_checkpoint_weights
from whet.model_io.formats.classifier_head import (
    ClassifierInfo,
    StoredHead,
    build_head,
    is_classifier,
    read_class_weights,
    read_head,
)
from whet.models.heads import HEADS_PREFIX, ClassificationHead, ModelWithHeads
from whet.run_directory import CONFIG_FILE, FINAL_DIRECTORY, run_directory_of
from whet.storage import MANIFEST

_ORIGIN = "Classifier.load"  # named in messages
_UNUSED_SOURCE = "the caller's own"  # a placeholder for data.train, which is never opened


@dataclass(frozen=True)
class ClassifierSettings:
    """How a classifier computes and trains. The caller provides the data and decides how long to train."""

    base: str  # the model that the head is attached to
    objective: ClassifyObjective
    method: Method
    optim: Optim
    max_length: int
    pack: bool
    batch_tokens: int | None
    micro_batch_tokens: int | None
    seed: int
    device: str
    precision: PrecisionName
    on_nonfinite: Literal["stop", "skip"]
    nonfinite_limit: int

    @classmethod
    def from_config(cls, config: RunConfig, name: str | Path) -> "ClassifierSettings":
        """Return the settings of a run's config; `name` is the classifier's name, for messages."""
        if not isinstance(config.objective, ClassifyObjective):
            raise ModelError(
                f"{name} is not a classifier: its run has objective.kind: {config.objective.kind}"
            )
        run = config.run
        return cls(
            base=config.model if isinstance(config.model, str) else str(name),
            objective=config.objective,
            method=config.method,
            optim=config.optim,
            max_length=config.data.max_length,
            pack=config.data.pack,
            batch_tokens=run.batch_tokens,
            micro_batch_tokens=run.micro_batch_tokens,
            seed=run.seed,
            device=run.device,
            precision=run.precision,
            on_nonfinite=run.on_nonfinite,
            nonfinite_limit=run.nonfinite_limit,
        )

    @property
    def info(self) -> ClassifierInfo:
        """The description of the classifier that is saved with the head."""
        section = self.objective
        return ClassifierInfo(
            section.names,
            multi_label=section.multi_label,
            pooling=section.pooling,
            bias=section.bias,
            max_length=self.max_length,
            precision=self.precision,
        )

    def require_total_steps(self, total_steps: int | None) -> None:
        """Raise a ConfigError if the learning rate schedule needs the number of updates and it is missing."""
        kinds = [phase.kind for phase in self.optim.phases if phase.kind != "constant"]
        if kinds and total_steps is None:
            raise ConfigError(
                f"optim.schedule: {kinds[0]} needs the number of updates",
                hint="pass total_steps to Classifier.load, or use schedule: constant (with a warmup)",
            )

    def for_head_only(self, module: ModelWithHeads) -> "ClassifierSettings":
        """Return the settings without the learning rates of parameters that are no longer trainable.

        Args:
            module: The model and the head, after the adapters were merged.
        """
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        groups = self.optim.groups
        used = {next((pattern for pattern in groups if re.search(pattern, name)), None) for name in names}
        used_groups = {pattern: group for pattern, group in groups.items() if pattern in used}
        optim = self.optim.model_copy(update={"groups": used_groups, "router_lr_scale": None})
        return replace(self, optim=optim, method=self.method.model_copy(update={"lr_ratio": None}))


def new_settings(
    base: str,
    classes: Sequence[str] | int,
    *,
    method: Mapping[str, Any] | None,  # Any: as in a config, here and below
    optim: Mapping[str, Any] | None,
    max_length: int,
    seed: int,
    device: str | None,
    precision: str | None,
    objective: Mapping[str, Any],
) -> ClassifierSettings:
    """Return the validated settings of a new head on a model. See `Classifier.load` for the arguments."""
    _reject_run_only_keys(objective)
    if method is not None and method.get("continue"):
        raise ConfigError("method.continue is only supported in runs", hint="use whet.train")
    weights = objective.get("class_weights", "none")
    head = {**objective, "classes": classes, "class_weights": "none" if weights == "auto" else weights}
    return _validated(
        base,
        head,
        method=method or {},
        optim=optim or {},
        max_length=max_length,
        run={"seed": seed, "device": device or "auto", "precision": precision or "auto"},
    )


def _validated(
    base: str,
    objective: Mapping[str, Any],  # Any: as in a config, here and below
    *,
    method: Mapping[str, Any],
    optim: Mapping[str, Any],
    max_length: int,
    run: Mapping[str, Any],
) -> ClassifierSettings:
    """Return validated settings; the learning rate is constant unless `optim` has a schedule."""
    values = {
        "model": base,
        "method": dict(method),
        "objective": {"kind": "classify", **objective},
        "data": {"train": _UNUSED_SOURCE, "max_length": max_length},
        "optim": {"schedule": "constant", **optim},
        "run": {"steps": 1, "batch_size": 1, **run},
    }
    return ClassifierSettings.from_config(validate_config(values, origin=_ORIGIN), base)


def _reject_run_only_keys(objective: Mapping[str, Any]) -> None:  # Any: as in a config
    """Raise a ConfigError for keys of a new head that only have an effect in runs."""
    if objective.get("class_weights") in ("inverse", "sqrt_inverse", "effective"):
        raise ConfigError(
            f"class_weights: {objective['class_weights']} needs the class counts of a training set",
            hint="pass a list with one weight per class",
        )
    for key in ("oversample", "valid_share", "calibrate", "probe"):
        if objective.get(key):
            raise ConfigError(
                f"{key} is only supported in runs", hint="use whet.train with objective.kind: classify"
            )


def reject_new_head_keys(
    method: Mapping[str, Any] | None, objective: Mapping[str, Any]
) -> None:  # Any: as in a config
    """Raise a ConfigError for settings that a trained classifier already has and that would be ignored."""
    keys = [*(["method"] if method else []), *(key for key in objective if key != "class_weights")]
    if keys:
        raise ConfigError(
            f"{', '.join(keys)}: only supported for a new head", hint="pass classes, or leave it out"
        )


@dataclass(frozen=True)
class StoredClassifier:
    """A classifier on disk: `final/` of a run, a checkpoint of a run, or a saved classifier."""

    name: str | Path  # as the caller wrote it
    directory: Path  # with the weights
    is_checkpoint: bool

    @classmethod
    def find(cls, name_or_path: str | Path) -> "StoredClassifier":
        """Return the classifier of a name or path; raise a ModelError if that is not a classifier."""
        path = expand_user(name_or_path)
        if (path / MANIFEST).is_file():
            return cls(name_or_path, path, True)
        directory = Path(local_model_directory(name_or_path))
        if not is_classifier(directory):
            raise ModelError(
                f"{name_or_path} is not a classifier",
                hint="name a run with objective.kind: classify; in Python, Classifier.load(..., classes) "
                "attaches a new head to any model",
            )
        return cls(name_or_path, directory, False)

    @property
    def run(self) -> Path:
        """The run directory, if the classifier belongs to a run."""
        return run_directory_of(self.directory) if self.is_checkpoint else self.directory.parent

    @property
    def belongs_to_run(self) -> bool:
        """Whether the classifier is part of a run with a config."""
        return (self.run / CONFIG_FILE).is_file() and (
            self.is_checkpoint or self.directory.name == FINAL_DIRECTORY
        )

    def settings(
        self,
        *,
        optim: Mapping[str, Any] | None,  # Any: as in a config
        class_weights: Sequence[float] | None,
        device: str | None,
        precision: PrecisionName | None,
    ) -> ClassifierSettings:
        """Return the settings of the classifier.

        The learning rate is constant, and the class weights are the stored ones, unless the arguments replace
        them.
        """
        if self.belongs_to_run:
            overrides = []
            if class_weights is not None:
                overrides.append(f"objective.class_weights={json.dumps(class_weights)}")
            config = _with_constant_lr(load_config(self.run / CONFIG_FILE, overrides), optim)
            settings = ClassifierSettings.from_config(config, self.name)
        else:
            settings = self._saved_settings(optim, class_weights)
        if class_weights is None and not isinstance(settings.objective.class_weights, list):
            settings = replace(settings, objective=self._with_stored_weights(settings.objective))
        return replace(settings, device=device or settings.device, precision=precision or settings.precision)

    def _saved_settings(
        self,
        optim: Mapping[str, Any] | None,  # Any: as in a config
        class_weights: Sequence[float] | None,
    ) -> ClassifierSettings:
        """Return the settings of a classifier that does not belong to a run."""
        info = read_head(self.directory).info
        has_adapter = (self.directory / "adapter_config.json").is_file()
        return _validated(
            str(self.directory),
            {
                "classes": info.classes,
                "multi_label": info.multi_label,
                "pooling": info.pooling,
                "bias": info.bias,
                "class_weights": class_weights or "none",
            },
            method={} if has_adapter else {"kind": "full"},
            optim=optim or {},
            max_length=max(2, info.max_length),
            run={"precision": info.precision},
        )

    def _with_stored_weights(self, section: ClassifyObjective) -> ClassifyObjective:
        """Return the section with the class weights that are stored with the head, if there are any."""
        directory = self.run / FINAL_DIRECTORY if self.is_checkpoint else self.directory
        weights = read_class_weights(directory, section.names)
        return section if weights is None else section.model_copy(update={"class_weights": weights})

    def head(self, settings: ClassifierSettings) -> tuple[ClassificationHead, ClassifierInfo]:
        """Return the trained head, and the description of its classes."""
        if not self.is_checkpoint:
            stored = read_head(self.directory)
            return stored.head, stored.info
        weights = read_checkpoint_weights(self.directory)
        head_weights = {
            name.removeprefix(HEADS_PREFIX): t for name, t in weights.items() if name.startswith(HEADS_PREFIX)
        }
        return build_head(head_weights, settings.info, self.directory), settings.info


def trained_head(target: Path) -> StoredHead | None:
    """Return the trained head of an adapter directory or checkpoint, or None if it is not a classifier."""
    config = config_of_checkpoint(target)
    if config is None:
        return read_head(target) if is_classifier(target) else None
    if not isinstance(config.objective, ClassifyObjective):
        return None
    stored = StoredClassifier.find(target)
    settings = stored.settings(optim=None, class_weights=None, device=None, precision=None)
    return StoredHead(*stored.head(settings))


def _with_constant_lr(config: RunConfig, optim: Mapping[str, Any] | None) -> RunConfig:  # Any: as in a config
    """Return the config with a constant learning rate and the keys of `optim`, which may set a schedule."""
    constant = config.optim.model_copy(update={"schedule": "constant", "warmup": 0})
    config = config.model_copy(update={"optim": constant})
    if not optim:
        return config
    values = to_dict(config)
    return validate_config({**values, "optim": {**values["optim"], **optim}}, origin=_ORIGIN)
