"""Sample completions of fixed prompts before, during and after a run."""

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
from whet.parallel.fsdp import gathered_parameters
from whet.run_directory import move_superseded_rows
from whet.storage import append_text
from whet.training.callbacks import Injector, Metrics, ModelCallback, RunView
from whet.training.observe.preserve_state import preserve_state

if TYPE_CHECKING:
    from whet.training.state import RunResult

log = logging.getLogger("whet")

_MAX_LOGGED_CHARS = 160


class SampleGenerations(ModelCallback, Injector):  # an Injector runs before the summary is written
    """Generates greedy completions of prompts, and writes them as rows {step, prompt, completion} to a file.

    Completions are generated before the first step, every `every` steps, and after the last step with the
    weights of `final/`.

    Args:
        tokenizer: The tokenizer of the model.
        prompts: The prompts to complete.
        path: The JSON Lines file to append to.
        every: The number of steps between samples; None for samples only at the start and the end.
        max_tokens: The maximum length of a completion.
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
        self._written_step: int | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Write the samples of the untrained model; a resumed run repeats the rows after its checkpoint."""
        model, step = self._model(), run.step
        self._encoded = [encode_prompt(self.tokenizer, prompt) for prompt in self.prompts]
        check_prompts(model, self._encoded)
        ended = self.trainer.is_last(step) or self.trainer.stop is not None
        # the rows of the last step are written again, too
        last_kept = step - 1 if ended and not self.touches_model(step) else step
        with contextlib.suppress(StorageError):
            if run.is_main:
                move_superseded_rows(self.path, step=last_kept if step else -1, evaluated_step=None)
        if step == 0:
            self._write(0)

    def touches_model(self, step: int) -> bool:
        """Return whether samples are due after this step; those of the last step are written at the end."""
        return self.every is not None and step % self.every == 0 and not self.trainer.is_last(step)

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Write samples, if they are due."""
        if self.touches_model(step):
            self._write(step)

    def on_train_end(self, result: "RunResult") -> None:
        """Write samples of the final weights."""
        restored = self.trainer.settings.restores_best  # the weights may be those of an earlier step
        if not result.unfinished and (restored or self._written_step != result.steps):
            self._write(result.steps)

    def _write(self, step: int) -> None:
        self._written_step = step
        with gathered_parameters(self.trainer.model):  # a collective of all ranks, for rank 0
            if not self.trainer.world.is_main:
                return
            completions = self._generate()
        rows = [
            {"step": step, "prompt": prompt, "completion": completion}
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]
        try:
            append_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except StorageError as error:
            log.warning("%s; these samples are lost", error.message)
        for row in rows:
            log.info(
                "step %d: %s -> %s", step, _truncate(str(row["prompt"])), _truncate(str(row["completion"]))
            )

    def _model(self) -> LanguageModel:
        if not isinstance(self.trainer.model, LanguageModel):
            raise ConfigError("samples need a language model, and this model is not one")
        return self.trainer.model

    def _generate(self) -> list[str]:
        model = self._model()
        with preserve_state(self.trainer.learner, model), gathered_parameters(model):
            completions = generate_tokens(
                model,
                self._encoded,
                max_tokens=self.max_tokens,
                stop_tokens=stop_tokens(model, self.tokenizer),
            )
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]


def _truncate(text: str) -> str:
    return repr(text if len(text) <= _MAX_LOGGED_CHARS else f"{text[:_MAX_LOGGED_CHARS]}...")
