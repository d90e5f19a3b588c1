"""Configs of other tools become configs that whet accepts, with every key translated or named."""

import contextlib
import json

import pytest
import yaml

from whet.config.convert.convert_config import TOOLS, convert_config
from whet.config.load_config import validate_config
from whet.errors import ConfigError

AXOLOTL = """
base_model: org/model-1b
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: org/chats
    type: chat_template
  - path: more.jsonl
    type: alpaca
val_set_size: 0.1
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
weight_decay: 0.0
bf16: auto
gradient_checkpointing: true
flash_attention: true
save_steps: 50
loss_watchdog_threshold: 5.0
output_dir: ./outputs/qlora
wandb_project: chats
special_tokens: {pad_token: "<|end|>"}
"""

LLAMA_FACTORY = """
model_name_or_path: org/model-4b
stage: dpo
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
pref_beta: 0.2
pref_loss: simpo
simpo_gamma: 1.5
dataset: mine,theirs
template: llama3
cutoff_len: 1024
val_size: 0.05
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 2.0
lr_scheduler_type: linear
warmup_ratio: 0.03
bf16: true
eval_strategy: steps
eval_steps: 100
save_steps: 500
logging_steps: 10
output_dir: saves/dpo
report_to: none
"""

MLX_LM = """
model: org/model-1b
train: true
data: records
fine_tune_type: dora
num_layers: 8
lora_parameters: {rank: 4, scale: 10.0, dropout: 0.1, keys: [self_attn.q_proj]}
batch_size: 2
iters: 100
grad_accumulation_steps: 2
learning_rate: 1e-5
lr_schedule: {name: cosine_decay, warmup: 10, arguments: [1e-5, 1000, 1e-7]}
mask_prompt: true
max_seq_length: 512
steps_per_eval: 20
"""

TRL_SFT = {
    "model_name_or_path": "org/model-1b",
    "dataset_name": "org/chats",
    "use_peft": True,
    "lora_r": 8,
    "lora_target_modules": ["all-linear"],
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 1,
    "assistant_only_loss": True,
    "packing": True,
    "max_length": 1024,
    "warmup_steps": 10,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "output_dir": "out/sft",
}

TRL_GRPO = {
    "model_name_or_path": "org/model-1b",
    "dataset_name": "prompts.jsonl",
    "num_generations": 4,
    "max_completion_length": 128,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_steps": 50,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "reward_funcs": ["rewards.short"],
    "reward_weights": [0.5],
    "use_vllm": True,
}


def converted(tmp_path, config, *, suffix=".yaml", **options):
    path = tmp_path / f"other{suffix}"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return convert_config(path, **options)


def test_axolotl(tmp_path):
    translation = converted(tmp_path, AXOLOTL)
    config = validate_config(translation.values())
    assert config.model == "org/model-1b"
    method = config.method
    assert (method.kind, method.rank, method.alpha, method.targets) == ("qlora", 32, 16, "all-linear")
    assert config.data.train == ["hf:org/chats", "more.jsonl"]
    assert (config.data.valid, config.data.max_length, config.data.pack) == (0.1, 2048, True)
    assert (config.optim.name, config.optim.lr, config.optim.warmup) == ("adamw8bit", 2e-4, 0.1)
    assert config.optim.min_lr_ratio == 0.0
    assert (config.run.batch_tokens, config.run.epochs) == (2 * 4 * 2048, 3)
    assert (config.run.dir, config.run.name) == ("outputs", "qlora")
    assert config.checkpoint.every == 50
    assert config.log.sinks == ["wandb"]
    assert translation.untranslated.keys() == {"loss_watchdog_threshold", "special_tokens"}
    assert "flash_attention" in translation.not_needed


def test_llama_factory_reads_dataset_info(tmp_path):
    (tmp_path / "data").mkdir()
    entries = {"mine": {"file_name": "mine.json"}, "theirs": {"hf_hub_url": "org/pairs", "split": "train"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entries))
    translation = converted(tmp_path, LLAMA_FACTORY)
    config = validate_config(translation.values())
    assert (config.method.rank, config.method.alpha) == (16, 32.0)  # alpha is twice the rank unless set
    assert config.method.targets == ["q_proj", "v_proj"]
    objective = config.objective
    assert (objective.kind, objective.beta, objective.gamma) == ("simpo", 0.2, 1.5)
    assert config.data.train == ["data/mine.json", "hf:org/pairs::train"]
    assert (config.data.valid, config.data.max_length, config.data.pack) == (0.05, 1024, False)
    assert (config.run.batch_size, config.run.epochs, config.run.precision) == (8, 2, "bf16")
    assert (config.optim.schedule, config.optim.warmup, config.optim.clip) == ("linear", 0.03, 1.0)
    assert (config.eval.every, config.checkpoint.every, config.log.every) == (100, 500, 10)
    assert translation.untranslated.keys() == {"template"}


