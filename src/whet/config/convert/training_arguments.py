"""The arguments of transformers' Trainer, which TRL and LLaMA-Factory share, and axolotl in part."""

from whet.config.convert.translation import Translation

_WORKERS = "whet chooses it itself"
_ALWAYS = "whet always does so"


def translate_training_arguments(t: Translation, *, lr: float, packed_length: int | None) -> None:
    """Translate the length of a run, its optimizer, precision, evaluations, checkpoints and logs."""
    rows = t.take("per_device_train_batch_size", 8)
    accumulation = t.take("gradient_accumulation_steps", 1)
    t.set_batch(
        rows,
        accumulation,
        f"per_device_train_batch_size {rows} * gradient_accumulation_steps {accumulation}",
        packed_length=packed_length,
    )
    set_length(t, "num_train_epochs", default=3)
    t.move("learning_rate", "optim.lr", float, default=lr)
    t.set_optimizer("optim")
    t.set_schedule("lr_scheduler_type", default="linear")
    set_warmup(t)
    t.move("weight_decay", "optim.weight_decay")
    if t.take("weight_decay"):
        t.set("optim.decay_embeddings", True, "transformers decays embeddings too")
    t.move("max_grad_norm", "optim.clip", lambda norm: norm or None, default=1.0)
    set_adam(t)
    set_precision(t)
    t.move("gradient_checkpointing", "run.grad_checkpoint", bool)
    t.move("torch_compile", "run.compile", bool)
    t.move("seed", "run.seed", default=42)
    set_intervals(t)
    t.set_output("output_dir", default="runs/run")
    set_parallel(t, "deepspeed", "fsdp")
    t.skip(
        _WORKERS,
        *("dataloader_num_workers", "preprocessing_num_workers", "dataset_num_proc", "ddp_timeout"),
        *(
            "ddp_find_unused_parameters",
            "tf32",
            "use_liger_kernel",
            "enable_liger_kernel",
            "attn_implementation",
        ),
        *("flash_attn", "per_device_eval_batch_size", "gradient_checkpointing_kwargs", "fsdp_config"),
        *("remove_unused_columns", "bf16_full_eval", "use_cpu", "dataloader_pin_memory", "group_by_length"),
        *("average_tokens_across_devices", "padding_free", "pad_to_multiple_of"),
    )
    t.skip(
        _ALWAYS, "do_train", "do_eval", "plot_loss", "logging_first_step", "logging_dir", "logging_strategy"
    )
    t.skip("existing runs are never overwritten", "overwrite_output_dir")
    t.skip("checkpoints hold the optimizer; final/ holds the model alone", "save_only_model")
    t.skip("`whet resume RUN` resumes a run", "resume_from_checkpoint")
    t.skip("the tokenizer of the model is used", "use_fast_tokenizer")


def set_length(t: Translation, epochs_key: str, *, default: int) -> None:
    """Translate max_steps, or the number of epochs."""
    if t.take("max_steps", -1) > 0:
        t.set("run.steps", t.take("max_steps"), "max_steps")
        t.skip("max_steps decides", epochs_key)
        return
    epochs = float(t.take(epochs_key, default))
    t.set("run.epochs", max(1, round(epochs)), t.origin(epochs_key))
    if epochs != round(epochs):
        t.report(epochs_key, "run.epochs counts complete passes: set run.steps for a part of one")


def set_adam(t: Translation) -> None:
    """Translate the betas and epsilon of Adam."""
    if t.has("adam_beta1") or t.has("adam_beta2"):
        betas = [t.take("adam_beta1", 0.9), t.take("adam_beta2", 0.999)]
        t.set("optim.betas", betas, "adam_beta1, adam_beta2")
    t.move("adam_epsilon", "optim.eps")


def set_parallel(t: Translation, *keys: str) -> None:
    """Translate sharding, which one of these keys turns on, and data parallelism."""
    for key in keys:
        if t.take(key):
            t.set("parallel.kind", "fsdp", key)
    if t.gpus > 1 and "parallel" not in t.sections:
        t.set("parallel.kind", "ddp", f"{t.gpus} GPUs")


def set_warmup(t: Translation) -> None:
    """Translate warm-up steps, or their share of the run."""
    steps = t.take("warmup_steps", 0)
    ratio = t.take("warmup_ratio", 0)
    if steps:  # a float below 1 is a share in newer versions of transformers
        t.set("optim.warmup", steps, "warmup_steps")
    elif ratio:
        t.set("optim.warmup", float(ratio), "warmup_ratio")


def set_precision(t: Translation) -> None:
    """Translate bf16, fp16 and pure_bf16."""
    for key, precision in (("pure_bf16", "bf16-pure"), ("bf16", "bf16"), ("fp16", "fp16")):
        if t.take(key):
            t.set("run.precision", precision, key)
            return


def set_intervals(t: Translation) -> None:
    """Translate how often a run evaluates, saves and logs."""
    strategy = str(t.take("eval_strategy", t.take("evaluation_strategy", "no")))
    if strategy == "steps" and t.take("eval_steps"):
        set_interval(t, "eval_steps", "eval.every")
    elif strategy == "epoch":
        t.report(
            "eval_strategy", "eval.every counts steps: set it to the steps of an epoch (whet data shows them)"
        )
    else:
        t.skip("there is no evaluation without eval_strategy", "eval_steps")
    save = str(t.take("save_strategy", "steps"))
    if save == "steps" and t.has("save_steps"):
        set_interval(t, "save_steps", "checkpoint.every")
    elif save == "epoch":
        t.report("save_strategy", "checkpoint.every counts steps, 100 unless set; a run always saves its end")
    else:
        t.take("save_steps")
    t.move("save_total_limit", "checkpoint.keep")
    if t.take("logging_steps"):
        set_interval(t, "logging_steps", "log.every")
    if t.take("load_best_model_at_end"):
        t.set("eval.early_stop.patience", 10**6, "load_best_model_at_end: final/ gets the best weights")
    set_sinks(t, "report_to")
    t.skip("it names the metric in the run's report", "greater_is_better")
    if t.has("metric_for_best_model"):
        t.report(
            "metric_for_best_model", "set eval.early_stop.metric to one of whet's metrics (docs/runs.md)"
        )


def set_interval(t: Translation, key: str, target: str) -> None:
    """Translate an interval in steps; other tools also accept a share of the run."""
    value = t.take(key)
    if 0 < value < 1:
        t.report(key, f"{target} counts steps: set it to this share of the run's steps")
    else:
        t.set(target, int(value), key)


def set_sinks(t: Translation, key: str) -> None:
    """Translate where metrics are reported to."""
    given = t.take(key, [])
    names = [given] if isinstance(given, str) else list(given)
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    if known:
        t.set("log.sinks", known, key)
    if unknown := [name for name in names if name not in (*known, "none", "all")]:
        t.report(key, f"whet has no sink for {', '.join(unknown)}")


def set_rewards(
    t: Translation, functions: list[str] | str | None, weights: list[float] | None, key: str
) -> None:
    """Translate reward functions, named by their import path, and their weights."""
    names = [functions] if isinstance(functions, str) else list(functions or [])
    if not names:
        t.report(key, "name the rewards in objective.rewards: docs/grpo.md")
        return
    rewards = [
        {"function": name if ":" in name else ":".join(name.rsplit(".", 1)), "weight": weight}
        for name, weight in zip(names, weights or [1.0] * len(names), strict=True)
    ]
    t.set("objective.rewards", rewards, key)
