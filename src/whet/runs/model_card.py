"""Model cards: write the README.md of `final/` and of exports from the files of a run."""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any  # everywhere below: JSON and YAML values that have not been validated

import yaml

from whet.config.load_config import parse_yaml
from whet.errors import WhetError
from whet.model_io.resolve_model import config_directory, hub_id
from whet.run_directory import (
    CARD_FILE,
    CHECKPOINTS_DIRECTORY,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    FINAL_DIRECTORY,
    METRICS_FILE,
    PROVENANCE_FILE,
    parse_row,
    read_rows_text,
    split_rows,
)
from whet.runs.card_text import (
    BaseModel,
    CardFacts,
    Evaluation,
    is_unedited,
    public_text,
    render_card,
    section_of,
    source_names,
    training_facts,
)
from whet.storage import read_json, replace_text

log = logging.getLogger("whet")

_MAX_CARD_BYTES = 2**20  # of a base model; longer ones are not read
_LICENSE = re.compile(r"[A-Za-z0-9][\w.+ -]{0,80}")
_LICENSE_LINK = re.compile(r"(https://|LICENSE)[^\s'\"<>@]{0,200}")
_LANGUAGE = re.compile(r"[a-z]{2,3}|multilingual|code")
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TIMES = re.compile(r"(^|_)s$")


def write_final_card(run: Path, summary: Mapping[str, Any]) -> None:
    """Write the card of a run's `final/`, before the run's summary is in its metrics."""
    _replace_card(run / FINAL_DIRECTORY, _collect_facts(run / FINAL_DIRECTORY, run, summary))


def refresh_final_card(run: Path) -> None:
    """Write the card of `final/` again, after new evaluations. An edited card stays as it is."""
    final = run / FINAL_DIRECTORY
    if (final / CARD_FILE).is_file():
        _replace_card(final, _collect_facts(final, run, _stored_summary(run)))


def write_export_card(source: str | Path, directory: Path) -> None:
    """Write the card of an exported directory.

    Args:
        source: What was exported: a run, one of its checkpoints, an adapter, or a model.
        directory: The export.
    """
    path = Path(source).expanduser()
    run = next((each for each in (path, path.parent, path.parent.parent) if _is_run_of(path, each)), None)
    if run is None:
        title = public_text(str(source)).rpartition("/")[2]
        base = _base_model(str(source), directory)
        facts = CardFacts(title, **_describe(directory), base=base, version=_version())
    elif path.parent.name == CHECKPOINTS_DIRECTORY:
        step = int(path.name.rpartition("-")[2]) if path.name.rpartition("-")[2].isdigit() else None
        facts = _collect_facts(directory, run, {"steps": step}, step=step)
    else:
        facts = _collect_facts(directory, run, _stored_summary(run))
    _replace_card(directory, facts)


def _is_run_of(path: Path, run: Path) -> bool:
    is_part = path == run or path.name == FINAL_DIRECTORY or path.parent.name == CHECKPOINTS_DIRECTORY
    return is_part and (run / CONFIG_FILE).is_file() and (run / METRICS_FILE).is_file()


def _replace_card(directory: Path, facts: CardFacts) -> None:
    path = directory / CARD_FILE
    if path.is_file() and not is_unedited(path.read_text(encoding="utf-8", errors="replace")):
        log.info("%s was edited, so it is not replaced", path)
        return
    replace_text(path, render_card(facts))


def _version() -> str:
    import whet

    return whet.__version__


def _stored_summary(run: Path) -> dict[str, Any]:
    rows = split_rows(read_rows_text(run / METRICS_FILE))
    summary = parse_row(rows[-1]).get("summary") if rows else None
    return summary if isinstance(summary, dict) else {}


