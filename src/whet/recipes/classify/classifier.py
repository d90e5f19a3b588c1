"""`whet.Classifier`: a classifier to use, and to train step by step in a loop of one's own."""

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.adapters.adapter import adapted
from whet.adapters.attach import make_trainable, merge
from whet.adapters.layers.lora_linear import LoRALinear
from whet.config.load_config import make_config
from whet.config.objectives.classify import ClassifyObjective
from whet.config.run_config import RunConfig
from whet.data.batches import Batch, make_batch
from whet.data.class_labels import Labels
from whet.data.packing import StepSettings, split_step
from whet.data.sources.source import Record, Spec, checked, open_source
from whet.data.tokens.chat_template import Rendering
from whet.data.tokens.examples import Example
from whet.data.tokens.tokenize import Encoder
from whet.errors import ConfigError, DataError, ModelError, check_positive
from whet.evaluation.classifier_metrics import Report, sigmoid, softmax
from whet.hardware import choose_device, choose_precision
from whet.model_io.checkpoint_weights import checkpoint_weights
from whet.model_io.formats.adapter_files import save_adapter
from whet.model_io.formats.classifier_head import (
    ClassifierInfo,
    StoredHead,
    WeightedHead,
    are_counted,
    head_from,
    is_classifier,
    read_class_weights,
    read_head,
)
from whet.model_io.load import load_base, load_body, load_quantised
from whet.model_io.resolve import at_home, usable_directory
from whet.model_io.save import save
from whet.model_io.tokenizer import tokenizer_of
from whet.models.heads import HEADS, ClassificationHead, WithHeads
from whet.models.language_model import LanguageModel, evaluating
from whet.objectives.classify import Classify
from whet.parallel.gradient_sync import flat_gradients, set_flat_gradients
from whet.recipes.classify.calibration import rows_of
from whet.recipes.classify.classifier_config import (
    config_of,
    for_the_head,
    refuse_what_needs_a_new_head,
    refuse_what_needs_a_run,
    require_total_steps,
    with_constant_rate,
)
from whet.recipes.classify.classifier_report import info_of, report_on
from whet.run_directory import FINAL, run_of
from whet.storage import MANIFEST
from whet.training.callbacks import plain
from whet.training.loss import computed_loss, total_weights
from whet.training.trainer import Trainer

ClassifierText = str | Sequence[int]  # a text, or its token ids
ClassifierSample = tuple[ClassifierText, Any]  # Any: a class by name or number, or several


