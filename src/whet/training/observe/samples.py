"""What the model says on the way: the same prompts before, during and after a run."""

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import ConfigError, StorageError
from whet.generation.engine import check_prompts, generate_tokens
from whet.generation.generate import encode_prompt
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens
from whet.parallel.fsdp import gathered
from whet.run_directory import set_aside_later_rows
from whet.storage import append_text
from whet.training.callbacks import Injector, Metrics, ModelCallback, RunView
from whet.training.observe.preserve_state import preserve_state

if TYPE_CHECKING:
    from whet.training.state import RunResult

log = logging.getLogger("whet")

_SHOWN = 160  # characters of a line


class SampleGenerations(ModelCallback, Injector):  # so that its last rows are written before the summary
    """Greedy answers to some prompts, as rows {step, prompt, completion} of a file.

    Before the first step, every `every` steps, and after the last with the weights that `final/` has.
    """

    def __init__(
        self,
        tokenizer: Any,  # Any: a transformers tokenizer
        prompts: Sequence[str],
        path: str | Path,
        *,
        every: int | None = None,
        max_tokens: int = 64,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = list(prompts)
        self.path = Path(path)
        self.every = every
        self.max_tokens = max_tokens
        self._written: int | None = None

    def on_train_begin(self, run: RunView) -> None:
        """What it says untrained; of a resumed run, rows after its checkpoint come again."""
        model, step = self._model(), run.step
        self._encoded = [encode_prompt(self.tokenizer, prompt) for prompt in self.prompts]
        check_prompts(model, self._encoded)
        ended = self.trainer.is_last(step) or self.trainer.stop is not None
        kept = step - 1 if ended and not self.touches_model(step) else step  # the last rows come again, too
        with contextlib.suppress(StorageError):
            if run.is_main:
                set_aside_later_rows(self.path, step=kept if step else -1, evaluated_step=None)
        if step == 0:
            self._write(0)

    def touches_model(self, step: int) -> bool:
        """Where answers are due; those of the last step come at the end."""
        return self.every is not None and step % self.every == 0 and not self.trainer.is_last(step)

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """What it says now."""
        if self.touches_model(step):
            self._write(step)

    def on_train_end(self, result: "RunResult") -> None:
        """What it says at last."""
        early = self.trainer.settings.restores_best  # then these may be the weights of another step
        if not result.unfinished and (early or self._written != result.steps):
            self._write(result.steps)

    def _write(self, step: int) -> None:
        self._written = step
        with gathered(self.trainer.model):  # by all ranks, for the one that answers
            if not self.trainer.world.is_main:
                return
            completions = self._complete()
        rows = [
            {"step": step, "prompt": prompt, "completion": completion}
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]
        try:
            append_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except StorageError as error:
            log.warning("%s; these samples are not kept", error.message)
        for row in rows:
            log.info("step %d: %s -> %s", step, _short(str(row["prompt"])), _short(str(row["completion"])))

    def _model(self) -> LanguageModel:
        if not isinstance(self.trainer.model, LanguageModel):
            raise ConfigError("samples are answers of a language model, and this model is not one")
        return self.trainer.model

    def _complete(self) -> list[str]:
        model = self._model()
        with preserve_state(self.trainer.learner, model), gathered(model):
            found = generate_tokens(
                model,
                self._encoded,
                max_tokens=self.max_tokens,
                stop_tokens=stop_tokens(model, self.tokenizer),
            )
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