def _collect_facts(
    directory: Path, run: Path, summary: Mapping[str, Any], *, step: int | None = None
) -> CardFacts:
    """Return what the files of a run say. With `step`, the model is that of a checkpoint."""
    config = _read_config(run / CONFIG_FILE)
    model = config.get("model")
    data = section_of(config, "data")
    training_sources = [*source_names(data.get("train")), *_mix_sources(config)]
    datasets = dict.fromkeys(name for spec in training_sources if (name := _hub_dataset(spec)))
    return CardFacts(
        title=public_text(str(section_of(config, "run").get("name") or run.resolve().name)),
        **_describe(directory),
        base=_base_model(model, directory) if isinstance(model, str) else None,
        config=config,
        datasets=list(datasets),
        evaluations=list(_evaluations(run, config, summary, step)),
        facts=training_facts(config, _read_object(run / PROVENANCE_FILE), summary),
        version=_version(),
    )


def _read_config(path: Path) -> dict[str, Any]:
    """Return the sections of a config, or none if the file is damaged."""
    try:
        config = parse_yaml(path.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _mix_sources(config: Mapping[str, Any]) -> Iterator[str]:
    for part in section_of(config, "objective").get("parts") or ():
        data = part.get("data") if isinstance(part, dict) else None
        yield from source_names(data.get("train") if isinstance(data, dict) else data)


def _hub_dataset(spec: object) -> str | None:
    """Return the hub name of a source, or None if it is on this machine or synthetic."""
    if not isinstance(spec, str) or not spec.startswith(("hf:", "hf-stream:")):
        return None
    from whet.data.sources.hf_datasets import parse_hub_spec

    name = parse_hub_spec(spec).name
    return name if _DATASET.fullmatch(name) and not Path(name).exists() else None


def _describe(directory: Path) -> dict[str, Any]:
    """Return what the files of a model directory say about its use."""
    config = _read_object(directory / "config.json")
    adapter = _read_object(directory / "adapter_config.json")
    tokenizer = _read_object(directory / "tokenizer_config.json")
    architectures = config.get("architectures")
    is_classifier = (directory / "classifier.json").is_file() or "Classification" in str(architectures)
    if adapter:
        library = "mlx" if (directory / "adapters.safetensors").is_file() else "peft"
    else:
        library = "transformers" if config and config.get("model_type") != "whet" else "whet"
    task = "text-generation" if config or adapter else "tabular-regression"
    return {
        "library": library,
        "task": "text-classification" if is_classifier else task,
        "is_chat": (directory / "chat_template.jinja").is_file() or bool(tokenizer.get("chat_template")),
        "is_quantized": "quantization_config" in config,
        "quantization": str(section_of(config, "quantization_config").get("quant_method", "")),
    }


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) if path.is_file() else {}
    except WhetError:
        return {}


# --- the base model


def _base_model(name: str, directory: Path | None = None) -> BaseModel:
    """Return what is known about a base model, from its name and its own card.

    Args:
        name: The model that training started from, or that was exported.
        directory: The model that the card is for. If it is an adapter, its base model is the one it names.
    """
    is_local = Path(name).expanduser().exists()
    front = _front_matter_of(name)
    own = None if is_local else hub_id(name)
    inherited = front.get("base_model")
    # a local model that was itself fine-tuned: its base is on the hub
    repository = own or (inherited if isinstance(inherited, str) and hub_id(inherited) else None)
    if directory is not None and (adapter := _read_object(directory / "adapter_config.json")):
        # an adapter only fits the weights it was trained on, which may exist only on this machine
        named = str(adapter.get("base_model_name_or_path") or adapter.get("model") or "")
        repository = None if Path(named).expanduser().exists() else hub_id(named)
    licenses = {key: front[key] for key in ("license", "license_name") if _matches(_LICENSE, front.get(key))}
    if licenses and _matches(_LICENSE_LINK, front.get("license_link")):
        licenses["license_link"] = front["license_link"]
    languages = front.get("language")
    codes = [languages] if isinstance(languages, str) else languages if isinstance(languages, list) else []
    return BaseModel(
        name=public_text(name).rpartition("/")[2],
        hub_id=repository,
        is_inherited=own is None and repository is not None,
        license=licenses if "license" in licenses else {},
        languages=[code for code in codes if _matches(_LANGUAGE, code)],
    )


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _front_matter_of(name: str) -> dict[str, Any]:
    """Return the YAML front matter of a model's card on this machine, or an empty dict."""
    for path in _card_paths(name):
        if not path.is_file() or path.stat().st_size > _MAX_CARD_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        if not text.startswith("---\n"):
            continue
        try:
            front = parse_yaml(text[4:].partition("\n---")[0])
        except (yaml.YAMLError, RecursionError):
            continue
        if isinstance(front, dict):
            return front
    return {}


