"""`whet.Classifier`: load, use and save a classifier, and train it in a custom training loop."""

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.adapters.adapter import named_adapters
from whet.adapters.attach import make_trainable
from whet.adapters.layers.lora_linear import LoRALinear
from whet.adapters.merge import merge
from whet.config.run_config import optim_groups
from whet.config.section import PrecisionName
from whet.data.batches import Batch, make_batch
from whet.data.class_labels import ClassLabels
from whet.data.packing import StepSettings, split_step
from whet.data.sources.source import Record, SourceSpec, open_source, validate_record
from whet.data.tokens.examples import Example
from whet.data.tokens.rendering import Rendering
from whet.data.tokens.tokenize import Encoder
from whet.errors import ConfigError, DataError, check_positive
from whet.evaluation.classifier_metrics import Report, sigmoid, softmax
from whet.hardware import choose_device, choose_precision
from whet.model_io.formats.adapter_files import save_adapter
from whet.model_io.formats.classifier_head import (
    ClassifierInfo,
    StoredHead,
    WeightedHead,
    are_class_weights_counted,
)
from whet.model_io.load import load_base, load_quantized, load_without_head
from whet.model_io.save import save
from whet.model_io.tokenizer import load_model_tokenizer
from whet.models.heads import ClassificationHead, ModelWithHeads
from whet.models.language_model import LanguageModel, eval_mode
from whet.objectives.classify import Classify
from whet.parallel.gradient_sync import flat_gradients, set_flat_gradients
from whet.recipes.classify.calibration import compute_outputs
from whet.recipes.classify.classifier_config import (
    ClassifierSettings,
    StoredClassifier,
    new_settings,
    reject_new_head_keys,
)
from whet.recipes.classify.classifier_report import classification_report
from whet.training.callbacks import to_python
from whet.training.loss import compute_loss, evaluate_loss, total_weights
from whet.training.optim.lr_schedules import create_schedule
from whet.training.optim.optimizers import create_optimizer
from whet.training.settings import TrainSettings
from whet.training.trainer import Trainer

ClassifierText = str | Sequence[int]  # a text, or its token ids
ClassifierSample = tuple[ClassifierText, Any]  # Any: a class by name or index, or a list of classes


