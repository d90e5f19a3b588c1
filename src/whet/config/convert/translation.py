"""A config of another tool during its translation: the whet keys set so far, and the keys without one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Values = Mapping[str, Any]  # Any: YAML values

_DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst")
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
    **dict.fromkeys(("lion", "lion_pytorch", "lion_32bit", "paged_lion_32bit"), "lion"),
    **dict.fromkeys(("adam", "sgd", "adafactor", "muon"), None),
}


@dataclass
class Translation:
    """Takes keys from a source config and sets whet's keys, remembering where each value came from.

    Every key of the source ends up in one of three groups: translated, not needed in whet, or untranslated.
    """

    tool: str
    source: Values
    directory: Path  # of the source file: relative paths in it start here
    gpus: int = 1
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: YAML values
    comments: dict[str, str] = field(default_factory=dict)  # whet key -> where its value comes from
    not_needed: dict[str, str] = field(default_factory=dict)  # key of the source -> why
    untranslated: dict[str, str] = field(default_factory=dict)  # key of the source -> what to do about it
    _taken: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None) -> Any:  # Any: a YAML value
        """Return a value of the source (`default` if missing or null) and count its key as translated."""
        self._taken.add(key)
        value = self.source.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Return whether the source sets a key."""
        return self.source.get(key) is not None

    def origin(self, key: str) -> str:
        """Return where the value of a key comes from: the key itself, or the tool's default for it."""
        return key if self.has(key) else f"{self.tool}'s default for {key}"

    def set(self, key: str, value: Any, comment: str) -> None:  # Any: a YAML value
        """Set a key of whet's config, with a comment on where the value comes from."""
        section, _, name = key.rpartition(".")
        self.sections.setdefault(section, {})[name] = value
        self.comments[key] = comment

    def move(
        self,
        key: str,
        target: str,
        convert: Callable[[Any], Any] = lambda value: value,  # Any: YAML values
        *,
        default: Any = None,  # Any: as above
    ) -> None:
        """Set `target` from a key of the source, or from the tool's default if the source lacks the key."""
        if self.has(key):
            self.set(target, convert(self.take(key)), key)
        else:
            self._taken.add(key)
            if default is not None:
                self.set(target, default, self.origin(key))

    def skip(self, reason: str, *keys: str) -> None:
        """Count keys as not needed in whet."""
        self.not_needed |= {key: reason for key in keys if self.has(key)}
        self._taken.update(keys)

    def report(self, key: str, reason: str) -> None:
        """Count a key as untranslated, with what to do about it."""
        self._taken.add(key)
        self.untranslated[key] = reason

    def report_rest(self, hints: Mapping[str, str]) -> None:
        """Count every key that nothing has taken as untranslated; null and false values change nothing."""
        for key, value in self.source.items():
            if key not in self._taken and value not in (None, False, "", [], {}):
                self.untranslated[key] = hints.get(key, "whet has no such setting")

    # ------------------------------------------------------------------ rules that several tools share

    def set_optimizer(self, key: str) -> None:
        """Translate the name of an optimizer."""
        if not self.has(key):
            return
        name = str(self.take(key)).removeprefix("OptimizerNames.").lower()
        if name not in _OPTIMIZERS:
            self.report(
                key, "whet has no such optimizer; adamw is used: docs/optimizers.md lists the choices"
            )
            return
        self.set("optim.name", _OPTIMIZERS[name] or name, key)

    def set_schedule(self, key: str, *, default: str) -> None:
        """Translate the name of a learning-rate schedule; those of other tools end at 0."""
        name = str(self.take(key, default)).removeprefix("SchedulerType.").lower()
        comment = self.origin(key)
        if name not in _SCHEDULES:
            self.report(key, "whet has no such schedule; cosine is used")
            name = "cosine"
        self.set("optim.schedule", _SCHEDULES[name], comment)
        if _SCHEDULES[name] in ("linear", "cosine", "wsd"):
            self.set("optim.min_lr_ratio", 0.0, f"{self.tool}'s schedules end at 0")

    def set_batch(self, rows: int, accumulation: int, comment: str, *, packed_length: int | None) -> None:
        """Set the size of a step: examples, or tokens where the tool packs rows of `packed_length` tokens."""
        count = rows * accumulation * self.gpus
        if self.gpus > 1:
            comment += f" * {self.gpus} GPUs"
        if packed_length is None:
            self.set("run.batch_size", count, comment)
        else:
            self.set("run.batch_tokens", count * packed_length, f"{comment} packed rows of {packed_length}")

    def set_output(self, key: str, *, default: str) -> None:
        """Split an output directory into run.dir and run.name."""
        path = Path(str(self.take(key, default)))
        comment = self.origin(key)
        self.set("run.name", path.name or "run", comment)
        if str(path.parent) not in (".", ""):
            self.set("run.dir", str(path.parent), comment)

    def source_name(self, path: str, *, config: str | None = None, split: str | None = None) -> str:
        """Return a data set as whet names it: a path if it is one, else hf:NAME."""
        if (
            path.endswith(_DATA_SUFFIXES)
            or path.startswith((".", "/", "~"))
            or (self.directory / path).exists()
        ):
            return path
        parts = [f"hf:{path}", config or "", split or ""]
        return ":".join(parts).rstrip(":")

    def set_data(self, key: str, names: list[str], comment: str) -> None:
        """Set a data source: one name, or a list."""
        if names:
            self.set(key, names[0] if len(names) == 1 else names, comment)

    # ------------------------------------------------------------------ the result

    def values(self) -> dict[str, Any]:  # Any: YAML values
        """Return the translated config as plain values."""
        values: dict[str, Any] = dict(self.sections.get("", {}))  # Any: as above
        for name in _ORDER:
            section, _, inner = name.partition(".")
            if keys := self.sections.get(name):
                target = values.setdefault(section, {})
                (target.setdefault(inner, {}) if inner else target).update(keys)
        return values

    def to_yaml(self, origin: str) -> str:
        """Return the config with a comment per key, followed by every key that has no counterpart."""
        lines = [f"# Converted from {self.tool}: {origin}"]
        for name, value in self.values().items():
            if isinstance(value, Mapping):
                lines += ["", f"{name}:"]
                lines += [
                    _line(f"  {key}", each, self.comments.get(f"{name}.{key}")) for key, each in value.items()
                ]
            else:
                lines.append(_line(name, value, self.comments.get(name)))
        for title, keys in (
            ("Not translated. Decide about each of these:", self.untranslated),
            ("Not needed in whet:", self.not_needed),
        ):
            if keys:
                lines += ["", f"# {title}"]
                lines += [f"#   {key}: {_inline(self.source.get(key))}  ({why})" for key, why in keys.items()]
        mentioned = " ".join((*self.comments.values(), *self.untranslated, *self.not_needed))
        if combined := [key for key in self.source if self.has(key) and key not in mentioned]:
            lines += [
                "",
                f"# Read together with the keys above, or at the tool's default: {', '.join(combined)}",
            ]
        return "\n".join(lines) + "\n"


_ORDER = (
    *("method", "objective", "data", "optim", "eval", "eval.early_stop"),
    *("checkpoint", "log", "run", "parallel"),
)


def _line(key: str, value: Any, comment: str | None) -> str:  # Any: a YAML value
    text = f"{key}: {_inline(value)}"
    return f"{text:<44}  # {comment}" if comment else text


def _inline(value: Any) -> str:  # Any: a YAML value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.strip().removesuffix("\n...").strip()
