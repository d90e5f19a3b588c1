"""Reading configs: validation, overrides, limits, and writing the resolved config."""

import pytest
import yaml

from whet.config.load_config import describe_keys, load_config, to_yaml, validate_config
from whet.errors import ConfigError

GOOD = {"model": "m", "data": {"train": "a.jsonl"}, "run": {"steps": 3, "batch_size": 4}}


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def problem(tmp_path, *overrides, values=GOOD):
    path = write(tmp_path, yaml.safe_dump(values))
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_scientific_notation_is_a_number(tmp_path):
    path = write(
        tmp_path,
        "model: m\ndata: {train: a}\nrun: {steps: 3, batch_size: 4}\noptim: {lr: 2e-3, min_lr_ratio: 1E-1}",
    )
    config = load_config(path)
    assert (config.optim.lr, config.optim.min_lr_ratio) == (0.002, 0.1)
    assert load_config(path, ["optim.lr=5e-5"]).optim.lr == 5e-5


def test_overrides_reach_nested_keys_and_new_sections(tmp_path):
    path = write(tmp_path, yaml.safe_dump(GOOD))
    config = load_config(
        path,
        ["eval.early_stop.patience=7", "data.valid=b.jsonl", "run.seed=0", "method.targets=[q_proj, v_proj]"],
    )
    assert config.eval.early_stop.patience == 7
    assert config.run.seed == 0
    assert config.method.targets == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=3", "unknown key 'optim.lrr', did you mean 'lr'?"),
        ("optm.lr=3", "unknown key 'optm', did you mean 'optim'?"),
        ("eval.early_stop.patienc=3", "unknown key 'eval.early_stop.patienc', did you mean 'patience'?"),
        ("data.zzz=1", "unknown key 'data.zzz' (known: train, valid"),
        ("run.steps=0", "run.steps: Input should be greater than 0 (given: 0)"),
        ("run.batch_size=0", "run.batch_size: Input should be greater than 0"),
        ("eval.every=0", "eval.every: Input should be greater than 0"),
        ("checkpoint.every=0", "checkpoint.every: Input should be greater than 0"),
        ("log.every=0", "log.every: Input should be greater than 0"),
        ("method.kind=lorra", "method.kind: Input should be 'full', 'lora' or 'qlora' (given: 'lorra')"),
        ("optim.lr=fast", "optim.lr: Input should be a valid number"),
        ("run.epochs=2", "run: set either steps or epochs"),
        ("run.batch_tokens=512", "run: set either batch_size or batch_tokens"),
        ("run.name=a/b", "run.name: the name of a run must be a single path component"),
        ("run.name=..", "run.name: the name of a run must be a single path component"),
        ('run.name="a\\0b"', "run.name: a path cannot contain a null byte"),
        ('run.dir="a\\0b"', "run.dir: a path cannot contain a null byte"),
        (f"run.name={'é' * 101}", "run.name: the name of a run can have at most 200 bytes"),
        ("run.seed=9223372036854775808", "run.seed: must be between -2**63 and 2**63 - 1"),
        ("run.seed=-9223372036854775809", "run.seed: must be between -2**63 and 2**63 - 1"),
        (
            "run.steps=true",
            "run.steps: Input should be a valid integer, unable to parse string as an integer (given: 'true')",
        ),
        ("optim.lr=yes", "optim.lr: Input should be a valid number"),
        ("optim.clip=false", "optim.clip: Input should be a valid number"),
        ("optim.betas=[0.9, true]", "optim.betas.1: Input should be a valid number"),
        ("method.layers=[0, true]", "method.layers.1: Input should be a valid integer"),
        ("method.rank_pattern={q_proj: true}", "method.rank_pattern.q_proj: Input should be a valid integer"),
        (
            "optim.schedule=[{kind: linear, steps: true}, {kind: constant}]",
            "optim.schedule.0.steps: Input should be a valid int",
        ),
        ("objective={kind: classify, classes: true}", "objective.classes: Input should be a valid integer"),
        ("optim", "'optim' is not an override"),
        ("optim={nesterov: true, momentum: 0}", "optim: nesterov needs a momentum above 0"),
        ("optim.lr=.inf", "optim.lr: Input should be"),
        ("optim.betas=[0.9, 1.5]", "optim.betas.1: Input should be less than 1"),
        ("method.targets=3", "method.targets: Input should be a valid string"),
        ("eval.early_stop={}", "eval.early_stop needs data.valid"),
        ("eval.every=5", "eval.every needs data.valid"),
        ("eval.generate=true", "eval.generate needs data.valid or data.test"),
        ("eval={early_stop: {metric: exact_match}}", "eval.early_stop needs data.valid"),
        ("model.x=1", "model is not a section"),
        ("run.name=2024-13-45", "'2024-13-45' is not a YAML value"),
        ("run={[a]: 1}", "a key must be a single value"),
        ("run.name=" + "[" * 2000, "is not a YAML value"),
    ],
)
def test_invalid_key_or_value_is_reported_with_its_path(tmp_path, override, message):
    assert message in problem(tmp_path, override)


