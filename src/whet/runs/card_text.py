"""The text of a model card: YAML front matter as the Hugging Face hub reads it, then Markdown.

A card is meant to be published: it contains no absolute path, no user or host name, and no credentials.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # everywhere below: values of a config, and of YAML

import yaml

PLACEHOLDER = "path/to/this/model"  # in the examples of a card; `whet push` replaces it by the repository
BASE_PLACEHOLDER = "path/to/the/base/model"

_MARKER = re.compile(r"\n<!-- Written by whet [^\n]*sha256 ([0-9a-f]{16})[^\n]* -->\n\Z")
_HUB_METRICS = ("perplexity", "exact_match", "accuracy", "f1", "mcc", "rouge", "bleu")
_METHODS = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
_SECRET = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|wandb_)[A-Za-z0-9_-]{8,}")
_URL_USER = re.compile(r"(\w+://)[^/@\s]+@")
_ABSOLUTE = re.compile(r"[/~\\]|\.\.?[/\\]|[A-Za-z]:[\\/]|file:")  # at the start of a value
_PATH = re.compile(r"(?<![\w/.])/(?:[\w.@~+-]+/)+([\w.@~+-]+)")  # within a text
_FILE = re.compile(r"[^:]*/[^/]+\.(jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|gguf|py|gz|bz2|xz|zst)(:[\w.]+)?")
_HOME = re.compile(r"(?:/(?:home|Users)/[^/\s:'\"]+|/root|[A-Za-z]:\\Users\\[^\\\s:'\"]+)(?=[/\\]|\b)")


@dataclass(frozen=True)
class BaseModel:
    """The model that training started from, as far as it is known."""

    name: str  # without directories
    hub_id: str | None = None
    is_inherited: bool = False  # the hub's model is not this one, but the one that this one was made from
    license: Mapping[str, str] = field(default_factory=dict)  # license, license_name, license_link
    languages: Sequence[str] = ()


@dataclass(frozen=True)
class Evaluation:
    """Metrics on one split or one benchmark task."""

    name: str
    metrics: Mapping[str, tuple[float, float | None]]  # value and standard error
    dataset: str | None = None  # on the hub


@dataclass(frozen=True)
class CardFacts:
    """Everything that a card states."""

    title: str
    library: str  # transformers, peft, mlx or whet
    task: str  # the hub's pipeline tag
    is_chat: bool = False
    base: BaseModel | None = None  # None: trained from scratch
    is_quantized: bool = False
    quantization: str = ""  # the library that reads the quantized weights
    config: Mapping[str, Any] | None = None  # None: not the result of a run
    datasets: Sequence[str] = ()  # on the hub
    evaluations: Sequence[Evaluation] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # of the training, by label
    version: str = ""  # of whet


def render_card(facts: CardFacts) -> str:
    """Return the text of README.md. Equal facts give equal text."""
    front = yaml.safe_dump(_front_matter(facts), sort_keys=False, allow_unicode=True, width=10_000)
    parts = [f"# {escape_text(facts.title)}", _introduction(facts) + _quantization(facts), *_examples(facts)]
    if facts.facts:
        parts += ["## Training", _table(("", ""), [(name, value) for name, value in facts.facts.items()])]
    if facts.evaluations:
        heading = "## Evaluation before quantization" if facts.is_quantized else "## Evaluation"
        parts += [heading, _evaluation_table(facts.evaluations)]
    if facts.config is not None:
        parts.append(_config_block(facts.config))
    text = f"---\n{front}---\n\n" + "\n\n".join(parts) + "\n"
    return f"{text}\n<!-- Written by whet {facts.version}; sha256 {_digest(text)} of the text above. -->\n"


def is_unedited(text: str) -> bool:
    """Return whether a card is as whet wrote it, so that a new one may replace it."""
    marker = _MARKER.search(text)
    return marker is not None and marker[1] == _digest(text[: marker.start()])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _front_matter(facts: CardFacts) -> dict[str, Any]:
    base = facts.base
    config = facts.config or {}
    front: dict[str, Any] = {}
    if base is not None:
        front |= {"language": list(base.languages)} if base.languages else {}
        front |= dict(base.license)
    front |= {"library_name": facts.library, "pipeline_tag": facts.task}
    if base is not None and base.hub_id is not None:
        front |= {"base_model": base.hub_id, "base_model_relation": _relation(facts)}
    if facts.datasets:
        front["datasets"] = list(facts.datasets)
    names = {name for evaluation in facts.evaluations for name in evaluation.metrics}
    if metrics := [name for name in _HUB_METRICS if name in names or f"{name}_macro" in names]:
        front["metrics"] = metrics
    front["tags"] = list(dict.fromkeys(["whet", *_tags(config)]))
    # the results of a run are not those of its quantized weights
    if (results := list(_index_results(facts))) and not facts.is_quantized:
        front["model-index"] = [{"name": facts.title, "results": results}]
    return front


def _relation(facts: CardFacts) -> str:
    if facts.library in ("peft", "mlx"):
        return "adapter"
    is_copy = facts.config is None and facts.base is not None and not facts.base.is_inherited
    return "quantized" if facts.is_quantized and is_copy else "finetune"


def _tags(config: Mapping[str, Any]) -> Iterator[str]:
    objective, method = section_of(config, "objective"), section_of(config, "method")
    has_adapter = str(method.get("kind")).endswith("lora")
    for value in (objective.get("kind"), method.get("kind"), method.get("variant") if has_adapter else None):
        if isinstance(value, str):
            yield value


def _index_results(facts: CardFacts) -> Iterator[dict[str, Any]]:
    for evaluation in facts.evaluations:
        metrics = [
            {"type": name, "name": name.replace("_", " "), "value": float(f"{value:.6g}")}
            for name, (value, _) in evaluation.metrics.items()
            if math.isfinite(value)
        ]
        if metrics:
            dataset = {"type": evaluation.dataset or "other", "name": evaluation.name}
            yield {"task": {"type": facts.task}, "dataset": dataset, "metrics": metrics}


def _introduction(facts: CardFacts) -> str:
    base = facts.base
    kind = {"peft": "An adapter", "mlx": "An adapter for mlx-lm"}.get(facts.library, "A model")
    if facts.config is None:
        origin = "" if base is None else f" of {_source_text(base)}"
        return f"{'A copy' if kind == 'A model' else kind}{origin}, written by `whet export`."
    if base is None:
        return f"{kind}, trained from scratch with whet."
    return f"{kind}, fine-tuned from {_base_text(base)} with whet."


def _quantization(facts: CardFacts) -> str:
    if not facts.quantization:
        return ""
    return (
        f" Its linear layers are quantized; transformers loads them with {escape_code(facts.quantization)}."
    )


def _source_text(base: BaseModel) -> str:
    """Return the model that was copied."""
    return (
        f"{escape_code(base.name)}, made from {_base_text(base)}" if base.is_inherited else _base_text(base)
    )


def _base_text(base: BaseModel) -> str:
    return escape_code(base.name) if base.hub_id is None else f"[{base.hub_id}](https://hf.co/{base.hub_id})"


def _evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    rows = [
        (evaluation.name, escape_code(name), f"{value:.4g}", "" if error is None else f"± {error:.2g}")
        for evaluation in evaluations
        for name, (value, error) in evaluation.metrics.items()
    ]
    return _table(("data", "metric", "value", "standard error"), rows)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in lines)


def _cell(text: str) -> str:
    """Return a table cell; inline code and the line below the heading stay as they are."""
    return text.replace("|", "\\|") if text == "---" or text.startswith("`") else escape_text(text)


def _config_block(config: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(public_config(config), sort_keys=False, allow_unicode=True)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"<details>\n<summary>Config</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>"


# --- examples


def _examples(facts: CardFacts) -> Iterator[str]:
    yield "## Use"
    if facts.task == "text-classification":
        if facts.library == "transformers":
            yield _python_block(_CLASSIFY_TRANSFORMERS)
        yield _python_block(_CLASSIFY_WHET)
        return
    if facts.task != "text-generation":
        yield _python_block(_QUALITY_WHET)
        return
    if facts.library in ("transformers", "peft"):
        load = _LOAD_PEFT if facts.library == "peft" else _LOAD_TRANSFORMERS
        inputs = _CHAT_INPUTS if facts.is_chat else _TEXT_INPUTS
        yield _python_block(load.replace("BASE", _base_or_placeholder(facts)) + inputs + _GENERATE)
    if facts.library == "mlx":
        command = f"mlx_lm.generate --model {_base_or_placeholder(facts)} --adapter-path {PLACEHOLDER}"
        yield f"```bash\n{command} --prompt Hello\n```"
    prompt = "What is a whetstone?" if facts.is_chat else "Once upon a time"
    yield _python_block(_WHET.replace("PROMPT", prompt))


def _base_or_placeholder(facts: CardFacts) -> str:
    return facts.base.hub_id if facts.base and facts.base.hub_id else BASE_PLACEHOLDER


def _python_block(code: str) -> str:
    return f"```python\n{code.strip().replace('MODEL', PLACEHOLDER)}\n```"


_LOAD_TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "MODEL"  # a directory, or a repository on the hub
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
"""
_LOAD_PEFT = """
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "MODEL"  # a directory, or a repository on the hub
tokenizer = AutoTokenizer.from_pretrained(name)
base = AutoModelForCausalLM.from_pretrained("BASE")
model = PeftModel.from_pretrained(base, name)
"""
_CHAT_INPUTS = """
messages = [{"role": "user", "content": "What is a whetstone?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
"""
_TEXT_INPUTS = """
inputs = tokenizer("Once upon a time", return_tensors="pt")
"""
_GENERATE = """output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
_WHET = """
import whet

