"""Classification runs: training, held-out records, calibration, reports and errors."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import whet
from tiny import run_config
from whet.config.load_config import load_config, validate_config
from whet.errors import ConfigError, DataError, ModelError
from whet.recipes.classify.calibration import fit_temperature
from whet.runs.assemble import open_assembly
from whet.runs.inspect_data import view_data
from whet.training.checkpoint import checkpoint_path

CLASSES = ["red", "green", "blue"]
WORDS = {"red": "fire rose blood", "green": "leaf grass moss", "blue": "sky sea ice"}


def write_records(path, count=60, *, several=False, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        label = CLASSES[min(2, number % 4)] if not several else None
        if several:
            chosen = [name for name in CLASSES if rng.random() < 0.4]
            words = [rng.choice(WORDS[name].split()) for name in chosen] or ["nothing"]
            rows.append({"input": f"{number}: {' '.join(words)}", "labels": chosen})
        else:
            rows.append({"input": f"{number}: {rng.choice(WORDS[label].split())}", "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(tiny_directory, tmp_path, **sections):
    several = sections.get("objective", {}).get("multi_label", False)
    path = tmp_path / "train.jsonl"
    if not path.exists():
        write_records(path, several=several)
    objective = {"kind": "classify", "classes": CLASSES, "probe": False, **sections.pop("objective", {})}
    data = {"train": str(path), "valid": None, "max_length": 64, **sections.pop("data", {})}
    return run_config(tiny_directory, tmp_path, objective=objective, data=data, **sections)


def weights_at(run, step):
    return load_file(checkpoint_path(run, step) / "weights.safetensors")


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_every_trainable_parameter_changes_and_is_saved(tiny_directory, tmp_path, method):
    result = whet.train(
        config(
            tiny_directory,
            tmp_path,
            method={"kind": method, "rank": 4},
            objective={"bias": True, "pooling": "mean"},
            checkpoint={"every": 1, "keep": 10},
        )
    )
    first, last = weights_at(result.directory, 1), weights_at(result.directory, 4)
    assert {"heads.score.weight", "heads.score.bias"} <= first.keys()
    for name in first:
        assert not torch.equal(first[name], last[name]), name
    if method != "full":
        assert sorted({name.split(".")[-2] for name in first if "lora" in name}) == ["q_proj", "v_proj"]
        assert len(first) == 2 * 2 * 2 + 2
    stored = load_file(result.directory / "final" / "classifier.safetensors")
    assert torch.equal(stored["score.weight"], last["heads.score.weight"])
    assert torch.equal(stored["score.bias"], last["heads.score.bias"])


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_head_stays_float32_in_other_precisions(tiny_directory, tmp_path, precision):
    result = whet.train(config(tiny_directory, tmp_path, run={"precision": precision}, eval={"every": 2}))
    stored = weights_at(result.directory, 4)
    assert stored["heads.score.weight"].dtype == torch.float32
    report = json.loads((result.directory / "classification.json").read_text())
    assert 0 < report["log_loss"] < 10
    assert whet.Classifier.load(result.directory).precision.compute == torch.bfloat16


def test_bridge_model_classifies(tmp_path):
    from transformers import FalconConfig, FalconForCausalLM

    from tiny import write_tokenizer

    directory = tmp_path / "falcon"
    torch.manual_seed(0)
    FalconForCausalLM(
        FalconConfig(
            vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, eos_token_id=256
        )
    ).save_pretrained(directory)
    write_tokenizer(directory)
    result = whet.train(
        config(directory, tmp_path, method={"kind": "lora", "rank": 2, "targets": ["query_key_value"]})
    )
    again = whet.Classifier.load(result.directory)
    assert again.predict_proba(["1: fire"]).shape == (1, 3)
    with pytest.raises(ConfigError, match="adapter target 'qv': this model has no such layers"):
        whet.train(config(directory, tmp_path, run={"name": "qv"}))


@pytest.mark.parametrize(
    ("method", "several"), [("lora", False), ("qlora", False), ("full", False), ("lora", True)]
)
def test_evaluation_after_reload_is_bit_exact(tiny_directory, tmp_path, method, several):
    valid = write_records(tmp_path / "valid.jsonl", 30, several=several, seed=9)
    settings = config(
        tiny_directory,
        tmp_path,
        method={"kind": method, "rank": 4},
        objective={"multi_label": several},
        data={"valid": str(valid)},
    )
    result = whet.train(settings)
    before = json.loads((result.directory / "classification.json").read_text())
    for place in (result.directory, result.directory / "final"):
        after = whet.Classifier.load(place).evaluate(str(valid))
        for name in ("log_loss", "brier", "ece", "f1_macro", "accuracy", "per_class", "reliability"):
            assert before[name] == after[name], name
    if method != "qlora":  # a checkpoint says nothing of how its base was quantized
        after = whet.Classifier.load(checkpoint_path(result.directory, 4)).evaluate(str(valid))
        assert before["log_loss"] == after["log_loss"]
    shutil.copytree(result.directory / "final", tmp_path / "elsewhere")
    moved = whet.Classifier.load(tmp_path / "elsewhere", precision="fp32", device="cpu")
    assert moved.evaluate(str(valid))["log_loss"] == pytest.approx(before["log_loss"], rel=1e-5)


def test_held_out_records_are_stratified_and_listed_in_the_run(tiny_directory, tmp_path):
    result = whet.train(config(tiny_directory, tmp_path, eval={"every": 2}))
    stored = json.loads((result.directory / "held_out.json").read_text())
    assert len(stored["valid"]) == 12  # a fifth of 60
    assert all(len(text) == 64 for text in stored["valid"])
    report = json.loads((result.directory / "classification.json").read_text())
    assert report["split"] == "valid"
    assert {name: each["support"] for name, each in report["per_class"].items()} == {
        "red": 3,
        "green": 3,
        "blue": 6,
    }
    row = next(row for row in result.history if "eval_loss" in row)
    assert {"accuracy", "balanced_accuracy", "f1_macro", "mcc"} <= row.keys()
    assert "eval_perplexity" not in row
    again = whet.train(config(tiny_directory, tmp_path, run={"name": "again"}))
    assert json.loads((again.directory / "held_out.json").read_text()) == stored
    other = whet.train(config(tiny_directory, tmp_path, run={"name": "other", "seed": 1}))
    assert json.loads((other.directory / "held_out.json").read_text())["valid"] != stored["valid"]


def test_resumed_run_equals_uninterrupted_run(tiny_directory, tmp_path):
    sections = {"checkpoint": {"every": 2, "keep": 9}, "objective": {"oversample": True}}
    uninterrupted = whet.train(config(tiny_directory, tmp_path, **sections))
    half = tmp_path / "runs" / "half"
    shutil.copytree(uninterrupted.directory, half)
    shutil.rmtree(half / "final")
    shutil.rmtree(checkpoint_path(half, 4))
    (half / "config.yaml").write_text((half / "config.yaml").read_text().replace("name: test", "name: half"))
    resumed = whet.resume(half)
    assert resumed.steps == 4
    one, other = weights_at(uninterrupted.directory, 4), weights_at(half, 4)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_soft_labels_from_a_file_work_throughout_a_run(tiny_directory, tmp_path, caplog):
    caplog.set_level("INFO", logger="whet")
    rng = np.random.default_rng(1)
    rows = [{"input": f"text {n}", "labels": rng.random(3).round(3).tolist()} for n in range(40)]
    rows[7]["labels"] = ["green"]  # as good as [0, 1, 0]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cells = [(row["input"], row["labels"]) for row in rows]
    cells[7] = (cells[7][0], [0, 1, 0])
    (tmp_path / "train.csv").write_text("input,labels\n" + "".join(f'{t},"{v}"\n' for t, v in cells))
    objective = {"multi_label": True, "class_weights": "inverse", "calibrate": True, "probe": True}
    settings = config(tiny_directory, tmp_path, objective=objective, eval={"every": 2})
    result = whet.train(settings)
    settings["data"]["train"] = str(tmp_path / "train.csv")
    same = whet.train({**settings, "run": {**settings["run"], "name": "csv"}})
    one, other = weights_at(result.directory, 4), weights_at(same.directory, 4)
    assert all(torch.equal(one[name], other[name]) for name in one)

    held_out = set(json.loads((result.directory / "held_out.json").read_text())["valid"])
    tokenizer = whet.Classifier.load(result.directory).tokenizer
    hashes = [hash_of(tokenizer, text) for text, _ in cells]
    learned = np.array([v for (_, v), h in zip(cells, hashes, strict=True) if h not in held_out])
    stored = json.loads((result.directory / "final" / "class_weights.json").read_text())
    np.testing.assert_allclose(list(stored.values()), (1 - learned).sum(0) / learned.sum(0))
    assert "linear probe of the untrained model" in caplog.text

    report = json.loads((result.directory / "classification.json").read_text())
    texts, targets = zip(*(c for c, h in zip(cells, hashes, strict=True) if h in held_out), strict=True)
    chances = torch.from_numpy(whet.Classifier.load(result.directory).predict_proba(list(texts)))
    expected = torch.nn.functional.binary_cross_entropy(chances, torch.tensor(targets).double())
    assert report["log_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert [each["support"] for each in report["per_class"].values()] == (
        (np.array(targets) > 0.5).sum(0).tolist()
    )


def hash_of(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    return hashlib.sha256(np.array([*ids, ids[-1]], dtype=np.int64).tobytes()).hexdigest()


def test_old_token_store_without_soft_labels_is_not_reused(tiny_directory, tmp_path, monkeypatch, caplog):
    """Earlier versions skipped such records; their token store must not be mistaken for the complete file."""
    from whet.data.class_labels import ClassLabels
    from whet.data.tokens import prepare_dataset

    def without_soft(labels, fields):
        if 0.25 in fields["labels"]:
            raise DataError("not a label")
        return known(labels, fields)

    known = ClassLabels.label_values
    caplog.set_level("INFO", logger="whet")
    rows = [{"input": f"text {n}", "labels": [0, 1, 1] if n % 2 else [0.25, 0.5, 0.75]} for n in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(
        tiny_directory, tmp_path, objective={"multi_label": True}, data={"on_bad_record": "skip"}
    )
    with monkeypatch.context() as earlier:
        earlier.setattr(ClassLabels, "label_values", without_soft)
        earlier.setattr(prepare_dataset, "_LABELS_VERSION", 0)
        whet.train(settings)
    assert "of 6 training records, stratified by class" in caplog.text
    whet.train({**settings, "run": {**settings["run"], "name": "again"}})
    assert "of 12 training records, stratified by class" in caplog.text


def test_early_stopping_on_a_metric_restores_its_best_weights(tiny_directory, tmp_path):
    result = whet.train(
        config(
            tiny_directory,
            tmp_path,
            eval={"every": 1, "early_stop": {"metric": "f1_macro", "patience": 2}},
            run={"steps": 30},
            optim={"lr": 0.05, "warmup": 0},
        )
    )
    assert result.best["metric"] == "f1_macro"
    best = weights_at(result.directory, result.best["step"])
    stored = load_file(result.directory / "final" / "classifier.safetensors")
    assert torch.equal(stored["score.weight"], best["heads.score.weight"])
    report = json.loads((result.directory / "classification.json").read_text())
    assert report["f1_macro"] == pytest.approx(result.best["value"])


def test_tiny_model_learns_to_distinguish_words(tiny_directory, tmp_path):
    write_records(tmp_path / "train.jsonl", 240)
    valid = write_records(tmp_path / "valid.jsonl", 60, seed=5)
    result = whet.train(
        config(
            tiny_directory,
            tmp_path,
            method={"kind": "full"},
            data={"valid": str(valid)},
            run={"steps": 60, "batch_size": 16},
            objective={"probe": True, "calibrate": True},
            optim={"lr": 3e-3, "warmup": 5},
        )
    )
    report = json.loads((result.directory / "classification.json").read_text())
    assert report["f1_macro"] > 0.95
    assert 0 < report["baselines"]["linear probe"]["f1_macro"] < report["f1_macro"]
    assert report["baselines"]["majority"]["accuracy"] == pytest.approx(0.5)
    model = whet.Classifier.load(result.directory)
    assert model.predict(["7: rose", "8: moss", "9: ice"]) == CLASSES
    stored = load_file(result.directory / "final" / "classifier.safetensors")["score.weight"]
    trained = weights_at(result.directory, 60)["heads.score.weight"]
    torch.testing.assert_close(stored * report["calibration"]["temperature"], trained)


def test_fitted_temperature_undoes_scaling():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 3))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([rng.choice(3, p=row) for row in chances])
    assert fit_temperature((2.5 * logits).astype(np.float32), labels, multi_label=False) == pytest.approx(
        2.5, rel=0.1
    )
    marks = (rng.random((4000, 3)) < 1 / (1 + np.exp(-logits))).astype(np.float64)
    assert fit_temperature((0.5 * logits).astype(np.float32), marks, multi_label=True) == pytest.approx(
        0.5, rel=0.1
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "x", "label": 7}', r"train.jsonl:61: label 7 is out of range: the 3 classes are 0 to 2"),
        (
            '{"input": "x", "label": "gren"}',
            r"train.jsonl:61: label 'gren' is not in objective.classes\n.*did you mean 'green'",
        ),
        (
            '{"input": "x", "labels": ["red"]}',
            r"train.jsonl:61: the record has labels, but the objective expects a single label",
        ),
        ('{"input": "", "label": 0}', r"train.jsonl:61: the text has no tokens, so it cannot be classified"),
        ('{"text": "only text"}', r"train.jsonl:61: .*classification needs"),
        (
            '{"input": "x", "label": 1.5}',
            r"train.jsonl:61: label must be a class name or an integer >= 0, not 1.5\n.*soft targets",
        ),
    ],
)
def test_bad_records_are_reported_with_their_line(tiny_directory, tmp_path, line, message):
    settings = config(tiny_directory, tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        whet.train(settings)


def test_csv_and_text_fields_are_read(tiny_directory, tmp_path):
    rows = [f"{number} {CLASSES[number % 3]},{number % 3}" for number in range(12)]
    (tmp_path / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    marks = [f'{number} x,"[{number % 2}, 0, 1]"' for number in range(12)]
    (tmp_path / "marks.csv").write_text("input,labels\n" + "\n".join(marks) + "\n")
    assert (
        whet.train(config(tiny_directory, tmp_path, data={"train": str(tmp_path / "train.csv")})).steps == 4
    )
    several = config(
        tiny_directory,
        tmp_path,
        objective={"multi_label": True},
        data={"train": str(tmp_path / "marks.csv")},
        run={"name": "marks"},
    )
    assert "f1_micro" in whet.train(several).metrics


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"classes": 1}}, "at least two"),
        ({"objective": {"classes": ["a", "a"]}}, "same name"),
        ({"objective": {"class_weights": [1, 2]}}, "one number above 0 for each of the 3 classes"),
        (
            {"objective": {"multi_label": True, "oversample": True}},
            "oversample cannot be combined with multi_label",
        ),
        ({"objective": {"oversample": True, "class_weights": "inverse"}}, "set only one of them"),
        ({"objective": {"valid_share": 0}, "eval": {"every": 1}}, "eval.every needs data.valid"),
        ({"eval": {"generate": True}, "data": {"valid": "x"}}, "eval.generate cannot be combined with"),
        ({"data": {"too_long": "split"}}, "too_long: split cannot be combined with"),
        ({"objective": {"pooling": "max"}}, "pooling"),
    ],
)
def test_invalid_configs_are_rejected(tiny_directory, tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        validate_config(config(tiny_directory, tmp_path, **sections))


def test_too_long_text_is_rejected_with_its_length(tiny_directory, tmp_path):
    rows = [{"input": "x" * (64 + number), "label": CLASSES[number]} for number in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(tiny_directory, tmp_path, data={"too_long": "error"}, objective={"valid_share": 0})
    with pytest.raises(
        DataError, match="train.jsonl:2: the record has 65 tokens, but data.max_length is 64\n"
    ) as caught:
        whet.train(settings)
    assert caught.value.hint == "raise data.max_length, or set data.too_long to truncate or drop"
    view = view_data(validate_config(settings))
    assert view.splits[0].too_long == tuple(
        f"{tmp_path}/train.jsonl:{line}: {63 + line} tokens" for line in (2, 3)
    )


def test_adapters_target_q_and_v_by_default(tiny_directory, tmp_path):
    settings = config(tiny_directory, tmp_path)
    assert validate_config(settings).method.targets == "qv"
    path = tmp_path / "again.yaml"
    from whet.config.load_config import to_yaml

    path.write_text(to_yaml(validate_config(settings)))
    assert load_config(path) == validate_config(settings)
    settings["method"]["targets"] = "all-linear"
    assert validate_config(settings).method.targets == "all-linear"
    assert validate_config(run_config(tiny_directory, tmp_path)).method.targets == "all-linear"


def test_class_imbalance_is_weighted_and_logged(tiny_directory, tmp_path, caplog):
    caplog.set_level("INFO", logger="whet")
    rows = [{"input": f"{n}", "label": CLASSES[0 if n < 40 else 1 if n < 55 else 2]} for n in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whet.train(config(tiny_directory, tmp_path))
    assert (
        "class weights: sqrt_inverse, because the largest class has 8.0 times as many texts as the smallest"
        in caplog.text
    )
    caplog.clear()
    whet.train(config(tiny_directory, tmp_path, run={"name": "over"}, objective={"oversample": True}))
    assert "sqrt_inverse" not in caplog.text
    assert "oversampled: 96 examples from 48" in caplog.text


def test_classifier_is_not_loaded_as_a_language_model(tiny_directory, tmp_path):
    for method in ("lora", "full"):
        result = whet.train(config(tiny_directory, tmp_path, method={"kind": method}, run={"name": method}))
        for place in (result.directory, result.directory / "final", checkpoint_path(result.directory, 4)):
            with pytest.raises(ModelError, match="is a classifier, not a language model"):
                whet.load(place)
    with pytest.raises(ModelError, match="is not a classifier"):
        whet.Classifier.load(tiny_directory)


def test_damaged_head_is_rejected(tiny_directory, tmp_path):
    result = whet.train(config(tiny_directory, tmp_path))
    info = result.directory / "final" / "classifier.json"
    valid_info = json.loads(info.read_text())
    for changed, message in (
        ({"classes": CLASSES[1:]}, "is not a head for 2 classes"),
        ({"classes": "red"}, "classes has the invalid value 'red'"),
        ({"pooling": "max"}, "pooling has the invalid value 'max'"),
        ({"precision": "fp8"}, "precision has the invalid value 'fp8'"),
        ({"max_length": 0}, "max_length has the invalid value '0'"),
        ({"odd": 1}, "classifier.json is invalid"),
    ):
        info.write_text(json.dumps({**valid_info, **changed}))
        with pytest.raises(ModelError, match=message):
            whet.Classifier.load(result.directory / "final")
    info.write_text(json.dumps(valid_info))
    (result.directory / "final" / "classifier.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read"):
        whet.Classifier.load(result.directory)


def test_yaml_list_of_numbers_sets_class_weights(tiny_directory, tmp_path):
    settings = config(tiny_directory, tmp_path, objective={"class_weights": [1, 2, 3]})
    assert validate_config(yaml.safe_load(yaml.safe_dump(settings))).objective.class_weights == [
        1.0,
        2.0,
        3.0,
    ]


@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
def test_fitted_temperature_may_be_far_from_one(scale):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 3))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([rng.choice(3, p=row) for row in chances])
    actual = fit_temperature((scale * logits).astype(np.float32), labels, multi_label=False)
    assert actual == pytest.approx(scale, rel=0.1)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize(("scale", "bound"), [(-1.0, 100.0), (1e-4, 0.01)])
def test_temperature_at_its_bound_warns(scale, bound, multi_label, caplog):
    """Logits worse than none need an infinite temperature, tiny ones a temperature near 0."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 3))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([rng.choice(3, p=row) for row in chances])
    labels = np.eye(3)[labels] if multi_label else labels
    actual = fit_temperature((scale * logits).astype(np.float32), labels, multi_label=multi_label)
    assert actual == bound
    assert f"the best temperature is out of bounds, and {bound:g} is used" in caplog.text


