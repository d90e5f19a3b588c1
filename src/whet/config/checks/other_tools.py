"""Config keys of other tools and their equivalents in whet, for error messages. Nothing is converted."""

_BATCH = "run.batch_size is the number of examples per optimizer step (their product, over all devices)"
_SUPERVISE = (
    "data.supervise (assistant, last, all, completion or a list of roles) chooses the supervised tokens"
)
_MODEL = "the model's name or path is `model`"
_TRAIN = "the training records are data.train"
_VALID = "validation records are a separate source, data.valid"
_VALID_SHARE = "it is data.valid: a share below 1 or a count of records to hold out"
_COLUMNS = "data.columns maps whet's field names to the columns of the records"
_EPOCHS = "it is run.epochs or run.steps"
_LENGTH = "it is data.max_length"
_PRECISION = "it is run.precision (auto, fp32, bf16, fp16)"
_RESUME = "`whet resume RUN` resumes a run"
_TEMPLATE = "it is data.template; by default the chat template is that of the model"
_NOTHING = "this is selected automatically"
_BETAS = "both are in optim.betas"

# keys of transformers, TRL and PEFT, unsloth, axolotl, LLaMA-Factory, torchtune, mlx-lm
OTHER_TOOLS = {
    # models
    **dict.fromkeys(("base_model", "model_name", "model_name_or_path", "model_id", "model_path"), _MODEL),
    **dict.fromkeys(("dtype", "torch_dtype", "bf16", "fp16", "tf32"), _PRECISION),
    **dict.fromkeys(("attn_implementation", "flash_attention", "flash_attn", "sdp_attention"), _NOTHING),
    **dict.fromkeys(("chat_template", "template"), _TEMPLATE),
    "device_map": "it is run.device",
    # adapters
    **dict.fromkeys(("use_peft", "adapter", "finetuning_type", "fine_tune_type"), "it is method.kind"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_bit"), "for a 4-bit base model set method.kind: qlora"
    ),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), "it is method.rank"),
    "lora_alpha": "it is method.alpha",
    "lora_dropout": "it is method.dropout",
    **dict.fromkeys(
        ("target_modules", "lora_target_modules", "lora_target_linear", "lora_target", "lora_attn_modules"),
        "it is method.targets",
    ),
    **dict.fromkeys(("use_dora", "use_rslora", "init_lora_weights"), "it is method.variant"),
    **dict.fromkeys(("layers_to_transform", "num_layers"), "it is method.layers"),
    "lora_parameters": "use method.rank, method.alpha (scale * rank), method.dropout and method.targets",
    "loraplus_lr_ratio": "it is method.lr_ratio",
    # data
    **dict.fromkeys(
        ("dataset", "datasets", "dataset_name", "train_dataset", "train_file", "dataset_dir"), _TRAIN
    ),
    **dict.fromkeys(("eval_dataset", "validation_file", "test_datasets"), _VALID),
    **dict.fromkeys(("val_set_size", "val_size", "val_split"), _VALID_SHARE),
    **dict.fromkeys(
        ("field_messages", "dataset_text_field", "columns_mapping", "field_instruction"), _COLUMNS
    ),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len"), _LENGTH),
    **dict.fromkeys(("packing", "sample_packing", "packed"), "it is data.pack"),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_input", "assistant_only_loss", "completion_only_loss", "mask_prompt"),
        _SUPERVISE,
    ),
    # optimizer
    "learning_rate": "it is optim.lr",
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "lr_schedule"), "it is optim.schedule"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), "it is optim.warmup"),
    **dict.fromkeys(
        ("warmup_ratio", "warmup_fraction"),
        "it is optim.warmup: a number below 1 is a fraction of the run",
    ),
    "optimizer": "it is optim.name",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _BETAS),
    "adam_epsilon": "it is optim.eps",
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clipping", "clip_grad_norm", "grad_clip"), "it is optim.clip"
    ),
    # length and size of the run
    **dict.fromkeys(("num_train_epochs", "num_epochs"), _EPOCHS),
    **dict.fromkeys(("max_steps", "iters", "max_steps_per_epoch"), "it is run.steps"),
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "grad_accumulation_steps",
            "accumulation_steps",
            "micro_batch_size",
            "train_batch_size",
        ),
        _BATCH,
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size"),
        "run.micro_batch_tokens sets the size of a micro-batch, also in evaluation",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "enable_activation_checkpointing", "use_gradient_checkpointing"),
        "it is run.grad_checkpoint",
    ),
    "torch_compile": "it is run.compile",
    **dict.fromkeys(("output_dir", "adapter_path", "save_dir"), "the output directory is run.dir/run.name"),
    **dict.fromkeys(
        ("resume_from_checkpoint", "auto_resume_from_checkpoints", "resume_adapter_file"), _RESUME
    ),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "accelerate_config"), "use the section parallel"),
    # evaluation, checkpoints, logs
    **dict.fromkeys(
        ("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch", "steps_per_eval"),
        "it is eval.every, in steps",
    ),
    **dict.fromkeys(("val_batches", "max_eval_samples"), "it is eval.batches"),
    **dict.fromkeys(("early_stopping_patience", "load_best_model_at_end"), "it is eval.early_stop"),
    **dict.fromkeys(("save_steps", "save_strategy", "save_every"), "it is checkpoint.every, in steps"),
    "save_total_limit": "it is checkpoint.keep",
    **dict.fromkeys(("logging_steps", "steps_per_report", "log_every_n_steps"), "it is log.every"),
    **dict.fromkeys(("report_to", "wandb_project", "metric_logger"), "it is log.sinks"),
    # objectives
    **dict.fromkeys(("rl", "stage", "trainer_type"), "it is objective.kind"),
    **dict.fromkeys(("num_generations",), "it is objective.group_size"),
    "max_completion_length": "it is objective.max_new_tokens",
    "reward_funcs": "it is objective.rewards",
    "loss_type": "the loss is set by objective.kind, and for grpo by objective.aggregation",
}
