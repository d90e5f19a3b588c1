"""LLaMA-Factory: the YAML file of `llamafactory-cli train`."""

import json
from typing import Any

from whet.config.convert.training_arguments import translate_training_arguments
from whet.config.convert.translation import Translation, Values

_PREFERENCE_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def is_config(source: Values) -> bool:
    """Return whether a mapping looks like a config of LLaMA-Factory."""
    return "model_name_or_path" in source and any(
        key in source for key in ("stage", "finetuning_type", "template")
    )


def translate(t: Translation) -> None:
    """Translate all keys."""
    t.move("model_name_or_path", "model")
    _translate_method(t)
    _translate_objective(t)
    _translate_data(t)
    length = t.take("cutoff_len", 2048)
    t.set(
        "data.max_length",
        length,
        t.origin("cutoff_len"),
    )
    stage = t.source.get("stage", "sft")
    packed = bool(t.take("packing", stage == "pt")) or bool(t.take("neat_packing", False))
    t.set("data.pack", packed, t.origin("packing"))
    if packed and not t.source.get("neat_packing") and stage != "pt":
        t.report("packing", "packed examples never attend to each other in whet, as with neat_packing: true")
    translate_training_arguments(t, lr=5e-5, packed_length=length if packed else None)
    t.skip("whet chooses it itself", "disable_gradient_checkpointing", "upcast_layernorm", "use_unsloth")
    t.skip("token stores are reused when their inputs are equal", "overwrite_cache", "tokenized_path")
    t.skip("files are safe tensors of known formats: no remote code runs", "trust_remote_code")
    if t.has("template"):
        t.report("template", "whet uses the model's own chat template: compare with `whet data CONFIG`")


def _translate_method(t: Translation) -> None:
    kind, bits = t.take("finetuning_type", "lora"), t.take("quantization_bit")
    if kind == "lora":
        t.set(
            "method.kind",
            "lora" if bits is None else "qlora",
            "finetuning_type" if bits is None else "quantization_bit",
        )
    else:
        t.set("method.kind", kind, "finetuning_type")
    if kind not in ("lora", "full"):
        t.report("finetuning_type", f"whet has full, lora and qlora, not {kind}")
    if bits not in (None, 4):
        t.report("quantization_bit", "qlora stores the base in 4 bits")
    t.skip(
        "qlora is NF4 with double quantization",
        "quantization_method",
        "double_quantization",
        "quantization_type",
    )
    if kind != "lora":
        t.skip("without adapters", "lora_rank", "lora_alpha", "lora_dropout", "lora_target")
        return
    rank = t.take("lora_rank", 8)
    t.set("method.rank", rank, t.origin("lora_rank"))
    t.move("lora_alpha", "method.alpha", default=2 * rank)
    t.move("lora_dropout", "method.dropout")
    t.move("lora_target", "method.targets", _targets)
    t.move("additional_target", "method.modules_to_save", _names)
    t.move("loraplus_lr_ratio", "method.lr_ratio")
    for key, variant in (("use_dora", "dora"), ("use_rslora", "rslora"), ("pissa_init", "pissa")):
        if t.take(key):
            t.set("method.variant", variant, key)
    if t.has("adapter_name_or_path"):
        t.report("adapter_name_or_path", "set `model` to that adapter, and method.continue to true")


def _targets(value: str) -> str | list[str]:
    return "all-linear" if value == "all" else _names(value)


def _names(value: str | list[str]) -> list[str]:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _translate_objective(t: Translation) -> None:
    stage = t.take("stage", "sft")
    if stage == "dpo":
        loss = t.take("pref_loss", "sigmoid")
        t.set(
            "objective.kind",
            _PREFERENCE_LOSSES.get(loss, loss),
            "pref_loss" if t.has("pref_loss") else "stage",
        )
        if loss not in _PREFERENCE_LOSSES:
            t.report("pref_loss", f"whet has {', '.join(_PREFERENCE_LOSSES)}, not {loss}")
        t.move("pref_beta", "objective.beta", default=0.1)
        if loss == "simpo":
            t.move("simpo_gamma", "objective.gamma", default=0.5)
        t.move("dpo_label_smoothing", "objective.label_smoothing")
        t.move("ref_model", "objective.reference_model")
    elif stage not in ("sft", "pt"):
        t.set("objective.kind", stage, "stage")
        t.report("stage", f"whet has sft, pt and dpo of LLaMA-Factory's stages, not {stage}")


def _translate_data(t: Translation) -> None:
    for key, target in (("dataset", "data.train"), ("eval_dataset", "data.valid")):
        if t.has(key):
            names = [_source(t, name) for name in _names(t.take(key))]
            t.set_data(target, [name for name in names if name], key)
    if t.take("val_size", 0):
        t.set("data.valid", t.take("val_size"), "val_size")
    t.take("dataset_dir")
    if t.take("train_on_prompt"):
        t.set("data.supervise", "all", "train_on_prompt")
    elif t.take("mask_history"):
        t.set("data.supervise", "last", "mask_history")
    if t.has("max_samples"):
        t.report("max_samples", "whet reads all records: shorten the file, or use hf:NAME:train[:N]")


def _source(t: Translation, name: str) -> str:
    """Return the file or hub name behind a name in dataset_info.json."""
    info = _dataset_info(t).get(name)
    directory = str(t.source.get("dataset_dir") or "data")
    if info is None:
        t.untranslated[f"dataset {name}"] = (
            f"{directory}/dataset_info.json has no such entry: write the path of its file in data.train"
        )
        return name
    if columns := info.get("columns"):
        t.untranslated[f"dataset {name}: columns"] = (
            f"rename the columns {json.dumps(columns)} to whet's: docs/data.md"
        )
    if hub := info.get("hf_hub_url"):
        return t.source_name(str(hub), config=info.get("subset"), split=info.get("split"))
    return f"{directory}/{info['file_name']}" if "file_name" in info else name


def _dataset_info(t: Translation) -> dict[str, Any]:  # Any: JSON values
    path = t.directory / str(t.source.get("dataset_dir") or "data") / "dataset_info.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}