model, tokenizer = whet.load("MODEL")
print(whet.generate(model, tokenizer, "PROMPT", max_tokens=64))
"""
_CLASSIFY_TRANSFORMERS = """
from transformers import pipeline

print(pipeline("text-classification", "MODEL")("A text to classify"))
"""
_CLASSIFY_WHET = """
import whet

print(whet.Classifier.load("MODEL").predict(["A text to classify"]))
"""
_QUALITY_WHET = """
from whet.recipes.quality.tabular_model import load_quality

model = load_quality("MODEL")
"""


# --- what may be published


def training_facts(
    config: Mapping[str, Any], provenance: Mapping[str, Any], summary: Mapping[str, Any]
) -> dict[str, str]:
    """Return what the card's table says about the training, by label."""
    method, objective, optim, run = (
        section_of(config, key) for key in ("method", "objective", "optim", "run")
    )
    kind = str(method.get("kind", ""))
    rank = f", rank {method.get('rank')}, alpha {method.get('alpha')}" if kind.endswith("lora") else ""
    variant = f" ({method['variant']})" if method.get("variant") not in (None, "lora") else ""
    sources = ", ".join(public_text(name) for name in source_names(section_of(config, "data").get("train")))
    reason = summary.get("stopped_because")
    tokens = summary.get("tokens")
    versions = section_of(provenance, "versions")
    values = {
        "objective": str(objective.get("kind", "")),
        "method": f"{_METHODS.get(kind, kind)}{variant}{rank}" if kind else "",
        "training data": sources,
        "steps": f"{summary.get('steps')}" + ("" if reason in (None, "finished") else f" ({reason})"),
        "tokens": f"{tokens:,}" if isinstance(tokens, int) else "",
        "optimizer": f"{optim.get('name')}, learning rate {optim.get('lr')}" if optim else "",
        "precision": str(run.get("precision", "")),
        "device": str(section_of(provenance, "machine").get("device", "")),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return {name: public_text(value) for name, value in values.items() if value}


def source_names(spec: Any) -> Iterator[str]:
    """Yield the names of the sources of a data key: a string, a list, or a list with weights."""
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec, Mapping):
        yield from source_names(spec.get("source"))
    elif isinstance(spec, Sequence):
        for item in spec:
            yield from source_names(item)