def test_soft_labels_are_calibrated_even_if_all_predictions_are_correct():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 3))
    targets = 1 / (1 + np.exp(-logits))
    actual = fit_temperature((4 * logits).astype(np.float32), targets, multi_label=True)
    assert actual == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("multi_label", [False, True])
def test_no_temperature_is_fitted_if_all_predictions_are_correct(multi_label, caplog):
    logits = np.array([[2.0, -1.0], [-1.0, 3.0]], dtype=np.float32)
    labels = (logits > 0).astype(np.float64) if multi_label else np.array([0, 1])
    assert fit_temperature(logits, labels, multi_label=multi_label) == 1.0
    assert "every validation record is classified correctly" in caplog.text


def test_classifier_on_quantized_base_has_transformers_layout(tiny_directory, tmp_path):
    lines = [{"input": f"text {i}", "label": i % 2} for i in range(12)]
    (tmp_path / "marked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = run_config(
        tiny_directory,
        tmp_path,
        method={"kind": "qlora", "rank": 4},
        objective={"kind": "classify", "classes": ["even", "odd"], "probe": False},
        data={"train": f"{tmp_path}/marked.jsonl", "valid": None, "max_length": 64},
        run={"steps": 2},
    )
    result = whet.train(config)
    stored = json.loads((result.directory / "final" / "adapter_config.json").read_text())
    assert (stored["task_type"], stored["modules_to_save"]) == ("SEQ_CLS", ["score"])


