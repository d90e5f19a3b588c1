"""whet compare on models: losses, intervals and p-values against plain formulas, and the samples."""

import functools
import json
import math
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import whet
from test_docs import ROOT, fences
from tiny import run_config, write_tiny_model
from whet.cli.app import app
from whet.errors import ConfigError, DataError, WhetError
from whet.evaluation.record_scores import ratio_scores
from whet.evaluation.task_result import Score, TaskResult, read_results
from whet.reporting.compare.models_page import models_page
from whet.reporting.compare.models_text import models_text
from whet.studies import compare_models

TEXTS = [
    "The lamp is on.",
    "Dim it, then lock the door behind you.",
    "No.",
    "Three stones were brought to us.",
]


@pytest.fixture(scope="module")
def run(tiny_directory, tmp_path_factory):
    return whet.train(run_config(tiny_directory, tmp_path_factory.mktemp("compare")), verbose=0).directory


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def in_float32(monkeypatch):
    """Load models in float32, because the references are not rounded to the dtype of this machine."""
    load = functools.partial(compare_models.load, dtype=torch.float32, device="cpu")
    monkeypatch.setattr(compare_models, "load", load)


def metric_of(comparison, name):
    [metric] = [each for each in comparison.metrics if each.metric == name]
    return metric


def reference_losses(directory):
    """Return the summed loss and the number of tokens of each text, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sums, counts = [], []
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits
        sums.append(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item())
        counts.append(ids.shape[1] - 1)
    return np.array(sums), np.array(counts)


# --- the numbers


def test_losses_and_intervals_match_plain_formulas(run, tiny_directory, texts, tmp_path, in_float32):
    exported = whet.export(run, output=tmp_path / "merged")
    comparison = whet.compare_models([tiny_directory, run], texts, generate=False)
    loss, perplexity = metric_of(comparison, "loss"), metric_of(comparison, "perplexity")
    n = len(TEXTS)
    deviations = []
    for index, directory in enumerate((tiny_directory, exported)):
        sums, counts = reference_losses(directory)
        expected = sums.sum() / counts.sum()
        # the variance of a ratio of sums over records
        variance = ((sums - expected * counts) ** 2).sum() / (n * (n - 1) * counts.mean() ** 2)
        assert loss.values[index] == pytest.approx(expected, rel=1e-4)
        assert loss.stderrs[index] == pytest.approx(math.sqrt(variance), rel=1e-3)
        assert perplexity.values[index] == pytest.approx(math.exp(expected), rel=1e-3)
        assert perplexity.stderrs[index] == pytest.approx(math.exp(expected) * math.sqrt(variance), rel=1e-2)
        deviations.append((sums - expected * counts) / counts.mean())
    paired = loss.paired[1]
    assert paired.difference == pytest.approx(loss.values[1] - loss.values[0], rel=1e-9)
    difference = deviations[1] - deviations[0]
    t = paired.difference / (difference.std(ddof=1) / math.sqrt(n))
    x = abs(t) / math.sqrt(3)
    p = 1 - 2 / math.pi * (math.atan(x) + x / (1 + x * x))  # Student's t with 3 degrees of freedom
    assert paired.p == pytest.approx(p, rel=1e-2)
    low, high = paired.interval
    assert low < paired.difference < high


def test_ratio_scores_reproduce_a_bootstrap_of_the_ratio():
    """Intervals over the scores are those of resampling records and dividing their sums again."""
    rng = random.Random(0)
    counts = np.array([rng.randint(5, 60) for _ in range(80)], dtype=float)
    first = np.array([count * rng.uniform(2, 3) for count in counts])
    second = first - counts * np.array([rng.gauss(0.2, 0.2) for _ in counts])
    scores = ratio_scores(second, counts) - ratio_scores(first, counts)
    assert scores.mean() == pytest.approx((second.sum() - first.sum()) / counts.sum())
    ratios, means = [], []
    for _ in range(2000):
        rows = [rng.randrange(80) for _ in range(80)]
        ratios.append((second[rows].sum() - first[rows].sum()) / counts[rows].sum())
        means.append(scores[rows].mean())
    expected, ours = np.quantile(ratios, [0.025, 0.975]), np.quantile(means, [0.025, 0.975])
    assert ours == pytest.approx(expected, abs=0.05 * (expected[1] - expected[0]))


def test_values_are_those_of_whet_eval(run, tiny_directory, questions):
    comparison = whet.compare_models([tiny_directory, run], questions, max_tokens=4, checks=[r"regex=^\d"])
    for index, model in enumerate((tiny_directory, run)):
        metrics = whet.evaluate(model, questions, generate=True, max_tokens=4, checks=[r"regex=^\d"])
        for ours, theirs in (
            ("loss", "eval_loss"),
            ("perplexity", "eval_perplexity"),
            ("bits_per_byte", "eval_bits_per_byte"),
            ("exact_match", "exact_match"),
            ("regex", "regex"),
        ):
            assert metric_of(comparison, ours).values[index] == pytest.approx(metrics[theirs], rel=1e-5)


def test_split_records_are_one_item(tiny_directory, run, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in (3, 60, 5)))
    comparison = whet.compare_models(
        [tiny_directory, run], path, generate=False, max_length=64, too_long="split"
    )
    assert metric_of(comparison, "loss").paired[1].items == 3
    expected = whet.evaluate(run, path, max_length=64, too_long="split")["eval_loss"]
    assert metric_of(comparison, "loss").values[1] == pytest.approx(expected, rel=1e-5)


def test_mcnemar_counts_and_holm(tiny_directory, run, questions, tmp_path, monkeypatch):
    """Three models with known answers: the counts, exact p-values, and Holm's correction."""
    other = tmp_path / "other"
    shutil.copytree(tiny_directory, other)
    right = {"tiny": 1, run.name: 6, "other": 3}  # the first questions that a model answers
    evaluated = []

    def answers(evaluation, *, max_tokens, progress):
        evaluated.append(evaluation)
        name = ("tiny", run.name, "other")[len(evaluated) - 1]
        return [
            question.answer if index < right[name] else "wrong"
            for index, question in enumerate(evaluation.questions)
        ]

    monkeypatch.setattr(compare_models.ModelEvaluation, "all_answers", answers)
    comparison = whet.compare_models([tiny_directory, run, other], questions, max_tokens=5)
    exact = metric_of(comparison, "exact_match")
    assert exact.values == [1 / 6, 1.0, 0.5]
    assert exact.stderrs[2] == pytest.approx(math.sqrt(0.5 * 0.5 / 5))
    assert [(each.only_first, each.only_second) for each in exact.paired[1:]] == [(0, 5), (0, 2)]
    assert [each.p for each in exact.paired[1:]] == pytest.approx([2 / 2**5, 2 / 2**2])
    assert exact.p_adjusted[1:] == pytest.approx([2 * 2 / 2**5, 0.5])


