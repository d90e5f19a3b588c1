"""Examine the data of a config for `whet data`, and find the errors that a run would raise."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.config.objectives.custom import is_custom_kind
from whet.config.preset import Preset
from whet.config.run_config import RunConfig
from whet.data.inspect.data_facts import (
    DataView,
    SplitFacts,
    check_evaluation,
    describe_split_classes,
    find_overlaps,
    split_facts,
    tokenizer_facts,
)
from whet.data.inspect.duplicates import SplitScan, pair_hashes, scan_split
from whet.data.inspect.problems import Problem
from whet.data.inspect.step_facts import RunCost, plan_steps
from whet.data.inspect.token_text import TokenText
from whet.data.run_data import SPLITS, RunData
from whet.data.sources.source import is_source, open_source
from whet.data.tokens.prompts import select_fitting_prompts
from whet.errors import ConfigError, DataError, ModelError, WhetError
from whet.hardware import choose_device, choose_precision
from whet.model_io.tokenizer import load_model_tokenizer, new_tokenizer
from whet.models.costs import ModelSummary
from whet.planning.model_facts import model_facts
from whet.recipes.registry import recipe_for, record_needs
from whet.runs.build_callbacks import check_callbacks
from whet.runs.dry_run import check_assembly
from whet.training.optim.lr_schedules import create_schedule


def view_data_by_part(config: RunConfig, *, samples: int = 2) -> dict[str, DataView]:
    """Return the data view of each part of a mix by name, or one view under the name "" for other objectives.

    Args:
        config: The run's config.
        samples: How many examples of each split to show.
    """
    parts = config.parts()
    if not parts:
        return {"": view_data(config, samples=samples)}
    tokenizer = None
    if isinstance(config.model, Preset):  # a new tokenizer is trained on the records of all parts
        with contextlib.suppress(ConfigError, DataError):  # the view of each part reports its errors
            tokenizer = new_tokenizer(config.model, recipe_for(config).open_data().training_texts())
    return {name: view_data(part, samples=samples, tokenizer=tokenizer) for name, part in parts.items()}


def view_data(
    config: RunConfig,
    *,
    samples: int = 2,
    tokenizer: Any = None,  # Any: a transformers tokenizer; None: the config's
) -> DataView:
    """Read every source of a config, and collect errors instead of stopping at the first bad record or file.

    Args:
        config: The run's config.
        samples: How many examples of each split to show.
        tokenizer: The tokenizer to use instead of the config's.
    """
    _ = config.language_model  # raises for other models, which do not read text
    lenient, errors = _lenient_config(config)
    if lenient is None:
        return DataView(config, None, None, (), (), None, tuple(errors))
    try:
        data = RunData(lenient, record_needs(lenient))
        tokenizer = tokenizer or _tokenizer(lenient, data)
    except (ConfigError, DataError) as error:
        return DataView(config, None, None, (), (), None, (*errors, error))
    try:
        model = model_facts(lenient.language_model, tokens=len(tokenizer))
    except ConfigError as error:
        model = None
        errors.append(error)
    if data.needs.prompts:
        return _view_prompts(config, data, tokenizer=tokenizer, model=model, errors=errors)
    return _view_examples(config, data, tokenizer=tokenizer, model=model, errors=errors, samples=samples)


def _view_examples(
    config: RunConfig,
    data: RunData,
    *,
    tokenizer: Any,  # Any: a transformers tokenizer
    model: ModelSummary | None,
    errors: list[WhetError],
    samples: int,
) -> DataView:
    stop_tokens = _stop_tokens(tokenizer, model)
    scans: dict[str, SplitScan] = {}
    splits: list[SplitFacts] = []
    data.set_tokenizer(tokenizer)
    for name in data.sources:
        try:
            examples = data.prepare_source(name)
            if name in ("valid", "test"):
                check_evaluation(examples, data)
        except DataError as error:
            errors.append(DataError(f"data.{name}: {error.message}", hint=error.hint))
        if name in data.examples:
            scanned = scan_split(
                data.examples[name].sides, bos=tokenizer.bos_token_id, end_tokens=stop_tokens
            )
            pairs = data.needs.pairs
            scans[name] = replace(scanned, hashes=pair_hashes(scanned.hashes)) if pairs else scanned
            splits.append(split_facts(name, data, scans[name], config, model, samples))
    steps, held_out = None, 0
    if "train" in data.examples and ("hard" in data.examples or "hard" not in data.sources):
        try:
            if config.data.valid is None:
                before = len(data.examples["train"])
                data.hold_out_validation()
                held_out = before - len(data.examples["train"])
            steps = plan_steps(data.config, data)
        except (ConfigError, DataError) as error:
            errors.append(error)
    text = TokenText(tokenizer)
    return DataView(
        config=config,
        model=model,
        missing_inputs=() if errors else tuple(_missing_teacher_outputs(config, data, model)),
        tokenizer=tokenizer_facts(
            tokenizer,
            tuple(text.special_token_name(token) for token in sorted(stop_tokens)),
            template_args=config.data.template_args,
            is_own_template=config.data.template is None,
        ),
        splits=tuple(splits),
        overlaps=tuple(find_overlaps(data, scans)),
        steps=steps,
        errors=tuple(errors),
        held_out=held_out,
        remaining_classes=describe_split_classes(data, "train") if held_out else "",
    )


def estimate_cost(view: DataView, device: str) -> RunCost | None:
    """Return the time and memory of a run on a device, or None if its steps are not known.

    Args:
        view: The data of the run.
        device: A device as in `whet plan`; "this" for this machine.

    Raises:
        ConfigError: The device is unknown, or the run cannot be planned.
    """
    from whet.planning.plan import DatasetCounts, plan_run

    steps = view.steps
    if steps is None:
        return None
    length = max(1, round(steps.tokens_per_step / max(steps.examples_per_step, 1)))
    counts = DatasetCounts(steps.steps, steps.tokens_per_step, length)
    plan = plan_run(view.config, device=device, counts=counts, suggest=False, user_code=False)
    return RunCost(plan.target.name, plan.step_s, plan.utilisation, plan.memory.peak, plan.target.memory)


def _missing_teacher_outputs(
    config: RunConfig, data: RunData, model: ModelSummary | None
) -> Iterator[WhetError]:
    if model is None or model.vocab_size is None or is_custom_kind(config.objective.kind):
        return  # `whet data` does not run the user's code
    try:
        recipe_for(config).check_examples(data, vocab_size=model.vocab_size)
    except WhetError as error:
        yield error


def _view_prompts(
    config: RunConfig,
    data: RunData,
    *,
    tokenizer: Any,  # Any: a transformers tokenizer
    model: ModelSummary | None,
    errors: list[WhetError],
) -> DataView:
    """Return the view of a run that trains on sampled completions: it has prompts, and no examples yet."""
    recipe = recipe_for(config)
    shape = recipe.step_shape()
    data.set_tokenizer(tokenizer)
    prompts, unread = [], list[tuple[str, str]]()
    context = model.max_positions if model is not None and model.max_positions else config.data.max_length
    try:
        recipe.check()
        for name, source in data.sources.items():
            data.prepare_prompts(name)
            fitting_prompts = select_fitting_prompts(
                data.prompts[name],
                context=context,
                max_length=config.data.max_length,
                max_new_tokens=shape.completion_tokens,
                drop=config.data.too_long == "drop",
            )
            dropped = len(data.prompts[name]) - len(fitting_prompts)
            dropped_note = f", {dropped:,} too long and dropped" if dropped else ""
            unread += (
                (f"{name}: {message}", hint)
                for message, hint in data.unread_field_warnings(data.prompts[name].unread_fields)
            )
            prompts.append((name, f"{source.name}: {data.prompts[name].summary()}{dropped_note}"))
            if data.prompts[name].skipped.count and config.data.on_bad_record == "error":
                raise DataError(f"data.{name}: {data.prompts[name].skipped.summary()}")
    except (ConfigError, DataError) as error:
        errors.append(error)
    text = TokenText(tokenizer)
    stop_tokens = tuple(text.special_token_name(token) for token in sorted(_stop_tokens(tokenizer, model)))
    facts = tokenizer_facts(
        tokenizer,
        stop_tokens,
        template_args=config.data.template_args,
        is_own_template=config.data.template is None,
    )
    return DataView(
        config,
        model,
        facts,
        (),
        (),
        None,
        tuple(errors),
        unread_prompts=tuple(unread),
        prompts=tuple(prompts),
        completions=shape.documents,
        completion_tokens=shape.completion_tokens,
    )


def _lenient_config(config: RunConfig) -> tuple[RunConfig | None, list[WhetError]]:
    """Return the config with settings that tolerate bad records, and the errors of its sources.

    The config is None if the training data cannot be opened.
    """
    data, errors = config.data, list[WhetError]()
    changes: dict[str, Any] = {"on_bad_record": "skip"}  # Any: values of several keys
    if data.too_long == "error":
        changes["too_long"] = "truncate"
    for split in SPLITS:
        if is_source(spec := getattr(data, split)):
            try:
                open_source(spec, split=split, form=data.format)
            except DataError as error:
                errors.append(DataError(f"data.{split}: {error.message}", hint=error.hint))
                changes[split] = None
    if "train" in changes:
        return None, errors
    return config.model_copy(update={"data": data.model_copy(update=changes)}), errors


def _tokenizer(config: RunConfig, data: RunData) -> Any:  # Any: a transformers tokenizer
    if isinstance(model := config.language_model, Preset):
        return new_tokenizer(model, data.training_texts())
    if (tokenizer := load_model_tokenizer(model)) is None:
        raise ModelError(f"{model} has no tokenizer, so it cannot read records")
    return tokenizer


def _stop_tokens(tokenizer: Any, model: ModelSummary | None) -> set[int]:  # Any: as above
    """Return the ids of the stop tokens of a model that its tokenizer also has."""
    tokens = {tokenizer.eos_token_id, *(model.stop_tokens if model is not None else ())}
    return {token for token in tokens if token is not None and 0 <= token < len(tokenizer)}


def find_run_errors(
    config: RunConfig, *, steps: int | None, tokens: int | None = None, processes: int = 1
) -> list[Problem]:
    """Return the errors, except those of the data, that `whet train` would raise before its first step.

    Args:
        config: The run's config.
        steps: The total number of steps, if it is known.
        tokens: The vocabulary size of a tokenizer that the run would train.
        processes: How many processes the run would use.
    """
    problems = []
    checks: list[Callable[[], object]] = [
        lambda: config.parallel.check_processes(processes),
        lambda: check_callbacks(config, recipe_for(config)),
        lambda: choose_precision(config.run.precision, choose_device(config.run.device)),
        lambda: _check_directory_is_writable(config.directory),
        lambda: check_assembly(config, tokens=tokens),
    ]
    if steps is not None:
        checks.append(lambda: create_schedule(config.optim, steps))
    for check in checks:
        try:
            check()
        except WhetError as error:
            problem = Problem(error.message, error.hint, is_fatal=True)
            if problem not in problems:  # check_assembly repeats some of the checks before it
                problems.append(problem)
    return problems


def _check_directory_is_writable(directory: Path) -> None:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(f"{directory} cannot be created: {existing} is not a writable directory")