class Classifier:
    """A model with a head that says which class a text belongs to, or which classes."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer, or None: texts are then given as ids
        head: ClassificationHead,
        info: ClassifierInfo,
        config: RunConfig,
        *,
        total_steps: int | None = None,
    ) -> None:
        assert isinstance(config.objective, ClassifyObjective)
        section = config.objective
        weights = section.class_weights if isinstance(section.class_weights, list) else None
        self.model = model
        self.tokenizer = tokenizer
        self.info = info
        self.config = config
        self.labels = Labels(info.classes, multi_label=info.multi_label)
        self.objective = Classify(
            head.to(model.device),
            multi_label=info.multi_label,
            class_weights=weights,
            normalise=section.normalise,
            label_smoothing=section.label_smoothing,
            focal=section.focal,
        )
        self.precision = choose_precision(config.run.precision, model.device)
        self._encoder = None if tokenizer is None else Encoder(tokenizer)
        self._trainer: Trainer | None = None
        self._total_steps = total_steps or config.run.steps or 1
        self._steps = 0  # updates before the trainer was last made anew
        self._lr: float | None = None  # as set by hand
        self._waiting: list[Example] = []

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        classes: Sequence[str] | int | None = None,
        *,
        method: Mapping[str, Any] | None = None,  # Any: as in a config, here and below
        optim: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        max_length: int = 2048,
        seed: int = 0,
        device: str | None = None,
        precision: str | None = None,
        **objective: Any,
    ) -> "Classifier":
        """A finished run, one of its checkpoints or a saved classifier; or with `classes` a new head.

        A new head goes on any model that can be named; `method`, `optim` and the rest are sections and keys
        of a config, with a constant learning rate unless `optim` says otherwise. What was trained before
        resumes at its constant `optim.lr`, with the weights of classes that it had, or `class_weights`;
        `optim` changes other keys of it. `total_steps` is how many updates a schedule spans: any but
        `constant` needs it.
        """
        if total_steps is not None:
            check_positive(total_steps=total_steps)
        path = at_home(name_or_path)
        if classes is not None:
            refuse_what_needs_a_run(objective)
            if objective.get("class_weights") == "auto":
                objective["class_weights"] = "none"  # there is nothing to count
            values = {
                "model": str(name_or_path),
                "method": dict(method or {}),
                "objective": {"kind": "classify", "classes": classes, "class_weights": "none", **objective},
                "data": {"train": "the caller's own", "max_length": max_length},
                "optim": {"schedule": "constant", **(optim or {})},
                "run": {
                    "steps": 1,
                    "batch_size": 1,
                    "seed": seed,
                    "device": device or "auto",
                    "precision": precision or "auto",
                },
            }
            return cls._new(make_config(values, origin="Classifier.load"), total_steps)
        refuse_what_needs_a_new_head(method, objective)
        checkpointed = (path / MANIFEST).is_file()
        target = path if checkpointed else Path(usable_directory(name_or_path))
        if not checkpointed and not is_classifier(target):
            raise ModelError(
                f"{name_or_path} is not a classifier",
                hint="name a run with objective.kind: classify; in Python, Classifier.load(..., classes) "
                "puts a new head on any model",
            )
        run = run_of(path) if checkpointed else target.parent
        given = objective.get("class_weights")
        config = with_constant_rate(config_of(run, target, class_weights=given), optim)
        require_total_steps(config, total_steps)
        section = config.objective
        if not isinstance(section, ClassifyObjective):
            raise ModelError(f"{name_or_path} belongs to a run with objective.kind: {section.kind}")
        where = choose_device(device or config.run.device)
        numbers = choose_precision(precision or config.run.precision, where)
        dtype = numbers.trained if config.method.kind == "full" else numbers.frozen
        model, tokenizer = load_body(name_or_path, dtype=dtype, device=where)
        if checkpointed:
            info = info_of(config, max_length=config.data.max_length)
            stored = checkpoint_weights(path)
            own = {name.removeprefix(HEADS): t for name, t in stored.items() if name.startswith(HEADS)}
            head = head_from(own, info, path)
        else:
            head, info = (kept := read_head(target)).head, kept.info
        if given is None and not isinstance(section.class_weights, list):
            kept_in = run / FINAL if checkpointed else target
            weights = read_class_weights(kept_in, info.classes)
            section = section if weights is None else section.model_copy(update={"class_weights": weights})
        config = config.model_copy(update={"objective": section})
        if precision is not None:
            update = {"run": config.run.model_copy(update={"precision": precision})}
            config = config.model_copy(update=update)
            info = replace(info, precision=config.run.precision)
        return cls(model, tokenizer, head, info, config, total_steps=total_steps)

    @classmethod
    def _new(cls, config: RunConfig, total_steps: int | None) -> "Classifier":
        assert isinstance(config.model, str)
        require_total_steps(config, total_steps)
        where = choose_device(config.run.device)
        numbers = choose_precision(config.run.precision, where)
        torch.manual_seed(config.run.seed)
        if config.method.kind == "qlora":
            model = load_quantised(config.model, dtype=numbers.frozen, device=where)
        else:
            dtype = numbers.trained if config.method.kind == "full" else numbers.frozen
            model, _ = load_base(config.model, dtype=dtype, device=where)
        make_trainable(model, config.method, dtype=numbers.trained)
        info = info_of(config, max_length=min(config.data.max_length, model.max_positions))
        size = model.head().weight.shape[1]
        head = ClassificationHead(size, len(info.classes), pooling=info.pooling, bias=info.bias)
        head.initialise(config.run.seed)
        return cls(model, tokenizer_of(config.model), head, info, config, total_steps=total_steps)

    # --- training, step by step

    def train_step(self, text: ClassifierText, label: Any) -> dict[str, float]:  # Any: as in a Sample
        """One update from one text."""
        return self.train_batch([(text, label)])

    def train_batch(self, samples: Sequence[ClassifierSample]) -> dict[str, float]:
        """One update from some texts with their labels: loss, correct, total, and grad_norm before clipping.

        No sample is no update, and zeros.
        """
        self.accumulate(samples)
        return self.apply()

    def accumulate(self, samples: Sequence[ClassifierSample]) -> int:
        """Keep samples for the next update; returns how many it will have."""
        self._waiting += self._examples(samples)
        return len(self._waiting)

    def apply(self) -> dict[str, float]:
        """One update from everything that was accumulated, exactly as if it had come at once."""
        examples, self._waiting = self._waiting, []
        if not examples:
            return {"loss": 0.0, "correct": 0, "total": 0, "grad_norm": 0.0}
        found = self.trainer.step(self.batches(examples))
        return {
            "loss": found["loss"],
            "correct": round(found["accuracy"] * len(examples)),
            "total": len(examples),
            "grad_norm": found["grad_norm"],
        }

    def collect_gradients(
        self, samples: Sequence[ClassifierSample], *, total: float | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the gradients of some samples without an update, for workers that share a step.

        Args:
            samples: this worker's part of the step; it may be empty.
            total: what the summed loss is divided by. It defaults to the number of these samples. Workers
                give that of the whole step, so that their vectors and losses add up to those of the step.
                With `normalise: weights` it is the sum of the weights of the samples' classes.

        Returns:
            One float32 vector (adapters in the order of the layers, A before B, then the head's weight and
            bias), and the loss, correct and total of the samples.
        """
        if total is not None and not total > 0:
            raise ConfigError(f"total must be above 0, not {total}")
        parameters, examples = self.trainable_parameters(), self._examples(samples)
        if not examples:
            none = torch.zeros(self.num_trainable_parameters, device=self.model.device)
            return none, {"loss": 0.0, "correct": 0, "total": 0}
        batches = self.batches(examples)
        weights = total_weights(self.objective, batches)
        if total is not None:
            weights["loss"] = total
        sums = self.trainer.collect_gradients(batches, weights)
        vector = flat_gradients(parameters)
        self.trainer.optimizer.zero_grad(set_to_none=True)
        correct = round(sums["accuracy"].item() * len(examples))
        return vector, {"loss": sums["loss"].item(), "correct": correct, "total": len(examples)}

    def apply_gradients(self, vector: torch.Tensor) -> dict[str, float]:
        """Make one update from a vector of `collect_gradients`, or a sum of them: lr, and grad_norm."""
        trainer = self.trainer
        set_flat_gradients(self.trainable_parameters(), vector)
        return trainer.apply_gradients()

    @property
    def trainer(self) -> Trainer:
        """The trainer that makes the steps."""
        if self._trainer is None:
            section = self.config.objective
            assert isinstance(section, ClassifyObjective)
            if are_counted(section):
                raise ConfigError(
                    f"class_weights: {section.class_weights} was counted in a run, and what came of it was "
                    "not kept here",
                    hint="give a list to Classifier.load, a number for each class: class_weights=[...]",
                )
            self._trainer = Trainer(
                self.model,
                self.objective,
                (),
                self.config,
                total_steps=self._total_steps,
                precision=self.precision,
            )
            self._trainer.state.step = self._steps
            if (lr := self._lr) is not None:
                self._trainer.lr_at = lambda _: lr
        return self._trainer

    def batches(self, examples: Sequence[Example]) -> list[Batch]:
        """Examples as the micro-batches of one step."""
        settings = self._settings(examples)
        lengths = np.array([example.length for example in examples])
        rows = split_step(range(len(examples)), lengths, settings)
        return [make_batch([[examples[place] for place in row] for row in each]) for each in rows]

    def set_lr(self, lr: float) -> None:
        """Another learning rate, from the next update on."""
        self._lr = lr
        self.trainer.lr_at = lambda _: lr

    def optimizer_lr(self) -> float:
        """Return the learning rate of the next update."""
        return self.trainer.lr_at(self.trainer.state.step + 1)

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Adapters in the order of the layers, A before B, then the head's weight and bias."""
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [*own, *self.objective.head.parameters()]

    @property
    def num_trainable_parameters(self) -> int:
        """How many numbers train."""
        return sum(parameter.numel() for parameter in self.trainable_parameters())

    # --- use

    def logits(self, texts: Sequence[ClassifierText]) -> np.ndarray:
        """[texts, classes]."""
        if isinstance(texts, str):
            raise ConfigError("one text where a list of texts belongs", hint="write [text]")
        if not len(texts):
            return np.zeros((0, len(self.info.classes)), dtype=np.float32)
        return self._logits([self._read(text) for text in texts])

    def predict_proba(self, texts: Sequence[ClassifierText]) -> np.ndarray:
        """[texts, classes] probabilities; of several classes a text, each for itself."""
        return self._probabilities(self.logits(texts))

    def predict(self, texts: Sequence[ClassifierText]) -> list[Any]:
        """The name of the likeliest class of each text; of several a text, those above one half.

        Names are strings, also those of classes that have only a number.
        """
        return self.choose(self.predict_proba(texts))

    def choose(self, probabilities: np.ndarray) -> list[Any]:
        """Return what `predict` does, from the probabilities of `predict_proba`."""
        names = self.info.classes
        if self.info.multi_label:
            return [[names[index] for index in np.flatnonzero(row > 0.5)] for row in probabilities]
        return [names[index] for index in probabilities.argmax(1)] if len(probabilities) else []

    def forward_only(
        self, text: ClassifierText, label: Any
    ) -> tuple[float, Any]:  # Any: a ClassifierSample's; names of classes
        """Return the weighted loss of one sample and its predicted class, without a gradient or an update."""
        [batch] = self.batches([self._example(text, label)])
        with evaluating(self.model):
            result = computed_loss(
                self.model, self.objective, batch.to(self.model.device), precision=self.precision
            )
        assert result.outputs is not None
        logits = result.outputs.float().cpu().numpy()
        [predicted] = self.choose(self._probabilities(logits))
        return result.sums["loss"].item(), predicted

    def load_corpus(self, data: Spec | Path) -> list[ClassifierSample]:
        """Read the records of a source as in data.train: samples for `train_batch`, with checked labels."""
        samples: list[ClassifierSample] = []
        for record in open_source(str(data) if isinstance(data, Path) else data, form="classification"):
            self._judge(record)
            fields = record.fields
            samples.append((fields["input"], fields["labels"] if "labels" in fields else fields["label"]))
        return samples

    def evaluate(
        self,
        data: Spec | Path | Sequence[Mapping[str, Any]],  # Any: records are JSON objects
    ) -> Report:
        """The report on records: a source as in data.test, or a list of {input, label}."""
        examples = [self._judge(record) for record in _records(data)]
        labels = np.array([example.values for example in examples])
        started = time.perf_counter()
        logits = self._logits(examples)
        seconds = time.perf_counter() - started
        return report_on(logits, labels, self.info, examples, self.tokenizer, seconds=seconds)

    def merge_adapters(self) -> None:
        """Fold the adapters into the weights; after that only the head trains."""
        merge(self.model).requires_grad_(False)
        if self._trainer is not None:
            self._steps, self._trainer = self._trainer.state.step, None
        self.config = for_the_head(self.config, WithHeads(self.model, self.objective.head))

    def save(self, directory: str | Path) -> None:
        """Write what `load` reads: an adapter, or the whole model, and always the head."""
        section = self.config.objective
        assert isinstance(section, ClassifyObjective)
        stored = StoredHead(self.objective.head, self.info)
        if not are_counted(section):
            stored = WeightedHead(self.objective.head, self.info, self.objective.class_weights.tolist())
        if any(True for _ in adapted(self.model)):
            save_adapter(self.model, directory, tokenizer=self.tokenizer, classifier=stored)
        else:
            save(self.model, self.tokenizer, directory, classifier=stored)

    def summary(self) -> str:
        """Model, tokenizer, adapters, head and what trains, for a person."""
        head, layers = self.objective.head.score, list(adapted(self.model))
        settings = {layer.settings for _, layer in layers if isinstance(layer, LoRALinear)}
        ranks = "/".join(map(str, sorted({each.rank for each in settings})))
        alphas = "/".join(f"{alpha:g}" for alpha in sorted({each.alpha for each in settings}))
        vocabulary = "none" if self.tokenizer is None else f"{len(self.tokenizer):,} tokens"
        lora = f"{len(layers)} layers, rank {ranks}, alpha {alphas}" if layers else "none"
        head_size = sum(parameter.numel() for parameter in self.objective.head.parameters())
        kind = "any of them" if self.info.multi_label else "one of them"
        return "\n".join(
            [
                f"model      {self.model.name or 'merged'} on {self.model.device} ({self.precision.reason})",
                f"tokenizer  {vocabulary}",
                f"adapters   {lora}",
                f"head       {head.in_features} -> {head.out_features}, {self.info.pooling} token, {kind}: "
                + ", ".join(self.info.classes),
                f"trains     {self.num_trainable_parameters:,} parameters, {head_size:,} of them in the head",
            ]
        )

    # --- texts as examples

    def _settings(self, examples: Sequence[Example]) -> StepSettings:
        """Micro-batches as in the run, unless a text is longer than those."""
        run = self.config.run
        usual = StepSettings(
            None, run.batch_tokens, run.micro_batch_tokens, self.config.data.pack
        ).micro_tokens
        longest = max(example.length for example in examples)
        return StepSettings(None, None, max(usual, longest), self.config.data.pack)

    def _logits(self, examples: Sequence[Example]) -> np.ndarray:
        settings = self._settings(examples)
        return rows_of(self.objective.logits, self.model, examples, settings, precision=self.precision)

    def _probabilities(self, logits: np.ndarray) -> np.ndarray:
        return (sigmoid if self.info.multi_label else softmax)(logits)

    def _examples(self, samples: Sequence[ClassifierSample]) -> list[Example]:
        return [self._example(*_text_and_label(sample)) for sample in samples]

    def _example(self, text: ClassifierText, label: Any) -> Example:  # Any: as in a Sample
        given = plain(label)
        key = "labels" if isinstance(given, list) else "label"
        return self._judge(Record({"input": text, key: given}, "a sample"))

    def _judge(self, record: Record) -> Example:
        text = record.fields.get("input")
        if text is not None and not isinstance(text, str):  # token ids: the labels are those of any record
            record = checked(Record({**record.fields, "input": ""}, record.origin), "classification")
        else:
            record = record if record.shape else checked(record, "classification")
            text = record.fields["input"]
        try:
            return self._read(text, self.labels.values(record.fields), record.origin)
        except DataError as error:
            where = "" if error.message.startswith(record.origin) else f"{record.origin}: "
            raise DataError(f"{where}{error.message}", hint=error.hint) from None

    def _read(self, text: ClassifierText, values: tuple[float, ...] = (), origin: str = "a text") -> Example:
        if isinstance(text, str) and self._encoder is None:
            raise ConfigError("this model has no tokenizer", hint="give token ids instead of texts")
        if isinstance(text, str):
            assert self._encoder is not None
            whole = Rendering(text, [(0, len(text))], True, False, origin, judged=True)
            tokens = list(self._encoder.example(whole).tokens[:-1])
        else:
            tokens = self._ids(text, origin)
        if not tokens:
            raise DataError(f"{origin}: a text without a token cannot be classified")
        tokens = tokens[: min(self.info.max_length, self.model.max_positions)]
        ids = np.array([*tokens, tokens[-1]], dtype=np.int64)
        return Example(ids, np.ones(len(ids), dtype=bool), origin, values)

    def _ids(self, given: Sequence[int], origin: str) -> list[int]:
        try:
            ids = [operator.index(each) for each in given]
        except TypeError:
            raise DataError(f"{origin}: {str(given)[:50]} is neither a text nor its token ids") from None
        size = self.model.vocab_size
        if outside := [each for each in ids if not 0 <= each < size]:
            raise DataError(f"{origin}: the id {outside[0]} is outside the model's vocabulary of {size:,}")
        return ids


def _text_and_label(sample: Any) -> ClassifierSample:  # Any: whatever was given as one
    if not isinstance(sample, str | Mapping):
        try:
            text, label = sample
            return text, label
        except (TypeError, ValueError):
            pass
    raise DataError(f"a sample is (text, label), not {str(sample)[:50]!r}", hint="write [(text, label), ...]")


def _records(data: Spec | Path | Sequence[Any]) -> list[Record]:  # Any: records are JSON objects
    data = str(data) if isinstance(data, Path) else data
    if not len(data):
        raise DataError("there is no record to evaluate")
    if isinstance(data, str) or not isinstance(data[0], Mapping):
        return list(open_source(data, split="test", form="classification"))
    return [Record(dict(fields), f"record {number}") for number, fields in enumerate(data, start=1)]