def test_booleans_are_accepted_in_boolean_and_text_keys(tmp_path):
    path = write(tmp_path, yaml.safe_dump(GOOD))
    assert load_config(path, ["run.compile=true"]).run.compile is True
    classes = load_config(path, ["objective={kind: classify, classes: [yes, no]}"]).objective.classes
    assert classes == ["True", "False"]


def test_all_problems_are_reported_together(tmp_path):
    message = problem(
        tmp_path, values={"model": "m", "data": {"train": "a"}, "run": {"steps": -1, "batch_sise": 2}}
    )
    assert "run.steps" in message
    assert "did you mean 'batch_size'?" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\ndata: a: b\n",
            ", line 2, column 8, is not valid YAML: mapping values are not allowed here",
        ),
        (
            "model: m\nrun: {steps: 1\ndata: [\n",
            ", line 3, column 5, is not valid YAML: while parsing a flow mapping from line 2, "
            "expected ',' or '}', but got ':'",
        ),
        ("model: m\nmodel: b\n", ", line 2, column 1, is not valid YAML: duplicate key 'model'"),
        ("model: m\nrun: \0", ", line 2, column 6, is not valid YAML: special characters are not allowed"),
        ("[" * 2000, " is not valid YAML: it is nested too deeply"),
    ],
)
def test_yaml_error_has_line_and_column(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message == f"{path}{message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "must contain sections"),
        ("", "must contain sections"),
        ("model: a\nmodel: b\n", "duplicate key 'model'"),
        ("model: m\nrun: {steps: 1, steps: 2}\n", "duplicate key 'steps'"),
        ("model: m\n", "data is missing\n  run is missing"),
        ("model: m\n? [a, b]\n: 1\n", "a key must be a single value"),
        ("model: m\nrun: {name: 2024-13-45}\n", "'2024-13-45' cannot be read (month must be in 1..12)"),
        ("model: !!bool m\n", "'m' cannot be read"),
        ("[" * 2000, "nested too deeply"),
    ],
)
def test_error_in_a_broken_file_names_the_file(tmp_path, text, message):
    with pytest.raises(ConfigError, match="run.yaml") as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value)


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="none.yaml does not exist"):
        load_config(tmp_path / "none.yaml")


def test_override_in_place_of_the_file_has_a_hint():
    with pytest.raises(ConfigError, match="run.steps=3 does not exist") as caught:
        load_config("run.steps=3")
    assert caught.value.hint == "the config file comes first, followed by KEY=VALUE overrides"


def test_resolved_config_round_trips(tmp_path):
    data = {"train": "a.jsonl", "valid": "b.jsonl"}
    config = validate_config({**GOOD, "data": data, "eval": {"early_stop": {}}, "method": {"layers": [0, 1]}})
    assert load_config(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    "text", ["1e3", "-1E-5", ".5e1", "1_0e2", "1.", "1", "yes", "2024-01-01", "a: b", "größe"]
)
def test_text_that_looks_like_another_type_round_trips(tmp_path, text):
    run = {**GOOD["run"], "name": text}
    config = validate_config({"model": text, "data": {"train": text}, "run": run, "optim": {"lr": 1e-5}})
    assert load_config(write(tmp_path, to_yaml(config))) == config


def test_home_directory_in_run_dir_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = {**GOOD["run"], "name": "~"}
    assert validate_config({**GOOD, "run": {**run, "dir": "~/myruns"}}).directory == tmp_path / "myruns" / "~"
    with pytest.raises(ConfigError, match=r"run\.dir: the home directory in ~nobody-here/x does not exist"):
        _ = validate_config({**GOOD, "run": {**run, "dir": "~nobody-here/x"}}).directory


