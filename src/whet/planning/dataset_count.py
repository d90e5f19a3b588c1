"""Count the steps and lengths of a run from its records, if that is quick."""

from pathlib import Path

from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.inspect.step_facts import plan_steps
from whet.data.run_data import RunData
from whet.errors import WhetError
from whet.model_io.resolve_model import config_directory
from whet.model_io.tokenizer import has_tokenizer, load_tokenizer, new_tokenizer
from whet.planning.plan import DatasetCounts
from whet.recipes.registry import record_needs

_MAX_BYTES = 4_000_000
_MAX_EXAMPLES = 5_000


def count_small_dataset(config: RunConfig) -> DatasetCounts | None:
    """Tokenize the training records and count the steps.

    Returns None if the records are many, are not local, or are invalid, or if the objective samples its data.
    """
    if config.parts() or not _is_cheap(config.data.train) or (needs := record_needs(config)).prompts:
        return None
    curriculum = config.data.curriculum
    if curriculum is not None and curriculum.hard is not None and not _is_cheap(curriculum.hard):
        return None
    try:
        data = RunData(
            config.model_copy(
                update={"data": config.data.model_copy(update={"valid": config.data.held_out, "test": None})}
            ),
            needs,
        )
        data.set_tokenizer(_tokenizer(config, data))
        for name in data.sources:
            data.prepare_source(name)
        if config.data.valid is None:
            data.hold_out_validation()
        facts = plan_steps(config, data)
    except (WhetError, OSError):
        return None
    length = max(1, round(facts.tokens_per_step / max(facts.examples_per_step, 1)))
    return DatasetCounts(facts.steps, facts.tokens_per_step, length)


def _tokenizer(config: RunConfig, data: RunData) -> object:
    if isinstance(config.language_model, Preset):
        return new_tokenizer(config.language_model, data.training_texts())
    directory = config_directory(config.language_model)
    if not has_tokenizer(directory):
        raise WhetError(f"{config.model} has no tokenizer")
    return load_tokenizer(directory)


def _is_cheap(source: object) -> bool:
    """Return whether a source is a small local file or a small synthetic data set."""
    if not isinstance(source, str):
        return False
    kind, _, rest = source.partition(":")
    if kind == "synth":
        count = rest.rpartition(":")[2]
        return not count.isdecimal() or int(count) <= _MAX_EXAMPLES
    path = Path(source).expanduser()
    return path.is_file() and path.stat().st_size <= _MAX_BYTES
