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
from whet.config.run_config import optim_groups
from whet.config.section import PrecisionName
from whet.data.batches import Batch, make_batch
from whet.data.class_labels import Labels
from whet.data.packing import StepSettings, split_step
from whet.data.sources.source import Record, Spec, checked, open_source
from whet.data.tokens.chat_template import Rendering
from whet.data.tokens.examples import Example
from whet.data.tokens.tokenize import Encoder
from whet.errors import ConfigError, DataError, check_positive
from whet.evaluation.classifier_metrics import Report, sigmoid, softmax
from whet.hardware import choose_device, choose_precision
from whet.model_io.formats.adapter_files import save_adapter
from whet.model_io.formats.classifier_head import (
    ClassifierInfo,
    StoredHead,
    WeightedHead,
    are_counted,
)
from whet.model_io.load import load_base, load_body, load_quantised
from whet.model_io.save import save
from whet.model_io.tokenizer import tokenizer_of
from whet.models.heads import ClassificationHead, WithHeads
from whet.models.language_model import LanguageModel, evaluating
from whet.objectives.classify import Classify
from whet.parallel.gradient_sync import flat_gradients, set_flat_gradients
from whet.recipes.classify.calibration import rows_of
from whet.recipes.classify.classifier_config import (
    ClassifierSettings,
    StoredClassifier,
    new_settings,
    refuse_what_needs_a_new_head,
)
from whet.recipes.classify.classifier_report import report_on
from whet.training.callbacks import plain
from whet.training.loss import computed_loss, evaluate_loss, total_weights
from whet.training.optim.lr_schedules import create_schedule
from whet.training.optim.optimizers import create_optimizer
from whet.training.settings import TrainSettings
from whet.training.trainer import Trainer

ClassifierText = str | Sequence[int]  # a text, or its token ids
ClassifierSample = tuple[ClassifierText, Any]  # Any: a class by name or number, or several


