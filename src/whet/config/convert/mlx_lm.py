"""mlx-lm: the YAML file of `mlx_lm.lora --config`."""

from whet.config.convert.translation import Translation, Values

_SCHEDULES = {"cosine_decay": "cosine", "linear_schedule": "linear", "exponential_decay": "exponential"}


def is_config(source: Values) -> bool:
    """Return whether a mapping looks like a config of mlx-lm."""
    keys = ("fine_tune_type", "lora_parameters", "iters", "adapter_path", "steps_per_report")
    return any(key in source for key in keys) and not isinstance(source.get("run"), dict)


def translate(t: Translation) -> None:
    """Translate all keys."""
    t.move("model", "model", default="Qwen/Qwen3-0.6b")
    _translate_method(t)
    _translate_data(t)
    rows, accumulation = t.take("batch_size", 4), t.take("grad_accumulation_steps", 1)
    t.set_batch(
        rows, accumulation, f"batch_size {rows} * grad_accumulation_steps {accumulation}", packed_length=None
    )
    comment = t.origin("iters")
    t.set("run.steps", max(1, t.take("iters", 1000) // accumulation), f"{comment} / grad_accumulation_steps")
    _translate_optimizer(t)
    t.move("seed", "run.seed")
    t.move("grad_checkpoint", "run.grad_checkpoint", bool)
    t.move("steps_per_report", "log.every", default=10)
    t.move("steps_per_eval", "eval.every", default=200)
    t.move("save_every", "checkpoint.every", default=100)
    t.set_output("adapter_path", default="adapters")
    if t.take("val_batches", 25) > 0:
        t.report(
            "val_batches", "whet evaluates all of data.valid unless eval.batches limits its micro-batches"
        )
    if t.take("test", False):
        t.set("data.test", t.sections["data"]["train"], "test")
    if t.take("report_to"):
        t.set("log.sinks", [name.strip() for name in str(t.take("report_to")).split(",")], "report_to")
    if t.has("resume_adapter_file"):
        t.report(
            "resume_adapter_file",
            "to train an adapter further, set `model` to its directory and method.continue to true; "
            "`whet resume RUN` resumes a run with its optimizer and data position",
        )
    t.skip("whet always does so", "train", "test_batches")
    t.skip(
        "files are safe tensors of known formats: no remote code runs",
        "trust_remote_code",
        "clear_cache_threshold",
    )


def _translate_method(t: Translation) -> None:
    kind = t.take("fine_tune_type", "lora")
    comment = t.origin("fine_tune_type")
    t.set("method.kind", "full" if kind == "full" else "lora", comment)
    if kind == "full":
        t.report("fine_tune_type", "mlx-lm trains the last num_layers layers; whet trains every weight")
        t.skip("method.kind full trains every layer", "num_layers", "lora_parameters")
        return
    if kind == "dora":
        t.set("method.variant", "dora", comment)
    given = t.take("lora_parameters", {})
    parameters = {"rank": 8, "dropout": 0.0, "scale": 20.0} | given
    origin = "lora_parameters" if given else f"{t.tool}'s default lora_parameters"
    t.set("method.rank", parameters["rank"], origin)
    t.set("method.alpha", parameters["scale"] * parameters["rank"], f"{origin}: scale * rank")
    if parameters["dropout"]:
        t.set("method.dropout", parameters["dropout"], origin)
    if keys := parameters.get("keys"):
        t.set("method.targets", keys, f"{origin}: keys")
    layers = t.take("num_layers", 16)
    if layers > 0:
        t.set(
            "method.layers",
            layers,
            t.origin("num_layers"),
        )


def _translate_data(t: Translation) -> None:
    if dataset := t.take("hf_dataset"):
        entries = dataset if isinstance(dataset, list) else [dataset]
        t.set_data("data.train", [t.source_name(str(each.get("path"))) for each in entries], "hf_dataset")
        t.report(
            "hf_dataset",
            "check data.train: rename the columns prompt_feature, completion_feature, ... if any",
        )
    else:
        name = t.source_name(str(t.take("data", "mlx-community/WikiSQL")))
        t.set("data.train", name, "data: its train split")
        t.set("data.valid", name, "data: its valid split")
    t.set("data.supervise", "last" if t.take("mask_prompt", False) else "all", "mask_prompt")
    t.move("max_seq_length", "data.max_length", default=2048)
    t.set("data.order", "mlx", "the batches of mlx-lm: examples of similar length")
    t.set("data.pack", False, "mlx-lm pads")


def _translate_optimizer(t: Translation) -> None:
    name = t.take("optimizer", "adam")
    t.set("optim.name", name, t.origin("optimizer"))
    settings = t.take("optimizer_config", {}).get(name) or {}
    for key, value in settings.items():
        if key in ("weight_decay", "betas", "eps", "momentum", "nesterov"):
            t.set(f"optim.{key}", value, f"optimizer_config.{name}")
        else:
            t.untranslated[f"optimizer_config.{name}.{key}"] = "whet has no such setting"
    t.set("optim.lr", float(t.take("learning_rate", 1e-5)), "learning_rate")
    t.set("optim.clip", None, "mlx-lm does not clip gradients")
    schedule = t.take("lr_schedule")
    if not schedule:
        t.set("optim.schedule", "constant", "there is no lr_schedule")
        return
    kind = _SCHEDULES.get(schedule.get("name"))
    t.set("optim.schedule", kind or "cosine", "lr_schedule.name")
    if kind is None:
        t.untranslated["lr_schedule.name"] = f"whet has no schedule {schedule.get('name')}; cosine is used"
    if schedule.get("warmup"):
        t.set("optim.warmup", schedule["warmup"], "lr_schedule.warmup")
    arguments = schedule.get("arguments") or []
    if arguments:
        t.set("optim.lr", float(arguments[0]), "lr_schedule.arguments")
        end = float(arguments[2]) if kind == "cosine" and len(arguments) > 2 else 0.0
        t.set("optim.min_lr_ratio", end / float(arguments[0]), "lr_schedule.arguments")
        if len(arguments) > 1 and kind != "exponential":
            t.untranslated["lr_schedule.arguments"] = (
                "whet's schedule spans run.steps: compare its length with this one"
            )
