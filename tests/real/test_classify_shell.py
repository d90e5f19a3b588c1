"""SmolLM2 classifies faults of shell commands from unseen templates better than TF-IDF and a linear probe."""

import json
import time
from pathlib import Path

import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

import whet
from whet.config.load_config import load_config
from whet.data.synthetic.generators import generate

EXAMPLES = Path(__file__).parents[2] / "examples"


def tfidf_f1(config):
    """Return the best macro F1 of three TF-IDF classifiers on words and characters, with balanced classes."""
    (x, y), (valid_texts, valid_labels) = (
        ([record["input"] for record in records], [record["label"] for record in records])
        for records in (generate(config.data.train), generate(config.data.valid))
    )
    scores = []
    for vectors in (
        TfidfVectorizer(),
        TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2)),
        TfidfVectorizer(analyzer="char", ngram_range=(1, 5)),
    ):
        model = LogisticRegression(C=10, max_iter=2000, class_weight="balanced").fit(
            vectors.fit_transform(x), y
        )
        scores.append(f1_score(valid_labels, model.predict(vectors.transform(valid_texts)), average="macro"))
    return max(scores)


@pytest.mark.slow
def test_fine_tuning_beats_tfidf_and_linear_probe_on_unseen_templates(tmp_path, smollm2_directory):
    config = load_config(
        EXAMPLES / "classify-shell.yaml", [f"run.dir={tmp_path}", f"model={smollm2_directory}"]
    )
    started = time.perf_counter()
    result = whet.train(config)
    minutes = (time.perf_counter() - started) / 60
    report = json.loads((result.directory / "classification.json").read_text())
    f1, probe, words = report["f1_macro"], report["baselines"]["linear probe"]["f1_macro"], tfidf_f1(config)
    print(f"macro F1 {f1:.3f} in {minutes:.1f} minutes; linear probe {probe:.3f}, TF-IDF {words:.3f}")
    assert f1 >= 0.90
    assert f1 >= probe + 0.05
    assert f1 >= words + 0.05
    reloaded = whet.Classifier.load(result.directory).evaluate(config.data.valid)
    assert reloaded["log_loss"] == report["log_loss"]
    assert reloaded["confusion"] == report["confusion"]


@pytest.mark.slow
def test_fine_tuning_of_multi_label_faults(tmp_path, smollm2_directory):
    overrides = [f"run.dir={tmp_path}", f"model={smollm2_directory}"]
    result = whet.train(load_config(EXAMPLES / "classify-shell-faults.yaml", overrides))
    report = json.loads((result.directory / "classification.json").read_text())
    f1, probe = report["f1_macro"], report["baselines"]["linear probe"]["f1_macro"]
    print(f"macro F1 {f1:.3f}, linear probe {probe:.3f}, all faults right in {report['accuracy']:.1%}")
    assert f1 >= 0.85
    assert f1 >= probe + 0.05