def test_sources_can_be_names_lists_or_weighted_lists(tmp_path):
    path = write(tmp_path, yaml.safe_dump(GOOD))
    assert load_config(path, ["data.train=[a.jsonl, b]"]).data.train == ["a.jsonl", "b"]
    config = load_config(path, ["data.train=[{source: a, weight: 0.5}, {source: b, weight: 2}]"])
    assert [(part.source, part.weight) for part in config.data.train] == [("a", 0.5), ("b", 2.0)]
    assert load_config(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=[]", "data.train: name at least one source"),
        ("data.train=''", "data.train: name at least one source"),
        ("data.train=[{source: a}]", "run.yaml: data.train.0.epochs: set either weight or epochs"),
        (
            "data.train=[{source: a, weight: 0}]",
            "run.yaml: data.train.0.weight: Input should be greater than 0",
        ),
        (
            "data.train=[{source: a, weigth: 1, weight: 1}]",
            "unknown key 'data.train.0.weigth', did you mean 'weight'?",
        ),
        (
            "data.train={source: a, weight: 1}",
            "run.yaml: data.train: must be a name, a list of names, or a list of {source, weight}, not a single mapping",
        ),
        (
            "data.curriculum={kind: difficulty, hard: {source: a, weight: 1}}",
            "run.yaml: data.curriculum.hard: must be a name, a list of names, or a list of {source, weight}",
        ),
        ("data.train=[a, {source: b, weight: 1}]", "data.train.1: Input should be a valid string"),
    ],
)
def test_invalid_source_reports_only_the_matching_union_branch(tmp_path, override, message):
    error = problem(tmp_path, override)
    assert message in error
    assert "data.train: Input should be a valid string" not in error


@pytest.mark.parametrize("objective", [{"kind": "grpo", "rewards": ["exact_match"]}, {"kind": "regression"}])
def test_objectives_with_other_data_cannot_be_mixed(objective):
    sft = {"objective": {"kind": "sft"}, "data": {"train": "a.jsonl"}}
    mix = {"kind": "mix", "parts": [sft, {"objective": objective, "data": {"train": "b.jsonl"}}]}
    with pytest.raises(ConfigError, match=f"{objective['kind']} cannot be part of a mix"):
        validate_config({"model": "m", "objective": mix, "run": {"steps": 3, "batch_size": 4}})


def test_parts_of_a_mix_have_one_chat_template():
    def validate(*templates):
        parts = [
            {
                "name": f"p{number}",
                "objective": {"kind": "sft"},
                "data": {"train": "a.jsonl", "template": name},
            }
            for number, name in enumerate(templates)
        ]
        mix = {"kind": "mix", "parts": parts}
        return validate_config({"model": "m", "objective": mix, "run": {"steps": 3, "batch_size": 4}})

    assert validate("chatml", "chatml").parts()["p1"].data.template == "chatml"
    with pytest.raises(ConfigError, match=r"must have the same data\.template"):
        validate("chatml", None)


def test_describe_keys_marks_only_universally_required_keys():
    lines = list(describe_keys())
    required = {line.split(":")[0].strip() for line in lines if line.endswith("(required)")}
    assert required == {"data.train"}
    assert any(line.startswith("  model.quality: ") and "required in this section" in line for line in lines)


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize("key", ["model", "data.train", "method.targets", "run.name", "nonsense"])
def test_exponential_aliases_are_rejected(tmp_path, key):
    start, *rest = key.split(".")
    value = f"{{{rest[0]}: *a11}}" if rest else "*a11"
    path = write(tmp_path, f"{LAUGHS}{start}: {value}\n")
    with pytest.raises(
        ConfigError, match=r"line 6, .*more than 100,000 values, with aliases expanded"
    ) as caught:
        load_config(path)
    assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match="is not a YAML value"):
        load_config(write(tmp_path, yaml.safe_dump(GOOD)), [f"{key}=[&a [x], {{b: *a, c: [*a]}}, *b]"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: &a [*a]", "a value contains itself"),
        ("model: &a {b: *a}", "a value contains itself"),
        ("model: " + "[" * 70 + "]" * 70, "nested more than 64 levels deep"),
        ("model: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n" + "c: [" + "*b, " * 30_000 + "]", "more than 100,000 values"),
        ("x" * (2**24 + 1), "is too large for a config: more than 16,777,216 characters"),
    ],
)
def test_deep_and_large_configs_are_rejected(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, text))
    assert len(str(caught.value)) < 500


def test_aliases_work(tmp_path):
    path = write(
        tmp_path,
        "model: m\ndata: {train: &x a.jsonl, valid: *x}\nrun: &r {steps: 3, batch_size: 4}\n",
    )
    assert load_config(path).data.valid == "a.jsonl"


@pytest.mark.parametrize(
    "override",
    [
        *[
            "optim.lr=LONG",
            "run.steps=LONG",
            "LONG=3",
            "LONG",
            "model.LONG=3",
            "method.kind=LONG",
            "data.LONG=1",
        ],
        *[
            "optim.groups={LONG: {lr: 1}}",
            "optim.lr=[LONG",
            "data.train=[LONG, 3, {a: LONG}]",
            "run.seed=9LONG",
        ],
        "data.train.LONG=3",
    ],
)
def test_long_values_are_shortened_in_messages(tmp_path, override):
    for digit in "x", "7":
        path = write(tmp_path, yaml.safe_dump(GOOD))
        with pytest.raises(ConfigError) as caught:
            load_config(path, [override.replace("LONG", digit * 300_000)])
        assert len(str(caught.value)) < 6000