# --- models, stored results and samples


def test_quantized_file_is_compared(run, tiny_directory, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    quantized = whet.export(run, to="gguf", gguf_type="q8_0", output=tmp_path / "model.gguf")
    comparison = whet.compare_models([tiny_directory, run, quantized], texts, generate=False)
    assert comparison.names == ["tiny", run.name, "model.gguf"]
    loss = metric_of(comparison, "loss")
    assert loss.values[2] == pytest.approx(loss.values[1], abs=0.05)
    assert loss.values[2] != loss.values[1]


def test_results_of_runs_are_stored_and_reused(run, tiny_directory, questions, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluations.jsonl"))
    first = whet.compare_models([tiny_directory, copy], questions, max_tokens=3)
    count = len(read_results(copy))
    assert count == 3, "per token, per byte, and answers"
    assert "questions.jsonl" in (copy / "final" / "README.md").read_text()
    computed = []
    original = compare_models.record_losses
    monkeypatch.setattr(compare_models, "record_losses", lambda each: computed.append(each) or original(each))
    again = whet.compare_models([tiny_directory, copy], questions, max_tokens=3)
    assert len(computed) == 1, "only the model that is not a run"
    assert again == first
    assert len(read_results(copy)) == count
    whet.compare_models([tiny_directory, copy], questions, max_tokens=2)
    assert len(read_results(copy)) == 2 * count, "other settings are computed"


def test_different_tokenizers_are_compared_per_byte(tiny_directory, texts, tmp_path):
    other = tmp_path / "other"
    write_tiny_model(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [["T", "h"]]
    vocabulary = tokenizer["model"]["vocab"]
    [unused] = [token for token, index in vocabulary.items() if index == 0]
    vocabulary["Th"] = vocabulary.pop(unused)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    comparison = whet.compare_models([tiny_directory, other], texts, generate=False)
    assert {each.metric for each in comparison.metrics} == {"bits_per_byte"}
    assert "different tokenizers" in comparison.notes[0]


def test_samples_show_every_answer(run, tiny_directory, questions, tmp_path, in_float32):
    comparison = whet.compare_models([tiny_directory, run], questions, max_tokens=4, samples=2)
    assert [(sample.prompt, sample.expected) for sample in comparison.samples] == [
        ("0+1=", "1"),
        ("1+1=", "2"),
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory)
    for index, directory in enumerate((tiny_directory, whet.export(run, output=tmp_path / "merged"))):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for sample in comparison.samples:
            chat = f"<|user|>{sample.prompt}<|end|><|assistant|>"  # the chat template
            prompt = tokenizer(chat, return_tensors="pt")
            output = model.generate(**prompt, max_new_tokens=4, do_sample=False)
            tokens = output[0, prompt["input_ids"].shape[1] :]
            assert sample.answers[index] == tokenizer.decode(tokens, skip_special_tokens=True).strip()
    text = models_text(comparison)
    assert all(name in text for name in ("sample 2", "expected", "tiny", "95% interval", "p (Holm)", "±"))
    page = models_page(comparison)
    assert page == models_page(comparison)
    assert "<script" not in page


def test_table_in_the_docs_is_what_is_printed():
    """20 items, of which the models solve the first 12, 18 and 17."""
    ids = [str(number) for number in range(20)]
    results = []
    for solved in (12, 18, 17):
        values = np.array([1.0] * solved + [0.0] * (20 - solved))
        score = Score(values.mean(), values.std(ddof=1) / math.sqrt(20))
        result = TaskResult("k", "test.jsonl", "1", 0, 20, None, False, {"exact_match": score})
        results.append([replace(result, item_ids=ids, item_scores={"exact_match": values.tolist()})])
    text = models_text(compare_models.compare_results(["base", "house", "house-q8_0"], results))
    [block] = [fence for fence in fences(ROOT / "docs" / "evaluate.md") if "house-q8_0  0.85" in fence.text]
    assert text.partition("\n\n")[0] == block.text.rstrip("\n")


@pytest.mark.slow  # make test-slow installs lm-eval
def test_tasks_are_compared_item_by_item(run, tiny_directory, tmp_path):
    pytest.importorskip("lm_eval")
    rng = random.Random(0)
    rows = [
        {"question": f"{n}?", "choices": ["lamp", "door", "hall"], "answer": rng.randrange(3)}
        for n in range(12)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tmp_path / "choice.yaml"
    task.write_text(
        f"""
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""
    )
    comparison = whet.compare_models([tiny_directory, run], tasks=[str(task)], limit=10)
    accuracy = metric_of(comparison, "acc")
    assert accuracy.task == "local_choice (first 10 items)"
    for index, model in enumerate((tiny_directory, run)):
        [result] = whet.benchmark(model, [str(task)], limit=10)
        assert accuracy.values[index] == result.scores["acc"].value
    assert accuracy.paired[1].items == 10
    assert "local_choice (first 10 items)" in (run / "final" / "README.md").read_text()


# --- the command


def test_command_prints_table_json_and_page(run, tiny_directory, questions, tmp_path):
    arguments = ["compare", str(tiny_directory), str(run), "--data", str(questions), "--max-tokens", "3"]
    runner = CliRunner()
    printed = runner.invoke(app, [*arguments, "--html", str(tmp_path / "page.html")], catch_exceptions=False)
    assert "exact_match" in printed.stdout
    assert "sample 3" in printed.stdout
    assert "exact_match" in (tmp_path / "page.html").read_text()
    printed = runner.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    values = json.loads(printed.stdout)
    assert values["models"] == ["tiny", run.name]
    assert {each["metric"] for each in values["metrics"]} >= {"loss", "bits_per_byte", "exact_match"}
    assert len(values["samples"]) == 3


@pytest.mark.parametrize(
    ("models", "arguments", "message"),
    [
        (1, ["--data", "DATA"], "at least two models"),
        (2, ["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (2, ["--data", "DATA", "--tasks", "arc_easy"], "exclude each other"),
        (2, ["--data", "DATA", "--limit", "3"], "apply to --tasks only"),
        (2, ["--data", "DATA", "--metric", "loss"], "--metric ranks runs"),
        (2, ["--data", "DATA", "--check", "nope"], "unknown check"),
        (2, ["--data", "DATA", "--no-generate", "--check", "json_valid"], "need generated responses"),
        (2, ["--chat"], "apply to --data or --tasks only"),
        (2, ["--data", "DATA", "--html", "page.txt"], "does not end in .html"),
    ],
)
def test_invalid_arguments(run, tiny_directory, questions, models, arguments, message):
    words = [str(questions) if word == "DATA" else word for word in arguments]
    command = ["compare", *[str(tiny_directory), str(run)][:models], *words, "--max-tokens", "1"]
    completed = CliRunner().invoke(app, command)
    assert isinstance(completed.exception, WhetError)
    assert message in str(completed.exception)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("nowhere/model", [], "no model called 'nowhere/model'"),
        ("model.gguf", [], "model.gguf does not exist"),
        (None, ["--html", "page.txt"], "does not end in .html"),
    ],
)
def test_errors_come_before_the_first_evaluation(
    run, tiny_directory, questions, monkeypatch, model, arguments, message
):
    monkeypatch.setattr(compare_models, "_evaluate", lambda *_: pytest.fail("evaluated"))
    command = ["compare", str(tiny_directory), str(model or run), "--data", str(questions), *arguments]
    completed = CliRunner().invoke(app, command)
    assert isinstance(completed.exception, WhetError)
    assert message in str(completed.exception)


def test_other_models_are_refused(run, tiny_directory, questions, tmp_path):
    with pytest.raises(ConfigError, match="is given twice"):
        whet.compare_models([run, run], questions)
    classifier = whet.Classifier.load(tiny_directory, classes=["no", "yes"], device="cpu", precision="fp32")
    classifier.save(tmp_path / "classifier")
    with pytest.raises(WhetError, match="is a classifier"):
        whet.compare_models([tiny_directory, tmp_path / "classifier"], questions)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(DataError, match="next-token loss"):
        whet.compare_models([tiny_directory, run], pairs)
