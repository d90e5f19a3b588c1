"""Export classifiers for transformers and PEFT, and check that these compute the same probabilities."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any  # everywhere below: tokenizers, and models of libraries without types

import torch

from whet.adapters.adapter import named_adapters
from whet.adapters.merge import merge
from whet.errors import ConfigError, ModelError
from whet.model_io.base_models import base_model_of, local_model_directory
from whet.model_io.export.export_check import Check
from whet.model_io.formats.adapter_files import QUANTIZATION_FILE, save_adapter
from whet.model_io.formats.classifier_head import ClassifierInfo, StoredHead, read_head
from whet.model_io.load import load_without_head
from whet.model_io.save import save
from whet.models.heads import pool_hidden_states
from whet.models.language_model import LanguageModel

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of probabilities
SAMPLES = ("rm -rf ./build", "The knife was dull, so three stones were brought.", "def area(width, height):")


@dataclass(frozen=True)
class LoadedClassifier:
    """A classifier in float32, and its probabilities for a few texts."""

    model: LanguageModel
    tokenizer: Any
    stored: StoredHead
    name: str
    probabilities: torch.Tensor

    @property
    def info(self) -> ClassifierInfo:
        """The classes of the classifier, and how it reads a text."""
        return self.stored.info


def load_classifier_exact(name: str | Path) -> LoadedClassifier:
    """Load a classifier in float32 for export."""
    model, tokenizer = load_without_head(name, dtype=torch.float32, device="cpu")
    stored = read_head(Path(local_model_directory(name)))
    return LoadedClassifier(model, tokenizer, stored, str(name), _probabilities(model, tokenizer, stored))


@torch.no_grad()
def _probabilities(model: LanguageModel, tokenizer: Any, stored: StoredHead) -> torch.Tensor:
    rows = []
    for text in SAMPLES:
        tokens = torch.tensor([tokenizer(text)["input_ids"]])
        positions = torch.arange(tokens.shape[1])
        state = pool_hidden_states(
            model.hidden(tokens), positions, torch.zeros_like(positions), texts=1, pooling=stored.head.pooling
        )
        rows.append(_to_probabilities(stored.head(state), stored.info))
    return torch.cat(rows)


def _to_probabilities(logits: torch.Tensor, info: ClassifierInfo) -> torch.Tensor:
    return logits.sigmoid() if info.multi_label else logits.softmax(-1)


def write_classifier(loaded: LoadedClassifier, path: Path, layout: str, *, dtype: torch.dtype) -> None:
    """Write a classifier as `peft` (SEQ_CLS, with the head in modules_to_save) or `hf` (adapters merged)."""
    if layout not in ("hf", "peft"):
        raise ConfigError(f"a classifier cannot be exported to {layout}", hint="use --to hf or --to peft")
    if (reason := loaded.stored.export_problem(loaded.model)) is not None:
        raise ModelError(
            f"{loaded.name} cannot be used by transformers: {reason}",
            hint="load it with whet.Classifier.load; to export, train with pooling: last and without a bias",
        )
    has_adapter = any(True for _ in named_adapters(loaded.model))
    if layout == "peft" and not has_adapter:
        raise ModelError(f"{loaded.name} has no adapter: it is a full model", hint="use --to hf")
    if layout == "peft":
        save_adapter(loaded.model, path, tokenizer=loaded.tokenizer, classifier=loaded.stored)
        return
    merged = merge(loaded.model)
    for parameter in merged.parameters():
        parameter.data = parameter.data.to(dtype)
    save(merged, loaded.tokenizer, path, classifier=loaded.stored)


def check_classifier(loaded: LoadedClassifier, path: Path, layout: str, *, dtype: torch.dtype) -> Check:
    """Load an export with transformers or PEFT, and compare the probabilities of a few texts."""
    try:
        model = _load_with_transformers(loaded, path, layout)
    except Exception as error:  # any failure of the other library means that the export is unusable
        return Check(False, f"it cannot be loaded: {type(error).__name__}: {error}")
    with torch.no_grad():
        rows = [model(**loaded.tokenizer(text, return_tensors="pt")).logits for text in SAMPLES]
    probabilities = _to_probabilities(torch.cat(rows).float(), loaded.info)
    largest = (probabilities - loaded.probabilities).abs().max().item()
    tolerance = TOLERANCES[dtype if layout == "hf" else torch.float32]
    reader = "transformers" if layout == "hf" else "PEFT"
    text = f"{reader}: largest probability difference {largest:.2g} (tolerance {tolerance:g})"
    return Check(largest <= tolerance, text)


def _load_with_transformers(loaded: LoadedClassifier, path: Path, layout: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    settings: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    if layout == "hf":
        return AutoModelForSequenceClassification.from_pretrained(path, **settings).eval()
    from peft import PeftModel

    base = loaded.model.source
    if base is None or base_model_of(base) is not None or (path / QUANTIZATION_FILE).is_file():
        raise ModelError("its base is not a plain model, which PEFT requires: export with --to hf")
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=len(loaded.info.classes), **settings
    )
    return PeftModel.from_pretrained(model, path).eval()