def test_mlx_lm(tmp_path):
    (tmp_path / "records").mkdir()
    translation = converted(tmp_path, MLX_LM)
    config = validate_config(translation.values())
    method = config.method
    assert (method.variant, method.rank, method.alpha, method.layers) == ("dora", 4, 40.0, 8)
    assert method.targets == ["self_attn.q_proj"]
    assert (config.data.train, config.data.valid) == ("records", "records")
    assert (config.data.supervise, config.data.order, config.data.pack) == ("last", "mlx", False)
    assert (config.run.steps, config.run.batch_size) == (50, 4)
    optim = config.optim
    assert (optim.name, optim.schedule, optim.warmup, optim.clip) == ("adam", "cosine", 10, None)
    assert optim.min_lr_ratio == pytest.approx(0.01)
    assert (config.eval.every, config.checkpoint.every, config.log.every) == (20, 100, 10)
    assert translation.untranslated.keys() == {"lr_schedule.arguments", "val_batches"}


def test_trl_sft(tmp_path):
    config = validate_config(converted(tmp_path, TRL_SFT, suffix=".json").values())
    assert (config.method.kind, config.method.rank, config.method.alpha) == ("lora", 8, 32.0)
    assert (config.method.dropout, config.method.targets) == (0.05, "all-linear")
    assert config.data.train == "hf:org/chats::train"
    assert (config.data.supervise, config.run.batch_tokens) == ("assistant", 16 * 1024)
    optim = config.optim
    assert (optim.lr, optim.schedule, optim.betas) == (2e-5, "linear", (0.9, 0.95))
    assert (optim.weight_decay, optim.decay_embeddings) == (0.1, True)


def test_trl_grpo_counts_prompts(tmp_path):
    translation = converted(tmp_path, TRL_GRPO, suffix=".json", gpus=2)
    config = validate_config(translation.values())
    assert config.run.batch_size == 8 * 2 * 2 // 4
    objective = config.objective
    assert (objective.kind, objective.group_size, objective.max_new_tokens) == ("grpo", 4, 128)
    assert (objective.advantage, objective.aggregation) == ("dr_grpo", "constant")
    [reward] = objective.rewards
    assert (reward.function, reward.weight) == ("rewards:short", 0.5)
    assert config.parallel.kind == "ddp"
    assert "use_vllm" in translation.not_needed


@pytest.mark.parametrize(
    ("config", "suffix"),
    [(AXOLOTL, ".yaml"), (LLAMA_FACTORY, ".yaml"), (MLX_LM, ".yaml"), (TRL_GRPO, ".json")],
)
def test_every_key_is_translated_or_named_and_the_yaml_holds_the_values(tmp_path, config, suffix):
    translation = converted(tmp_path, config, suffix=suffix)
    text = translation.to_yaml("other")
    assert yaml.safe_load(text) == json.loads(json.dumps(translation.values()))
    dropped = [key for key in translation.source if key not in text]
    assert not dropped


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model": "m", "rl": "kto"}, "unknown kind 'kto'"),
        ({"model_name_or_path": "m", "stage": "ppo"}, "unknown kind 'ppo'"),
        ({"base_model": "m", "adapter": "llama-adapter"}, "method.kind"),
    ],
)
def test_a_method_that_whet_lacks_never_becomes_another_one(tmp_path, config, message):
    translation = converted(tmp_path, config)
    assert translation.untranslated
    with pytest.raises(ConfigError, match=message):
        validate_config({**translation.values(), "data": {"train": "records.jsonl"}})


def test_the_tool_can_be_named(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text("model: org/model\nlearning_rate: 1e-5\n")
    with pytest.raises(
        ConfigError, match="not recogni.ed as a config of axolotl, LLaMA-Factory, TRL, mlx-lm"
    ):
        convert_config(path)
    assert convert_config(path, "mlx-lm").values()["optim"]["lr"] == 1e-5
    with pytest.raises(ConfigError, match="unknown tool 'mlx'"):
        convert_config(path, "mlx")


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "must be a mapping"), ("a: [", "not valid YAML"), ("1: 2\n", "must be a mapping")],
)
def test_files_that_are_not_configs(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        convert_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_config(tmp_path / "missing.yaml")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, -3, 0.5, True])
def test_odd_values_are_errors_that_name_the_file(tmp_path, tool, value):
    keys = (
        "batch_size",
        "micro_batch_size",
        "per_device_train_batch_size",
        "datasets",
        "dataset",
        "iters",
        "data",
    )
    keys += (
        "lora_parameters",
        "lr_schedule",
        "eval_steps",
        "optimizer",
        "trl",
        "reward_funcs",
        "num_generations",
    )
    path = tmp_path / "odd.yaml"
    path.write_text(yaml.safe_dump(dict.fromkeys(keys, value) | {"rl": "grpo"}))
    with contextlib.suppress(ConfigError):  # any other error fails the test
        convert_config(path, tool).to_yaml("odd.yaml")
