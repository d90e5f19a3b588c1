"""A dry run raises the same errors as the run would before its first step."""

import json
import re

import pytest
import yaml

from tiny import run_config
from whet.config.checks.patterns import compile_pattern

RECORDS = [
    {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"{n}"}]}
    for n in range(12)
]
PAIRS = [{"prompt": f"question {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(12)]
LORA = "method.kind=lora"

REFUSED = {
    "bracket": [LORA, "method.targets='['"],
    "empty target": [LORA, "method.targets=''"],
    "no targets": [LORA, "method.targets=[]"],
    "unknown target": [LORA, "method.targets=q_prj"],
    "nested repeats": [LORA, "method.targets=(a+)+$"],
    "nested repeats in a list": [LORA, r"method.targets=[q_proj, '(\w+\.?)+x']"],
    "repeated alternatives": [LORA, "method.targets=(a|a)*b"],
    "many repeats": [LORA, "method.targets=" + ".*" * 30 + "x"],
    "long pattern": [LORA, "method.targets=" + "q" * 5000],
    "rank": [LORA, "method.rank=1000000000"],
    "rank of some": [LORA, "method.rank_pattern={q_proj: 1000000000}"],
    "rank of none": [LORA, "method.rank_pattern={zzz: 2}"],
    "rank of a bad pattern": [LORA, "method.rank_pattern={'(': 2}"],
    "alpha of none": [LORA, "method.alpha_pattern={zzz: 2}"],
    "layers": [LORA, "method.layers=[99]"],
    "more layers than there are": [LORA, "method.layers=99"],
    "saved module": [LORA, "method.modules_to_save=[nonsense]"],
    "adapted and saved": [LORA, "method.targets=q_proj", "method.modules_to_save=[q_proj]"],
    "dropout on the head": [LORA, "method.targets=lm_head", "method.dropout=0.1"],
    "variant for embeddings": [LORA, "method.targets=embed_tokens", "method.variant=dora"],
    "experts": ["experts.load_balancing=0.1"],
    "teacher that was not asked": ["objective={kind: distill, teacher: MODEL, offline: {top_k: 4}}"],
    "fp8 with adapters": [LORA, "run.fp8=true"],
    "group of nothing": ["optim.groups={zzz: {lr_scale: 2}}"],
    "group that never ends": ["optim.groups={'(a+)+$': {lr_scale: 2}}"],
    "schedule": ["optim.schedule=[{kind: linear, steps: 50}, {kind: constant}]"],
    "samples of a classifier": ["objective.kind=classify", "log.samples={prompts: [x]}"],
    "no such teacher": ["objective={kind: distill, teacher: no/such-model}"],
    "a layer that no teacher has": [
        "objective={kind: distill, teacher: MODEL, hidden: {layers: {0: 99}}}",
    ],
    "reward": ["objective={kind: grpo, rewards: [nonsense]}"],
    "reward that cannot be imported": ["objective={kind: grpo, rewards: ['no_such_module:reward']}"],
    "dropout with grpo": [LORA, "method.dropout=0.1", "objective={kind: grpo, rewards: [exact]}"],
    "no such reference": ["objective={kind: dpo, reference_model: no/such-model}", "PAIRS"],
    "parallel": ["parallel.kind=fsdp", "parallel.tensor=2"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_dry_run_and_train_raise_the_same_error(cli, tiny_directory, tmp_path, name):
    overrides = [each.replace("MODEL", str(tiny_directory)) for each in REFUSED[name]]
    records = PAIRS if "PAIRS" in overrides else RECORDS
    overrides = [each for each in overrides if each != "PAIRS"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"train": str(tmp_path / "train.jsonl"), "valid": None}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_config(tiny_directory, tmp_path, data=data)))
    code, _, refusal = cli("train", path, *overrides)
    assert code == 2, refusal
    message = re.search(r"error: (.*)", refusal)[1]
    if "model called " in message:  # both name the key, and then the dry run looks at less
        key = message.partition(": ")[0]
        assert key in ("objective.teacher", "objective.reference_model")
        assert f"{key}: " in cli("train", path, *overrides, "--dry-run")[1]
    message = message.partition("model called ")[2].partition(":")[0] or message  # then it looks at less
    code, out, err = cli("train", path, *overrides, "--dry-run")
    assert code == 2
    assert message in re.sub(r"\s+", " ", out + err) or message in out + err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|v)_proj",
        "q_proj",
        r"layers\.(0|1|10)\..*",
        r".*(attn|mlp).*\.[^.]+",
        r"layers\.\d+\.mlp\.up_proj",
        r".*\.layers\.\d+\..*\.experts\.\d+\..*_proj",
        r"[^.]+\.[^.]+\.\d+\.[^.]+\.[^.]+\.[^.]+",
    ],
)
def test_common_regular_expressions_are_accepted(pattern):
    assert compile_pattern(pattern).pattern == pattern


@pytest.mark.parametrize(
    "pattern",
    [r"(a*)*", r"(\w+\s?)*$", "(a|b|ab)+", "(a{1,30}){1,30}b", "(a?){30}", r"(.*)(\1)+", "((a+)b?)+"],
)
def test_exponential_regular_expressions_are_rejected(pattern):
    with pytest.raises(ValueError, match="could take exponential time"):
        compile_pattern(pattern)


def test_regular_expression_with_many_repeats_is_rejected():
    with pytest.raises(ValueError, match="more than 4 repeats"):
        compile_pattern(r".*a.*b.*c.*d.*e")


def test_problem_is_listed_once(cli, tiny_directory, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_config(tiny_directory, tmp_path)))
    code, out, err = cli("train", path, "run.device=tpu", "--dry-run")
    assert code == 2
    assert (out + err).count("unknown device 'tpu'") == 1


def test_invalid_regular_expression_error_names_possible_keys(cli, tiny_directory, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_config(tiny_directory, tmp_path)))
    code, out, err = cli("train", path, 'method.targets="["', "--dry-run")
    assert code == 2
    assert "method.targets" in out + err
