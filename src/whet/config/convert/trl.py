"""TRL: the arguments of `trl sft`, `trl dpo` and `trl grpo`, as a YAML file or the JSON that a run writes."""

from whet.config.convert.training_arguments import set_rewards, translate_training_arguments
from whet.config.convert.translation import Translation, Values

_LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "grpo": 1e-6}
_DPO_LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
_GRPO_LOSSES = {"dapo": "token", "grpo": "sequence", "dr_grpo": "constant"}


def is_config(source: Values) -> bool:
    """Return whether a mapping looks like TRL's arguments."""
    keys = (
        "per_device_train_batch_size",
        "dataset_name",
        "use_peft",
        "num_generations",
        "dataset_train_split",
    )
    return ("model_name_or_path" in source and any(key in source for key in keys)) and "stage" not in source


def translate(t: Translation) -> None:
    """Translate all keys."""
    kind = _kind(t.source)
    t.move("model_name_or_path", "model")
    translate_peft(t)
    _translate_data(t)
    length = t.take("max_length", 1024)
    t.set("data.max_length", length, t.origin("max_length"))
    packed = bool(t.take("packing", False))
    if kind == "sft":
        t.set("data.pack", packed, t.origin("packing"))
    translate_training_arguments(t, lr=_LEARNING_RATES[kind], packed_length=length if packed else None)
    if kind == "sft":
        _translate_supervision(t)
    elif kind == "dpo":
        _translate_dpo(t)
    else:
        _translate_grpo(t)
    t.skip("whet computes the loss at supervised positions only", "loss_type" if kind == "sft" else "")
    t.skip(
        "files are safe tensors of known formats: no remote code runs", "trust_remote_code", "model_revision"
    )


def _kind(source: Values) -> str:
    if any(key in source for key in ("num_generations", "max_completion_length", "reward_funcs")):
        return "grpo"
    return "dpo" if "beta" in source or "precompute_ref_log_probs" in source else "sft"


def translate_peft(t: Translation) -> None:
    """Translate the keys of TRL's ModelConfig that describe adapters."""
    four_bits, eight_bits = t.take("load_in_4bit", False), t.take("load_in_8bit", False)
    if not t.take("use_peft", False):
        t.set("method.kind", "full", "use_peft: false")
        t.skip("without use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
        return
    t.set("method.kind", "qlora" if four_bits else "lora", "load_in_4bit" if four_bits else "use_peft")
    if eight_bits:
        t.report("load_in_8bit", "whet has no 8-bit base: method.kind qlora stores it in 4 bits")
    t.move("lora_r", "method.rank", default=16)
    t.move("lora_alpha", "method.alpha", default=32)
    t.move("lora_dropout", "method.dropout", default=0.05)
    t.move("lora_target_modules", "method.targets", _targets)
    t.move("lora_modules_to_save", "method.modules_to_save")
    for key, variant in (("use_dora", "dora"), ("use_rslora", "rslora")):
        if t.take(key):
            t.set("method.variant", variant, key)
    t.skip("qlora is NF4 with double quantization", "bnb_4bit_quant_type", "use_bnb_nested_quant")
    t.skip("it follows from the run", "lora_task_type", "dtype")


def _targets(value: str | list[str]) -> str | list[str]:
    return value[0] if isinstance(value, list) and value == ["all-linear"] else value


def _translate_data(t: Translation) -> None:
    datasets = t.take("datasets")
    if datasets:
        names = [
            t.source_name(str(each.get("path")), config=each.get("name"), split=each.get("split"))
            for each in datasets
        ]
        t.set_data("data.train", names, "datasets")
    elif t.has("dataset_name"):
        config = t.take("dataset_config")
        split = str(t.take("dataset_train_split", "train"))
        name = t.source_name(str(t.take("dataset_name")), config=config, split=split)
        t.set("data.train", name, "dataset_name")
        if str(t.take("eval_strategy", "no")) != "no":
            test = str(t.take("dataset_test_split", "test"))
            valid = t.source_name(str(t.take("dataset_name")), config=config, split=test)
            t.set("data.valid", valid, "dataset_test_split")
        else:
            t.skip("there is no evaluation without eval_strategy", "dataset_test_split")
    if t.has("dataset_text_field") and t.take("dataset_text_field") != "text":
        t.report("dataset_text_field", "rename the column to text")


def _translate_supervision(t: Translation) -> None:
    if t.take("assistant_only_loss", False):
        t.set("data.supervise", "assistant", "assistant_only_loss")
    elif t.has("completion_only_loss") and not t.take("completion_only_loss"):
        t.set("data.supervise", "all", "completion_only_loss: false")
    else:
        t.report(
            "assistant_only_loss",
            "unset: TRL supervises every token of a conversation (data.supervise: all), and the completion "
            "of prompt/completion records; whet's default, kept here, is the assistant's turns",
        )


def _translate_dpo(t: Translation) -> None:
    losses = t.take("loss_type", "sigmoid")
    loss = losses[0] if isinstance(losses, list) else losses
    t.set("objective.kind", _DPO_LOSSES.get(loss, loss), "loss_type")
    if loss not in _DPO_LOSSES or (isinstance(losses, list) and len(losses) > 1):
        t.report("loss_type", f"whet has sigmoid (dpo) and ipo, not {losses}")
    if loss == "ipo":
        t.set("objective.logprobs", "mean", "TRL's ipo averages over tokens")
    t.move("beta", "objective.beta", default=0.1)
    if t.take("label_smoothing", 0):
        t.set("objective.label_smoothing", t.take("label_smoothing"), "label_smoothing")
    if t.has("precompute_ref_log_probs"):
        precompute = bool(t.take("precompute_ref_log_probs"))
        t.set("objective.reference", "precompute" if precompute else "online", "precompute_ref_log_probs")
    t.move("ref_model_name_or_path", "objective.reference_model")


def _translate_grpo(t: Translation) -> None:
    t.set("objective.kind", "grpo", "num_generations")
    group = t.take("num_generations", 8)
    t.set("objective.group_size", group, "num_generations")
    prompts = t.sections["run"].pop("batch_size", None)
    if prompts is not None:  # TRL counts completions, whet prompts
        t.set("run.batch_size", max(1, prompts // group), f"{t.comments['run.batch_size']} / num_generations")
    t.move("max_completion_length", "objective.max_new_tokens", default=512)
    for key in ("temperature", "epsilon", "epsilon_high", "beta"):
        t.move(key, f"objective.{key}")
    t.move("num_iterations", "objective.inner_epochs")
    loss = t.take("loss_type", "dapo")
    if loss in _GRPO_LOSSES:
        t.set("objective.aggregation", _GRPO_LOSSES[loss], "loss_type")
    else:
        t.report("loss_type", f"whet has {', '.join(_GRPO_LOSSES)}, not {loss}")
    scale = str(t.take("scale_rewards", "group")).lower()
    t.set("objective.advantage", "dr_grpo" if scale in ("none", "false") else "group", "scale_rewards")
    t.set("objective.advantage_std", "sample", "TRL divides by n - 1")
    t.move("mask_truncated_completions", "objective.mask_truncated", bool)
    set_rewards(t, t.take("reward_funcs"), t.take("reward_weights"), "reward_funcs")
    t.skip(
        "whet generates with its own engine",
        *(key for key in t.source if key.startswith(("vllm", "use_vllm"))),
    )
