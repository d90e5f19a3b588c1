"""axolotl: the YAML file of `axolotl train`."""

from typing import Any

from whet.config.convert.training_arguments import (
    set_adam,
    set_interval,
    set_length,
    set_parallel,
    set_rewards,
)
from whet.config.convert.translation import Translation, Values

_OBJECTIVES = ("dpo", "ipo", "orpo", "simpo", "grpo")
_GRPO_KEYS = {
    "num_generations": "group_size",
    "max_completion_length": "max_new_tokens",
    "beta": "beta",
    "temperature": "temperature",
    "epsilon": "epsilon",
    "epsilon_high": "epsilon_high",
    "num_iterations": "inner_epochs",
}


def is_config(source: Values) -> bool:
    """Return whether a mapping looks like a config of axolotl."""
    return "base_model" in source


def translate(t: Translation) -> None:
    """Translate all keys."""
    t.move("base_model", "model")
    _translate_method(t)
    _translate_objective(t)
    _translate_data(t)
    length = t.take("sequence_len", 512)
    t.set(
        "data.max_length",
        length,
        t.origin("sequence_len"),
    )
    packed = bool(t.take("sample_packing", False))
    t.set(
        "data.pack",
        packed,
        t.origin("sample_packing"),
    )
    rows, accumulation = t.take("micro_batch_size", 1), t.take("gradient_accumulation_steps", 1)
    t.set_batch(
        rows,
        accumulation,
        f"micro_batch_size {rows} * gradient_accumulation_steps {accumulation}",
        packed_length=length if packed else None,
    )
    group = t.sections.get("objective", {}).get("group_size")
    if group is not None:  # axolotl counts completions, whet prompts
        completions = t.sections["run"].get("batch_size", group)
        t.set("run.batch_size", max(1, completions // group), "completions per step / trl.num_generations")
    set_length(t, "num_epochs", default=1)
    _translate_optimizer(t)
    _translate_run(t)


def _translate_method(t: Translation) -> None:
    adapter = t.take("adapter")
    four_bits = bool(t.take("load_in_4bit", False))
    if t.take("load_in_8bit", False):
        t.report(
            "load_in_8bit", "whet has no 8-bit base: lora keeps it in 16 bits, qlora stores it in 4 bits"
        )
    if adapter is None:
        t.set("method.kind", "full", "there is no adapter")
        t.skip(
            "without adapters",
            "lora_r",
            "lora_alpha",
            "lora_dropout",
            "lora_target_modules",
            "lora_target_linear",
        )
        return
    t.set("method.kind", "qlora" if adapter == "lora" and four_bits else adapter, "adapter")
    if adapter not in ("lora", "qlora"):
        t.report("adapter", f"whet has lora and qlora, not {adapter}")
    t.move("lora_r", "method.rank")
    t.move("lora_alpha", "method.alpha")
    t.move("lora_dropout", "method.dropout")
    if t.take("lora_target_linear", False):
        t.set("method.targets", "all-linear", "lora_target_linear")
        t.take("lora_target_modules")
    else:
        t.move("lora_target_modules", "method.targets")
    t.move("lora_modules_to_save", "method.modules_to_save")
    t.move("lora_rank_pattern", "method.rank_pattern")
    t.move("lora_alpha_pattern", "method.alpha_pattern")
    t.move("peft_layers_to_transform", "method.layers")
    t.move("loraplus_lr_ratio", "method.lr_ratio")
    for key, variant in (("peft_use_dora", "dora"), ("peft_use_rslora", "rslora")):
        if t.take(key):
            t.set("method.variant", variant, key)
    if str(t.take("peft_init_lora_weights", "")).startswith("pissa"):
        t.set("method.variant", "pissa", "peft_init_lora_weights")
    if t.has("lora_model_dir"):
        t.report("lora_model_dir", "set `model` to that adapter, and method.continue to true")
    t.skip(
        "whet chooses its kernels itself",
        "lora_mlp_kernel",
        "lora_qkv_kernel",
        "lora_o_kernel",
        "lora_embedding_kernel",
    )


def _translate_objective(t: Translation) -> None:
    kind = t.take("rl")
    if kind is None:
        return
    kind = str(kind).lower()
    t.set("objective.kind", kind, "rl")
    if kind not in _OBJECTIVES:
        t.report("rl", f"whet has {', '.join(_OBJECTIVES)}, not {kind}")
    for key in ("rl_beta", "dpo_beta", "orpo_alpha"):
        if t.has(key):
            t.set("objective.beta", t.take(key), key)
    t.move("simpo_gamma", "objective.gamma")
    t.move("dpo_label_smoothing", "objective.label_smoothing")
    if kind == "ipo":
        t.set("objective.logprobs", "mean", "axolotl uses TRL's ipo, which averages over tokens")
    if kind == "grpo":
        _translate_grpo(t)


def _translate_grpo(t: Translation) -> None:
    settings = t.take("trl", {})
    for key, value in settings.items():
        if key in _GRPO_KEYS:
            t.set(f"objective.{_GRPO_KEYS[key]}", value, f"trl.{key}")
        elif key.startswith(("use_vllm", "vllm")):
            t.not_needed[f"trl.{key}"] = "whet generates with its own engine"
        elif key not in ("reward_funcs", "reward_weights"):
            t.untranslated[f"trl.{key}"] = "whet has no such setting"
    set_rewards(t, settings.get("reward_funcs"), settings.get("reward_weights"), "trl.reward_funcs")


def _translate_data(t: Translation) -> None:
    for key, target in (("datasets", "data.train"), ("test_datasets", "data.valid")):
        entries = t.take(key, [])
        t.set_data(target, [_source(t, key, entry) for entry in entries], key)
    if pretraining := t.take("pretraining_dataset"):
        entries = pretraining if isinstance(pretraining, list) else [pretraining]
        names = [each if isinstance(each, str) else str(each.get("path")) for each in entries]
        t.set_data("data.train", [t.source_name(name) for name in names], "pretraining_dataset")
    share = t.take("val_set_size", 0)
    if share:
        t.set("data.valid", share, "val_set_size")
    if t.take("train_on_inputs", False):
        t.set("data.supervise", "all", "train_on_inputs")
    template = t.take("chat_template", "tokenizer_default")
    if template != "tokenizer_default":
        t.report("chat_template", "whet uses the model's own chat template: compare with `whet data CONFIG`")
    t.skip(
        "token stores are reused when their inputs are equal", "dataset_prepared_path", "dataset_processes"
    )
    t.skip("whet packs evaluation as it packs training", "eval_sample_packing", "pad_to_sequence_len")
    t.skip("whet never overwrites a tokenizer's files", "tokenizer_type", "model_type")
    if t.has("special_tokens"):
        t.report(
            "special_tokens",
            "padding needs no token in whet; other special tokens are those of the tokenizer",
        )


def _source(t: Translation, key: str, entry: dict[str, Any]) -> str:  # Any: YAML values
    files = entry.get("data_files")
    path = str(files[0] if isinstance(files, list) else files) if files else str(entry.get("path"))
    kind = entry.get("type")
    if isinstance(kind, dict) or any(name.startswith(("field", "message_")) for name in entry):
        t.untranslated[f"{key}: {path}"] = f"rename its columns to whet's (docs/data.md): {entry}"
    if (roles := entry.get("roles_to_train")) and roles != ["assistant"]:
        t.untranslated[f"{key}: roles_to_train"] = "data.supervise chooses the supervised turns"
    return t.source_name(path, config=entry.get("name"), split=entry.get("split"))


def _translate_optimizer(t: Translation) -> None:
    t.set_optimizer("optimizer")
    t.move("learning_rate", "optim.lr", float)
    t.set_schedule("lr_scheduler", default="cosine")
    if t.has("cosine_min_lr_ratio"):
        t.move("cosine_min_lr_ratio", "optim.min_lr_ratio")
    if t.has("warmup_steps"):
        t.move("warmup_steps", "optim.warmup")
    else:
        t.move("warmup_ratio", "optim.warmup", float, default=0.03)
    t.move("weight_decay", "optim.weight_decay")
    t.move("max_grad_norm", "optim.clip", lambda norm: norm or None)
    set_adam(t)


def _translate_run(t: Translation) -> None:
    bf16, fp16 = t.take("bf16"), t.take("fp16")
    if fp16:
        t.set("run.precision", "fp16", "fp16")
    elif bf16:
        t.set("run.precision", "auto" if bf16 == "auto" else "bf16", "bf16")
    t.move("gradient_checkpointing", "run.grad_checkpoint", bool)
    t.move("torch_compile", "run.compile", lambda value: value is True)
    t.move("seed", "run.seed", default=42)
    _translate_intervals(t)
    t.set_output("output_dir", default="./model-out")
    sinks = {"wandb_project": "wandb", "mlflow_tracking_uri": "mlflow", "use_tensorboard": "tensorboard"}
    if names := [sink for key, sink in sinks.items() if t.take(key)]:
        t.set("log.sinks", names, "wandb_project, mlflow_tracking_uri, use_tensorboard")
    set_parallel(t, "deepspeed", "fsdp", "fsdp_config")
    t.skip(
        "whet chooses it itself",
        *(
            "attn_implementation",
            "flash_attention",
            "sdp_attention",
            "xformers_attention",
            "eager_attention",
            "tf32",
        ),
        *("eval_batch_size", "group_by_length", "gradient_checkpointing_kwargs", "plugins", "liger_rope"),
        *("liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy", "liger_layer_norm"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "strict"),
    )
    t.skip("`whet resume RUN` resumes a run", "resume_from_checkpoint", "auto_resume_from_checkpoints")
    t.skip("only safetensors are written", "save_safetensors")
    t.skip("files are safe tensors of known formats: no remote code runs", "trust_remote_code")


def _translate_intervals(t: Translation) -> None:
    for key, target in (
        ("eval_steps", "eval.every"),
        ("save_steps", "checkpoint.every"),
        ("logging_steps", "log.every"),
    ):
        if t.has(key):
            set_interval(t, key, target)
    for key, target in (("evals_per_epoch", "eval.every"), ("saves_per_epoch", "checkpoint.every")):
        if t.has(key):
            t.report(
                key, f"set {target} to the steps of an epoch / {t.take(key)} (whet data shows the steps)"
            )
    t.move("save_total_limit", "checkpoint.keep")
    t.move("early_stopping_patience", "eval.early_stop.patience")