def with_hard_records(tiny_directory, tmp_path, rows, **sections):
    path = tmp_path / "hard.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curriculum = {"kind": "difficulty", "hard": str(path)}
    data = {"curriculum": curriculum, **sections.pop("data", {})}
    return validate_config(config(tiny_directory, tmp_path, data=data, **sections))


def test_class_weights_and_probe_use_hard_records_too(tiny_directory, tmp_path, monkeypatch):
    from whet.recipes.classify import classifier_report

    rows = [{"input": f"hard {number}", "label": "red"} for number in range(21)]
    valid = write_records(tmp_path / "valid.jsonl", 30, seed=9)
    run_config = with_hard_records(
        tiny_directory,
        tmp_path,
        rows,
        objective={"class_weights": "inverse", "probe": True},
        data={"valid": str(valid)},
    )
    seen = []

    class Probe(classifier_report.LinearProbe):
        def fit(self, x, y):
            seen.append(np.bincount(y))
            return super().fit(x, y)

    monkeypatch.setattr(classifier_report, "LinearProbe", Probe)
    with open_assembly(run_config) as work:
        inverse = 1 / np.array([15 + 21, 15, 30])
        assert work.build.objective.class_weights.tolist() == pytest.approx(list(inverse / inverse.mean()))
    whet.train(run_config)
    assert [counts.tolist() for counts in seen] == [[36, 15, 30]]