def section_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section, or an empty one if it is missing or not a mapping."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def public_config(config: Mapping[str, Any]) -> Any:
    """Return a config whose paths have no directories, without `log` and run.dir."""
    values = {name: _public_value(value) for name, value in config.items() if name != "log"}
    if isinstance(values.get("run"), dict):
        values["run"].pop("dir", None)
    return values


def _public_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_public_value(name): _public_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_public_value(inner) for inner in value]
    return public_text(value) if isinstance(value, str) else value


def public_text(text: str) -> str:
    """Return a text without local directories, home directories, or credentials."""
    text = _URL_USER.sub(r"\1", _SECRET.sub(r"\1***", text))
    if _ABSOLUTE.match(text) or _FILE.fullmatch(text) or _is_local_path(text):
        text = re.split(r"[/\\]", text.rstrip("/\\"))[-1] or "."
    for directory in (str(Path.cwd()), str(Path.home())):
        text = text.replace(f"{directory}/", "~/") if directory != "/" else text
    return _PATH.sub(r"\1", _HOME.sub("~", text))


def _is_local_path(text: str) -> bool:
    """Return whether a text with a slash names an existing file or directory, which may be a user's."""
    try:
        return "/" in text and len(text) < 4096 and Path(text).exists()
    except (OSError, ValueError):  # not a valid path
        return False


def escape_text(text: str) -> str:
    """Return a single line in which Markdown, HTML and table cells have no special characters."""
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", " ".join(text.split()))


def escape_code(text: str) -> str:
    """Return a text as inline code."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
