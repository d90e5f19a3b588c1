"""Records that are already tokenized: they bypass the chat template and the tokenizer."""

from dataclasses import dataclass

import numpy as np

from whet.data.sources.source import Record
from whet.data.tokens.chat_template import Rendering, Supervise
from whet.data.tokens.examples import Example
from whet.errors import DataError

_IGNORED = -100  # the label of a token that is not supervised, as in PyTorch's cross-entropy


@dataclass(frozen=True)
class PretokenizedRendering(Rendering):
    """The token ids of a record, with its loss mask, in place of a text."""

    ids: tuple[int, ...] = ()
    supervised: tuple[bool, ...] = ()

    def to_example(self) -> Example | DataError:
        """Return the ids as an example. No special token is added."""
        mask = np.array(self.supervised, dtype=bool)
        if not mask[1:].any():
            return DataError(
                f"{self.origin}: no token of this example is supervised",
                hint="it needs labels other than -100",
            )
        return Example(np.array(self.ids, dtype=np.uint32), mask, self.origin, self.values)


def render_tokens(record: Record, *, supervise: Supervise) -> PretokenizedRendering:
    """Return the ids of a `tokens` record; its labels are the loss mask, unless everything is supervised."""
    ids, labels = record.fields["input_ids"], record.fields["labels"]
    supervised = tuple(supervise == "all" or label != _IGNORED for label in labels)
    return PretokenizedRendering("", (), True, False, record.origin, ids=tuple(ids), supervised=supervised)