class Classifier:
    """A model with a head that says which class a text belongs to, or which classes.

    `Classifier.load` makes one. Samples are (text, label): a text is a string or its token ids, a label is
    the name or the number of a class; of several classes a text, a list of those, or a probability for each.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,  # Any: a transformers tokenizer, or None: texts are then given as ids
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
        self.labels = Labels(info.classes, multi_label=info.multi_label)
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
        self._steps = 0  # updates before the trainer was last made anew
        self._lr: float | None = None  # as set by hand
        self._waiting: list[Example] = []
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
        """Open a trained classifier, or with `classes` put a new head on a model.

        What was trained before keeps training at its constant `optim.lr`, with the weights of classes that
        it had.

        Args:
            name_or_path: a finished run, one of its checkpoints or a saved classifier; with `classes`, any
                model that can be named.
            classes: the names of the classes of a new head, or how many there are.
            method: the section `method` of a config, for a new head.
            optim: keys of the section `optim`. The schedule is constant unless it is given here.
            total_steps: how many updates a schedule spans; any but `constant` needs it.
            max_length: tokens after which a new head cuts a text.
            seed: the seed of a new head and of its adapters.
            device: as in run.device.
            precision: as in run.precision.
            **objective: further keys of the section `objective` for a new head; `class_weights` for any.

        Returns:
            The classifier, ready to predict and to train.

        Raises:
            WhetError: there is no such classifier or model, or a setting is wrong or would be ignored.
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
        refuse_what_needs_a_new_head(method, objective)
        stored = StoredClassifier.find(name_or_path)
        weights = objective.get("class_weights")
        settings = stored.settings(optim=optim, class_weights=weights, device=device, precision=precision)
        settings.require_total_steps(total_steps)
        where = choose_device(settings.device)
        model, tokenizer = load_body(name_or_path, dtype=_dtype(settings, where), device=where)
        head, info = stored.head(settings)
        if precision is not None:
            info = replace(info, precision=settings.precision)
        return cls(model, tokenizer, head, info, settings, total_steps=total_steps)

    @classmethod
    def _with_new_head(cls, settings: ClassifierSettings, total_steps: int | None) -> "Classifier":
        where = choose_device(settings.device)
        dtype = _dtype(settings, where)
        torch.manual_seed(settings.seed)
        if settings.method.kind == "qlora":
            model = load_quantised(settings.base, dtype=dtype, device=where)
        else:
            model, _ = load_base(settings.base, dtype=dtype, device=where)
        trained = choose_precision(settings.precision, where).trained
        make_trainable(model, settings.method, dtype=trained)
        info = replace(settings.info, max_length=min(settings.max_length, model.max_positions))
        size = model.head().weight.shape[1]
        head = ClassificationHead(size, len(info.classes), pooling=info.pooling, bias=info.bias)
        head.initialise(settings.seed)
        return cls(model, tokenizer_of(settings.base), head, info, settings, total_steps=total_steps)

    # --- training, step by step

    def train_step(self, text: ClassifierText, label: Any) -> dict[str, float]:  # Any: as in a Sample
        """Make one update from one text; returns what `train_batch` does."""
        return self.train_batch([(text, label)])

    def train_batch(self, samples: Sequence[ClassifierSample]) -> dict[str, float]:
        """Make one update from some samples.

        Args:
            samples: (text, label) pairs. None at all is no update, and zeros.

        Returns:
            loss, correct and total of the samples, and grad_norm before clipping.
        """
        self.accumulate(samples)
        return self.apply()

    def accumulate(self, samples: Sequence[ClassifierSample]) -> int:
        """Keep samples for the next `apply`, and return how many it will have."""
        self._waiting += self._examples(samples)
        return len(self._waiting)

    def apply(self) -> dict[str, float]:
        """Make one update from all accumulated samples, exactly as `train_batch` would from all at once."""
        examples, self._waiting = self._waiting, []
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

        Add up both results over all processes (an all-reduce), and give the sums to `apply_gradients`.

        Args:
            samples: this process's part of the step; it may be empty.

        Returns:
            A 1-D float32 tensor on the model's device (adapters in the order of the layers, A before B, then
            the head's weight and bias), and the number of samples. With `normalise: weights` the second is
            the sum of the weights of their classes, which the loss is then a mean over.
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
        """Compute the gradient of the mean loss of some samples without an update, where the total is known.

        `gradients` needs no total, as it returns one to add up.

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
        """Make one update from a flat gradient, clipped and at the schedule's rate.

        Args:
            flat: the sum over all processes of what `gradients` returned first.
            n: the sum of what it returned second; the gradient is divided by it. Without it, `flat` is the
                gradient itself, as the vectors of `collect_gradients` add up to.

        Returns:
            lr, and grad_norm before clipping.

        Raises:
            RunError: the gradient has another size or is not finite. No weight has changed then.
        """
        if n is not None and not n > 0:
            raise ConfigError(f"n must be above 0, not {n}", hint="a step without a sample makes no update")
        trainer = self.trainer
        vector = torch.as_tensor(flat)
        set_flat_gradients(self.trainable_parameters(), vector if n is None else vector / n)
        metrics = trainer.apply_gradients()
        if n is not None and self.objective.normalise == "samples":
            self._samples_seen += round(n)
        return metrics

    @property
    def trainer(self) -> Trainer:
        """The trainer that makes the steps."""
        if self._trainer is None:
            section = self.settings.objective
            if are_counted(section):
                raise ConfigError(
                    f"class_weights: {section.class_weights} was counted in a run, and what came of it was "
                    "not kept here",
                    hint="give a list to Classifier.load, a number for each class: class_weights=[...]",
                )
            settings = self.settings
            learner = WithHeads(self.model, self.objective.head)
            self._trainer = Trainer(
                self.model,
                self.objective,
                (),
                optimizer=create_optimizer(optim_groups(settings.optim, settings.method), learner),
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
        """Return examples as the micro-batches of one step."""
        settings = self._settings(examples)
        lengths = np.array([example.length for example in examples])
        rows = split_step(range(len(examples)), lengths, settings)
        return [make_batch([[examples[index] for index in row] for row in each]) for each in rows]

    def set_lr(self, lr: float) -> None:
        """Set another learning rate, which stays from the next update on."""
        self._lr = lr
        self.trainer.lr_at = lambda _: lr

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.trainer.lr_at(self.trainer.state.step + 1)

    def optimizer_lr(self) -> float:
        """Return the learning rate of the next update, as `learning_rate` is."""
        return self.learning_rate

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Return adapters in the order of the layers, A before B, then the head's weight and bias."""
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [*own, *self.objective.head.parameters()]

    @property
    def num_trainable_parameters(self) -> int:
        """How many numbers train."""
        return sum(parameter.numel() for parameter in self.trainable_parameters())

    # --- use

    def logits(self, texts: Sequence[ClassifierText]) -> np.ndarray:
        """Return the head's outputs, [texts, classes]."""
        if isinstance(texts, str):
            raise ConfigError("one text where a list of texts belongs", hint="write [text]")
        if not len(texts):
            return np.zeros((0, len(self.info.classes)), dtype=np.float32)
        return self._logits([self._read(text) for text in texts])

    def predict_proba(self, texts: Sequence[ClassifierText]) -> np.ndarray:
        """Return probabilities, [texts, classes]; of several classes a text, each for itself."""
        return self._probabilities(self.logits(texts))

    def predict(self, texts: Sequence[ClassifierText]) -> list[Any]:
        """Return the name of the likeliest class of each text; of several a text, those above one half.

        Names are strings, also those of classes that have only a number.
        """
        return self.choose(self.predict_proba(texts))

    def choose(self, probabilities: np.ndarray) -> list[Any]:
        """Return what `predict` does, from the probabilities of `predict_proba`."""
        names = self.info.classes
        if self.info.multi_label:
            return [[names[index] for index in np.flatnonzero(row > 0.5)] for row in probabilities]
        return [names[index] for index in probabilities.argmax(1)] if len(probabilities) else []

    def loss(self, samples: Sequence[ClassifierSample]) -> float:
        """Return the loss of some samples, weighted as in training, without dropout, gradient or update."""
        if not len(samples):
            raise DataError("there is no sample to compute a loss of")
        batches = self.batches(self._examples(samples))
        return evaluate_loss(self.model, self.objective, batches, precision=self.precision)["eval_loss"]

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
        """Read labelled records as samples for `train_batch`.

        Args:
            data: a source as in data.train: a file of {input, label} or {input, labels}, say.

        Returns:
            (text, label) pairs, in the order of the records.

        Raises:
            DataError: a record is wrong, or its label is none of the classes; the message names its line.
        """
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
        """Return the report on records: accuracy, F1, calibration and more, as `whet eval` shows.

        Args:
            data: a source as in data.test, or a list of {input, label}.
        """
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
        self.settings = self.settings.for_the_head(WithHeads(self.model, self.objective.head))

    def save(self, directory: str | Path) -> None:
        """Write what `load` reads: an adapter, or the whole model, and always the head."""
        stored = StoredHead(self.objective.head, self.info)
        if not are_counted(self.settings.objective):
            stored = WeightedHead(self.objective.head, self.info, self.objective.class_weights.tolist())
        if any(True for _ in adapted(self.model)):
            save_adapter(self.model, directory, tokenizer=self.tokenizer, classifier=stored)
        else:
            save(self.model, self.tokenizer, directory, classifier=stored)

    def counts(self) -> dict[str, int]:
        """Return parameters, trained_parameters, head_parameters, classes, steps and samples_seen.

        `steps` are the updates since `load`, and `samples_seen` the samples in them.
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
        """Return the model, its tokenizer, adapters, head and `counts` as a text for people."""
        head, layers = self.objective.head.score, list(adapted(self.model))
        lora = [layer.settings for _, layer in layers if isinstance(layer, LoRALinear)]
        ranks = "/".join(map(str, sorted({each.rank for each in lora})))
        alphas = "/".join(f"{alpha:g}" for alpha in sorted({each.alpha for each in lora}))
        adapters = f"{len(layers)} layers, rank {ranks}, alpha {alphas}" if layers else "none"
        vocabulary = "none" if self.tokenizer is None else f"{len(self.tokenizer):,} tokens"
        kind = "any of them" if self.info.multi_label else "one of them"
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

    # --- texts as examples

    def _settings(self, examples: Sequence[Example]) -> StepSettings:
        """Micro-batches as in the run, unless a text is longer than those."""
        own = self.settings
        usual = StepSettings(None, own.batch_tokens, own.micro_batch_tokens, own.pack).micro_tokens
        longest = max(example.length for example in examples)
        return StepSettings(None, None, max(usual, longest), own.pack)

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


def _dtype(settings: ClassifierSettings, device: torch.device) -> torch.dtype:
    """Return the dtype of the model under the head: that of trained weights, or of frozen ones."""
    precision = choose_precision(settings.precision, device)
    return precision.trained if settings.method.kind == "full" else precision.frozen


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