def test_hard_records_equal_to_held_out_ones_are_not_trained_on(tiny_directory, tmp_path):
    path = write_records(tmp_path / "train.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with open_assembly(with_hard_records(tiny_directory, tmp_path, rows)) as work:
        splits = {
            name: {tuple(example.tokens) for example in examples}
            for name, examples in work.data.examples.items()
        }
        assert [len(splits[name]) for name in ("train", "valid", "hard")] == [48, 12, 48]
        assert not splits["valid"] & splits["hard"]
        held_out = [row for row in rows if tuple(work.data.tokenizer(row["input"]).input_ids) in
                {tokens[:-1] for tokens in splits["valid"]}]  # fmt: skip
    assert len(held_out) == 12
    run_config = with_hard_records(tiny_directory, tmp_path, held_out, run={"name": "all"})
    with (
        pytest.raises(DataError, match="every hard record equals a training record that was held out"),
        open_assembly(run_config),
    ):
        pass


SAMPLES = [("1: fire", "red"), ("2: moss", "green"), ("3: sky", "blue"), ("4: ice", "blue")]


def plain_loss(classifier, weights):
    """Return the weighted cross-entropy of the samples, from its formula."""
    logp = torch.from_numpy(classifier.logits([text for text, _ in SAMPLES])).double().log_softmax(1)
    classes = [CLASSES.index(name) for _, name in SAMPLES]
    return sum(-weights[c] * logp[row, c].item() for row, c in enumerate(classes)) / len(SAMPLES)


@pytest.mark.parametrize("kind", ["auto", "inverse", "sqrt_inverse", [3.0, 1.0, 0.5]])
def test_loaded_classifier_keeps_the_class_weights_of_its_run(tiny_directory, tmp_path, kind):
    settings = config(
        tiny_directory, tmp_path, objective={"class_weights": kind}, checkpoint={"every": 2, "keep": 9}
    )
    with open_assembly(validate_config(settings)) as work:
        weights = work.build.objective.class_weights.tolist()
    run = whet.train(settings).directory
    whet.Classifier.load(run).save(tmp_path / "saved")
    for place in (run, run / "final", checkpoint_path(run, 2), tmp_path / "saved"):
        again = whet.Classifier.load(place, device="cpu", precision="fp32")
        assert again.objective.class_weights.tolist() == weights
        expected = plain_loss(again, weights)
        assert again.train_batch(SAMPLES)["loss"] == pytest.approx(expected, rel=1e-5)


def test_computed_class_weights_that_are_not_stored_must_be_passed(tiny_directory, tmp_path):
    run = whet.train(config(tiny_directory, tmp_path, objective={"class_weights": "inverse"})).directory
    stored = run / "final" / "class_weights.json"
    assert json.loads(stored.read_text()).keys() == set(CLASSES)
    stored.unlink()
    for place in (run, checkpoint_path(run, 4)):
        old = whet.Classifier.load(place)
        assert old.predict_proba(["1: fire"]).shape == (1, 3)
        with pytest.raises(
            ConfigError, match="class_weights: inverse was computed from a run's training set"
        ):
            old.train_batch(SAMPLES)
        again = whet.Classifier.load(place, class_weights=[3.0, 1.0, 0.5])
        expected = plain_loss(again, [3.0, 1.0, 0.5])
        assert again.train_batch(SAMPLES)["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="one number above 0 for each of the 3 classes"):
        whet.Classifier.load(run, class_weights=[1.0])
    stored.write_text(json.dumps({"red": 1}))
    with pytest.raises(ModelError, match="does not contain a positive number for each of 3 classes"):
        whet.Classifier.load(run)


@pytest.mark.parametrize(("length", "warmup"), [({"steps": 4}, 1), ({"epochs": 1, "steps": None}, 0)])
def test_loaded_classifier_trains_at_a_constant_learning_rate(tiny_directory, tmp_path, length, warmup):
    optim = {"lr": 3e-3, "warmup": warmup, "schedule": "cosine"}
    run = whet.train(config(tiny_directory, tmp_path, optim=optim, run=length)).directory
    trainer = whet.Classifier.load(run).trainer
    assert [trainer.lr_at(step) for step in (1, 2, 50)] == [3e-3] * 3


def test_head_trains_without_adapter_learning_rates_after_merging(tiny_directory, tmp_path):
    groups = {"lora_A": {"lr_scale": 0.5}, "score": {"lr_scale": 2.0}}
    settings = config(
        tiny_directory, tmp_path, method={"kind": "lora", "rank": 4, "lr_ratio": 4}, optim={"groups": groups}
    )
    again = whet.Classifier.load(whet.train(settings).directory)
    again.merge_adapters()
    before = again.objective.head.score.weight.detach().clone()
    assert again.train_batch(SAMPLES)["total"] == 4
    assert not torch.equal(again.objective.head.score.weight, before)
    [group] = again.trainer.optimizer.param_groups
    assert group["lr_scale"] == 2.0