def _card_paths(name: str) -> Iterator[Path]:
    path = Path(name).expanduser()
    if path.exists():
        yield from (path / FINAL_DIRECTORY / CARD_FILE, path / CARD_FILE)
        return
    try:
        yield config_directory(name) / CARD_FILE
    except WhetError:  # not on this machine
        return


# --- evaluations


def _evaluations(
    run: Path, config: Mapping[str, Any], summary: Mapping[str, Any], step: int | None
) -> Iterator[Evaluation]:
    data = section_of(config, "data")
    if metrics := _numbers(_evaluation_row(run, config, summary, step)):
        yield Evaluation("validation split", metrics, _hub_dataset(data.get("valid")))
    if step is not None:  # the rest was measured on the final model
        return
    test = summary.get("test")
    if isinstance(test, dict) and (metrics := _numbers(test)):
        yield Evaluation("test split", metrics, _hub_dataset(data.get("test")))
    yield from _benchmarks(run, step=_saved_step(config, summary))


def _evaluation_row(
    run: Path, config: Mapping[str, Any], summary: Mapping[str, Any], step: int | None
) -> dict[str, Any]:
    """Return the last evaluation of the saved weights."""
    if step is None and section_of(config, "eval").get("early_stop"):
        step = _saved_step(config, summary)
    rows = [row for row in map(parse_row, split_rows(read_rows_text(run / METRICS_FILE))) if "eval_s" in row]
    rows = [row for row in rows if step is None or row.get("step") == step]
    return rows[-1] if rows else {}


def _saved_step(config: Mapping[str, Any], summary: Mapping[str, Any]) -> int | None:
    """Return the step of the saved weights: the last one; early stopping restores those of the best one."""
    best = summary.get("best")
    is_restored = bool(section_of(config, "eval").get("early_stop")) and isinstance(best, dict)
    step = best.get("step") if is_restored and isinstance(best, dict) else summary.get("steps")
    return step if isinstance(step, int) else None


def _numbers(row: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return the metrics of an evaluation, without times and lists."""
    return {
        name.removeprefix("eval_"): (float(value), None)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name != "step" and not _TIMES.search(name)
    }


def _benchmarks(run: Path, *, step: int | None) -> Iterator[Evaluation]:
    """Yield the latest results of each task and setting, of the final weights."""
    latest: dict[str, dict[str, Any]] = {}
    for row in map(parse_row, split_rows(read_rows_text(run / EVALUATIONS_FILE))):
        is_final = row.get("step") in (None, step)
        if is_final and isinstance(row.get("task"), str) and isinstance(row.get("scores"), dict):
            latest.setdefault(_task_title(row), {}).update(row["scores"])
    for title, scores in latest.items():
        metrics = {
            name: (float(score["value"]), score.get("stderr"))
            for name, score in scores.items()
            if isinstance(score, dict) and isinstance(score.get("value"), int | float)
        }
        if metrics:
            yield Evaluation(title, metrics)


def _task_title(row: Mapping[str, Any]) -> str:
    shots, limit = row.get("shots"), row.get("limit")
    details = [
        f"{shots}-shot" if shots else "",
        f"first {limit} items" if limit is not None else "",
        "chat" if row.get("chat") else "",
    ]
    text = ", ".join(detail for detail in details if detail)
    task = public_text(row["task"])
    return f"{task} ({text})" if text else task
