"""What an objective is built from, once the data and the untrained model are there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.data.packing import StepSettings
from whet.data.sources.splits import learned
from whet.data.tokens.examples import StoredExamples, StoredPairs
from whet.hardware import Precision
from whet.models.language_model import LanguageModel
from whet.parallel.process_group import SOLO, World


@dataclass
class ObjectiveInputs:
    """The untrained model, the prepared examples by split, and how steps are computed."""

    model: LanguageModel
    tokenizer: Any  # Any: a transformers tokenizer
    examples: Mapping[str, StoredExamples | StoredPairs]
    steps: StepSettings
    precision: Precision
    base_digest: str
    seed: int = 0
    world: World = SOLO
    identities: dict[str, str] = field(default_factory=dict)  # of the models that were opened, by name

    def training_examples(self) -> list[StoredExamples]:
        """Return the training examples, from one source or two."""
        return [examples for examples in learned(self.examples) if isinstance(examples, StoredExamples)]