class Classifier:
    """A language model with a classification head.

    `Classifier.load` opens a trained classifier, or creates a new one.

    Samples are (text, label) pairs. A text is a string, or a sequence of token ids. A label is the name or
    the index of a class. With `multi_label` it is a list of classes, or a list of one probability per class.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer; None if texts are always token ids
        head: ClassificationHead,
        info: ClassifierInfo,
        settings: ClassifierSettings,
        *,
        total_steps: int | None = None,
    ) -> None:
        section = settings.objective
        weights = section.class_weights if isinstance(section.class_weights, list) else None
        self.model = model
        self.tokenizer = tokenizer
        self.info = info
        self.settings = settings
        self.labels = ClassLabels(info.classes, multi_label=info.multi_label)
        self.objective = Classify(
            head.to(model.device),
            multi_label=info.multi_label,
            class_weights=weights,
            normalise=section.normalise,
            label_smoothing=section.label_smoothing,
            focal=section.focal,
        )
        self.precision = choose_precision(settings.precision, model.device)
        self._encoder = None if tokenizer is None else Encoder(tokenizer)
        self._trainer: Trainer | None = None
        self._total_steps = total_steps or 1
        self._steps = 0  # updates before the current trainer was created
        self._lr: float | None = None  # set by `set_lr`
        self._accumulated: list[Example] = []
        self._samples_seen = 0

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
        precision: PrecisionName | None = None,
        **objective: Any,
    ) -> "Classifier":
        """Load a trained classifier, or attach a new head to a model if `classes` is given.

        A trained classifier can be trained further. It keeps its class weights, and its learning rate is the
        constant `optim.lr` of its run.

        Args:
            name_or_path: A finished run, one of its checkpoints, or a saved classifier. With `classes`, any
                model: a name, a directory or a run.
            classes: The names of the classes of a new head, or their number.
            method: The `method` section of a config, for a new head.
            optim: Keys of the `optim` section. The schedule is constant unless it is set here.
            total_steps: The length of the learning rate schedule in updates. Required for every schedule
                except `constant`.
            max_length: The number of tokens to which a new head truncates texts.
            seed: The seed of a new head and its adapters.
            device: The device, as in run.device.
            precision: The precision, as in run.precision.
            **objective: Further keys of the `objective` section for a new head. `class_weights` is also
                accepted for a trained classifier.

        Returns:
            The classifier, ready to predict and to train.

        Raises:
            WhetError: The classifier or model does not exist, or a setting is invalid or would be ignored.
        """
        if total_steps is not None:
            check_positive(total_steps=total_steps)
        if classes is not None:
            settings = new_settings(
                str(name_or_path),
                classes,
                method=method,
                optim=optim,
                max_length=max_length,
                seed=seed,
                device=device,
                precision=precision,
                objective=objective,
            )
            settings.require_total_steps(total_steps)
            return cls._with_new_head(settings, total_steps)
        reject_new_head_keys(method, objective)
        stored = StoredClassifier.find(name_or_path)
        weights = objective.get("class_weights")
        settings = stored.settings(optim=optim, class_weights=weights, device=device, precision=precision)
        settings.require_total_steps(total_steps)
        torch_device = choose_device(settings.device)
        model, tokenizer = load_without_head(
            name_or_path, dtype=_dtype(settings, torch_device), device=torch_device
        )
        head, info = stored.head(settings)
        if precision is not None:
            info = replace(info, precision=settings.precision)
        return cls(model, tokenizer, head, info, settings, total_steps=total_steps)

    @classmethod
    def _with_new_head(cls, settings: ClassifierSettings, total_steps: int | None) -> "Classifier":
        device = choose_device(settings.device)
        dtype = _dtype(settings, device)
        torch.manual_seed(settings.seed)
        if settings.method.kind == "qlora":
            model = load_quantized(settings.base, dtype=dtype, device=device)
        else:
            model, _ = load_base(settings.base, dtype=dtype, device=device)
        trained_dtype = choose_precision(settings.precision, device).trained
        make_trainable(model, settings.method, dtype=trained_dtype)
        info = replace(settings.info, max_length=min(settings.max_length, model.max_positions))
        size = model.head().weight.shape[1]
        head = ClassificationHead(size, len(info.classes), pooling=info.pooling, bias=info.bias)
        head.initialise(settings.seed)
        return cls(model, load_model_tokenizer(settings.base), head, info, settings, total_steps=total_steps)

    # --- training
    def train_step(self, text: ClassifierText, label: Any) -> dict[str, float]:  # Any: as in a Sample
        """Apply one optimizer update for one sample.

        Args:
            text: A string or token ids.
            label: The class or classes of the text.

        Returns:
            The same metrics as `train_batch`.
        """
        return self.train_batch([(text, label)])

    def train_batch(self, samples: Sequence[ClassifierSample]) -> dict[str, float]:
        """Apply one optimizer update for a batch of samples.

        Args:
            samples: (text, label) pairs. An empty batch applies no update and returns zeros.

        Returns:
            The loss of the samples, how many of them were predicted correctly (`correct`), their number
            (`total`), and the gradient norm before clipping (`grad_norm`).
        """
        self.accumulate(samples)
        return self.apply()

    def accumulate(self, samples: Sequence[ClassifierSample]) -> int:
        """Collect samples for the next `apply`, and return how many are collected so far."""
        self._accumulated += self._examples(samples)
        return len(self._accumulated)

    def apply(self) -> dict[str, float]:
        """Apply one optimizer update for all accumulated samples.

        The update equals that of one `train_batch` call with all of these samples.
        """
        examples, self._accumulated = self._accumulated, []
        if not examples:
            return {"loss": 0.0, "correct": 0, "total": 0, "grad_norm": 0.0}
        metrics = self.trainer.step(self.batches(examples))
        self._samples_seen += len(examples)
        return {
            "loss": metrics["loss"],
            "correct": round(metrics["accuracy"] * len(examples)),
            "total": len(examples),
            "grad_norm": metrics["grad_norm"],
        }

    def gradients(self, samples: Sequence[ClassifierSample]) -> tuple[torch.Tensor, float]:
        """Compute the gradient of the summed loss of some samples, without an update.

        For data parallelism, sum both results over all processes (an all-reduce), and pass the sums to
        `apply_gradients`.

        Args:
            samples: This process's share of the step, which may be empty.

        Returns:
            The gradient as a 1-D float32 tensor on the model's device, in the order of
            `trainable_parameters`, and the number of samples. With `normalise: weights` the second value is
            the sum of the samples' class weights, over which the loss is then averaged.
        """
        examples = self._examples(samples)
        if not examples:
            return self._zero_gradient(), 0.0
        batches = self.batches(examples)
        weights = total_weights(self.objective, batches)
        flat, _ = self._flat_gradients(batches, {**weights, "loss": 1.0})
        return flat, weights["loss"]

    def collect_gradients(
        self, samples: Sequence[ClassifierSample], *, total: float | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the gradient of the mean loss of some samples, without an update.

        Use this if the number of samples in the step is known in advance; `gradients` does not need it.

        Args:
            samples: This worker's share of the step, which may be empty.
            total: The divisor of the summed loss; by default, the number of these samples. Workers pass the
                number of samples in the step, so that the sums of their gradients and losses are those of
                the step. With `normalise: weights`, pass the sum of the samples' class weights.

        Returns:
            The gradient as a 1-D float32 tensor, in the order of `trainable_parameters`, and the loss,
            correct and total of the samples.

        Raises:
            ConfigError: `total` is not above 0.
        """
        if total is not None and not total > 0:
            raise ConfigError(f"total must be above 0, not {total}")
        examples = self._examples(samples)
        if not examples:
            return self._zero_gradient(), {"loss": 0.0, "correct": 0, "total": 0}
        batches = self.batches(examples)
        weights = total_weights(self.objective, batches)
        if total is not None:
            weights["loss"] = total
        flat, sums = self._flat_gradients(batches, weights)
        correct = round(sums["accuracy"].item() * len(examples))
        return flat, {"loss": sums["loss"].item(), "correct": correct, "total": len(examples)}

    def _flat_gradients(
        self, batches: list[Batch], weights: dict[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sums = self.trainer.collect_gradients(batches, weights)
        flat = flat_gradients(self.trainable_parameters())
        self.trainer.optimizer.zero_grad(set_to_none=True)
        return flat, sums

    def _zero_gradient(self) -> torch.Tensor:
        return torch.zeros(self.num_trainable_parameters, device=self.model.device)

    def apply_gradients(self, flat: torch.Tensor | np.ndarray, n: float | None = None) -> dict[str, float]:
        """Clip a flat gradient, and apply one optimizer update at the scheduled learning rate.

        Args:
            flat: The sum over all processes of the gradients from `gradients` or `collect_gradients`.
            n: The sum over all processes of the second result of `gradients`, by which `flat` is divided.
                Leave it out for gradients from `collect_gradients`, which are divided already.

        Returns:
            The learning rate (`lr`), and the gradient norm before clipping (`grad_norm`).

        Raises:
            RunError: The gradient has the wrong size or is not finite. The weights are unchanged.
            ConfigError: `n` is not above 0.
        """
        if n is not None and not n > 0:
            raise ConfigError(f"n must be above 0, not {n}", hint="skip the update of a step without samples")
        trainer = self.trainer
        vector = torch.as_tensor(flat)
        set_flat_gradients(self.trainable_parameters(), vector if n is None else vector / n)
        metrics = trainer.apply_gradients()
        if n is not None and self.objective.normalise == "samples":
            self._samples_seen += round(n)
        return metrics

    @property
    def trainer(self) -> Trainer:
        """The `Trainer` that applies the updates, created on first use."""
        if self._trainer is None:
            section = self.settings.objective
            if are_class_weights_counted(section):
                raise ConfigError(
                    f"class_weights: {section.class_weights} was computed from a run's training set, and the "
                    "weights are not stored with this classifier",
                    hint="pass a list with one weight per class to Classifier.load: class_weights=[...]",
                )
            settings = self.settings
            module = ModelWithHeads(self.model, self.objective.head)
            self._trainer = Trainer(
                self.model,
                self.objective,
                (),
                optimizer=create_optimizer(optim_groups(settings.optim, settings.method), module),
                schedule=create_schedule(settings.optim, self._total_steps),
                total_steps=self._total_steps,
                precision=self.precision,
                settings=TrainSettings(
                    clip=settings.optim.clip,
                    on_nonfinite=settings.on_nonfinite,
                    nonfinite_limit=settings.nonfinite_limit,
                    freeze_pad_row=settings.optim.freeze_pad_row,
                ),
            )
            self._trainer.state.step = self._steps
            if (lr := self._lr) is not None:
                self._trainer.lr_at = lambda _: lr
        return self._trainer

    def batches(self, examples: Sequence[Example]) -> list[Batch]:
        """Return the micro-batches of one step with these examples."""
        settings = self._step_settings(examples)
        lengths = np.array([example.length for example in examples])
        micro_batches = split_step(range(len(examples)), lengths, settings)
        return [make_batch([[examples[index] for index in row] for row in rows]) for rows in micro_batches]

    def set_lr(self, lr: float) -> None:
        """Set a constant learning rate for all further updates."""
        self._lr = lr
        self.trainer.lr_at = lambda _: lr

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.trainer.lr_at(self.trainer.state.step + 1)

    def optimizer_lr(self) -> float:
        """Return the learning rate of the next update, like the property `learning_rate`."""
        return self.learning_rate

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Return the trainable parameters in a fixed order.

        Adapters come in the order of the layers, A before B, then the head's weight and bias.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [*parameters, *self.objective.head.parameters()]

    @property
    def num_trainable_parameters(self) -> int:
        """The number of trainable values, that is, the length of a flat gradient."""
        return sum(parameter.numel() for parameter in self.trainable_parameters())

    # --- prediction and evaluation
    def logits(self, texts: Sequence[ClassifierText]) -> np.ndarray:
        """Return the logits of the classes as a float32 array, [texts, classes]."""
        if isinstance(texts, str):
            raise ConfigError("texts must be a list of texts, not a single text", hint="write [text]")
        if not len(texts):
            return np.zeros((0, len(self.info.classes)), dtype=np.float32)
        return self._logits([self._encode(text) for text in texts])

    def predict_proba(self, texts: Sequence[ClassifierText]) -> np.ndarray:
        """Return the probabilities of the classes, [texts, classes].

        They are a softmax over the classes, or with `multi_label` an independent sigmoid per class.
        """
        return self._probabilities(self.logits(texts))

    def predict(self, texts: Sequence[ClassifierText]) -> list[Any]:
        """Return the most probable class of each text, by name.

        With `multi_label`, return for each text the list of classes with a probability above 0.5. Names are
        strings, even if the classes were given as a number.
        """
        return self.choose(self.predict_proba(texts))

    def choose(self, probabilities: np.ndarray) -> list[Any]:
        """Return the predictions of `predict` for probabilities from `predict_proba`."""
        names = self.info.classes
        if self.info.multi_label:
            return [[names[index] for index in np.flatnonzero(row > 0.5)] for row in probabilities]
        return [names[index] for index in probabilities.argmax(1)] if len(probabilities) else []

    def loss(self, samples: Sequence[ClassifierSample]) -> float:
        """Return the loss of some samples in evaluation mode, with the class weights of training."""
        if not len(samples):
            raise DataError("cannot compute the loss of an empty list of samples")
        batches = self.batches(self._examples(samples))
        return evaluate_loss(self.model, self.objective, batches, precision=self.precision)["eval_loss"]

    def forward_only(
        self, text: ClassifierText, label: Any
    ) -> tuple[float, Any]:  # Any: a ClassifierSample's; names of classes
        """Return the weighted loss of one sample and its predicted class, without computing a gradient."""
        [batch] = self.batches([self._example(text, label)])
        with eval_mode(self.model):
            result = compute_loss(
                self.model, self.objective, batch.to(self.model.device), precision=self.precision
            )
        assert result.outputs is not None
        logits = result.outputs.float().cpu().numpy()
        [predicted] = self.choose(self._probabilities(logits))
        return result.sums["loss"].item(), predicted

    def load_corpus(self, data: SourceSpec | Path) -> list[ClassifierSample]:
        """Read labeled records as samples for `train_batch`.

        Args:
            data: A source as in data.train, such as a JSONL file of {input, label} or {input, labels}.

        Returns:
            (text, label) pairs, in the order of the records.

        Raises:
            DataError: A record is invalid, or its label is not one of the classes. The message has the file
                and the line.
        """
        samples: list[ClassifierSample] = []
        for record in open_source(str(data) if isinstance(data, Path) else data, form="classification"):
            self._record_example(record)
            fields = record.fields
            samples.append((fields["input"], fields["labels"] if "labels" in fields else fields["label"]))
        return samples

    def evaluate(
        self,
        data: SourceSpec | Path | Sequence[Mapping[str, Any]],  # Any: records are JSON objects
    ) -> Report:
        """Return the classification report of labeled records, as `whet eval` shows it.

        Args:
            data: A source as in data.test, or a list of {input, label}.

        Returns:
            Accuracy, F1, calibration error, confusions and more.
        """
        examples = [self._record_example(record) for record in _records(data)]
        labels = np.array([example.values for example in examples])
        started = time.perf_counter()
        logits = self._logits(examples)
        seconds = time.perf_counter() - started
        return classification_report(logits, labels, self.info, examples, self.tokenizer, seconds=seconds)

    def merge_adapters(self) -> None:
        """Merge the adapters into the weights. From then on only the head is trainable."""
        merge(self.model).requires_grad_(False)
        if self._trainer is not None:
            self._steps, self._trainer = self._trainer.state.step, None
        self.settings = self.settings.for_head_only(ModelWithHeads(self.model, self.objective.head))

    def save(self, directory: str | Path) -> None:
        """Write the adapter or the full model, and the head, to a directory that `load` can read."""
        stored = StoredHead(self.objective.head, self.info)
        if not are_class_weights_counted(self.settings.objective):
            stored = WeightedHead(self.objective.head, self.info, self.objective.class_weights.tolist())
        if any(True for _ in named_adapters(self.model)):
            save_adapter(self.model, directory, tokenizer=self.tokenizer, classifier=stored)
        else:
            save(self.model, self.tokenizer, directory, classifier=stored)

    def counts(self) -> dict[str, int]:
        """Return the numbers of parameters, classes, updates and samples.

        The keys are parameters, trained_parameters, head_parameters, classes, steps (updates since `load`)
        and samples_seen (the samples in those updates).
        """
        head = sum(parameter.numel() for parameter in self.objective.head.parameters())
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()) + head,
            "trained_parameters": self.num_trainable_parameters,
            "head_parameters": head,
            "classes": len(self.info.classes),
            "steps": self._steps if self._trainer is None else self._trainer.state.step,
            "samples_seen": self._samples_seen,
        }

    def summary(self) -> str:
        """Return a human-readable description of the model, tokenizer, adapters, head and `counts`."""
        head, layers = self.objective.head.score, list(named_adapters(self.model))
        lora = [layer.settings for _, layer in layers if isinstance(layer, LoRALinear)]
        ranks = "/".join(map(str, sorted({settings.rank for settings in lora})))
        alphas = "/".join(f"{alpha:g}" for alpha in sorted({settings.alpha for settings in lora}))
        adapters = f"{len(layers)} layers, rank {ranks}, alpha {alphas}" if layers else "none"
        vocabulary = "none" if self.tokenizer is None else f"{len(self.tokenizer):,} tokens"
        kind = "multi-label" if self.info.multi_label else "single-label"
        counts = self.counts()
        lines = {
            "model": f"{self.model.name or 'merged'} on {self.model.device} ({self.precision.reason})",
            "base": f"{self.settings.base}, {counts['parameters']:,} parameters with the head",
            "tokenizer": vocabulary,
            "method": self.settings.method.kind,
            "adapters": adapters,
            "head": f"{head.in_features} -> {head.out_features}, {self.info.pooling} token, {kind}: "
            + ", ".join(self.info.classes),
            "trains": f"{counts['trained_parameters']:,} parameters, "
            f"{counts['head_parameters']:,} of them in the head",
            "trained": f"{counts['steps']:,} updates, {counts['samples_seen']:,} samples",
        }
        return "\n".join(f"{name:<11}{text}" for name, text in lines.items())

    # --- conversion of texts to examples

    def _step_settings(self, examples: Sequence[Example]) -> StepSettings:
        """Return the micro-batch settings of the run, enlarged if a text is longer than a micro-batch."""
        settings = self.settings
        micro_tokens = StepSettings(
            None, settings.batch_tokens, settings.micro_batch_tokens, settings.pack
        ).micro_tokens
        longest = max(example.length for example in examples)
        return StepSettings(None, None, max(micro_tokens, longest), settings.pack)

    def _logits(self, examples: Sequence[Example]) -> np.ndarray:
        steps = self._step_settings(examples)
        return compute_outputs(self.objective.logits, self.model, examples, steps, precision=self.precision)

    def _probabilities(self, logits: np.ndarray) -> np.ndarray:
        return (sigmoid if self.info.multi_label else softmax)(logits)

    def _examples(self, samples: Sequence[ClassifierSample]) -> list[Example]:
        return [self._example(*_text_and_label(sample)) for sample in samples]

    def _example(self, text: ClassifierText, label: Any) -> Example:  # Any: as in a Sample
        value = to_python(label)
        key = "labels" if isinstance(value, list) else "label"
        return self._record_example(Record({"input": text, key: value}, "a sample"))

    def _record_example(self, record: Record) -> Example:
        text = record.fields.get("input")
        if text is not None and not isinstance(text, str):  # token ids; only the labels need the usual check
            record = validate_record(Record({**record.fields, "input": ""}, record.origin), "classification")
        else:
            record = record if record.record_format else validate_record(record, "classification")
            text = record.fields["input"]
        try:
            return self._encode(text, self.labels.label_values(record.fields), record.origin)
        except DataError as error:
            prefix = "" if error.message.startswith(record.origin) else f"{record.origin}: "
            raise DataError(f"{prefix}{error.message}", hint=error.hint) from None

    def _encode(
        self, text: ClassifierText, values: tuple[float, ...] = (), origin: str = "a text"
    ) -> Example:
        if isinstance(text, str) and self._encoder is None:
            raise ConfigError("this model has no tokenizer", hint="pass token ids instead of texts")
        if isinstance(text, str):
            assert self._encoder is not None
            rendering = Rendering(text, [(0, len(text))], True, False, origin, is_classification=True)
            tokens = list(self._encoder.encode_one(rendering).tokens[:-1])
        else:
            tokens = self._validate_ids(text, origin)
        if not tokens:
            raise DataError(f"{origin}: the text has no tokens, so it cannot be classified")
        tokens = tokens[: min(self.info.max_length, self.model.max_positions)]
        ids = np.array([*tokens, tokens[-1]], dtype=np.int64)
        return Example(ids, np.ones(len(ids), dtype=bool), origin, values)

    def _validate_ids(self, values: Sequence[int], origin: str) -> list[int]:
        try:
            ids = [operator.index(value) for value in values]
        except TypeError:
            raise DataError(
                f"{origin}: {str(values)[:50]} is neither a string nor a sequence of token ids"
            ) from None
        vocab_size = self.model.vocab_size
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise DataError(
                f"{origin}: token id {outside[0]} is outside the model's vocabulary of {vocab_size:,}"
            )
        return ids


def _dtype(settings: ClassifierSettings, device: torch.device) -> torch.dtype:
    """Return the dtype of the base model, whose weights are trained only by full fine-tuning."""
    precision = choose_precision(settings.precision, device)
    return precision.trained if settings.method.kind == "full" else precision.frozen


def _text_and_label(sample: Any) -> ClassifierSample:  # Any: not validated yet
    if not isinstance(sample, str | Mapping):
        try:
            text, label = sample
            return text, label
        except (TypeError, ValueError):
            pass
    raise DataError(
        f"a sample must be (text, label), not {str(sample)[:50]!r}", hint="write [(text, label), ...]"
    )


def _records(data: SourceSpec | Path | Sequence[Any]) -> list[Record]:  # Any: records are JSON objects
    data = str(data) if isinstance(data, Path) else data
    if not len(data):
        raise DataError("there are no records to evaluate")
    if isinstance(data, str) or not isinstance(data[0], Mapping):
        return list(open_source(data, split="test", form="classification"))
    return [Record(dict(fields), f"record {number}") for number, fields in enumerate(data, start=1)]
