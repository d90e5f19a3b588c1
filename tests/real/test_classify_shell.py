"""SmolLM2 tells what is wrong with shell commands of templates it never saw; words and frozen features do not."""

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
    """The best of three usual bags of words and characters, each class as heavy as any other."""
    (x, y), (held, wanted) = (
        ([record["input"] for record in records], [record["label"] for record in records])
        for records in (generate(config.data.train), generate(config.data.valid))
    )
    found = []
    for vectors in (
        TfidfVectorizer(),
        TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2)),
        TfidfVectorizer(analyzer="char", ngram_range=(1, 5)),
    ):
        model = LogisticRegression(C=10, max_iter=2000, class_weight="balanced").fit(
            vectors.fit_transform(x), y
        )
        found.append(f1_score(wanted, model.predict(vectors.transform(held)), average="macro"))
    return max(found)


@pytest.mark.slow
def test_fine_tuning_beats_words_and_frozen_features_on_templates_it_never_saw(tmp_path, smollm2_directory):
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
    again = whet.Classifier.load(result.directory).evaluate(config.data.valid)
    assert again["log_loss"] == report["log_loss"]
    assert again["confusion"] == report["confusion"]


@pytest.mark.slow
def test_fine_tuning_finds_several_faults_at_once(tmp_path, smollm2_directory):
    overrides = [f"run.dir={tmp_path}", f"model={smollm2_directory}"]
    result = whet.train(load_config(EXAMPLES / "classify-shell-faults.yaml", overrides))
    report = json.loads((result.directory / "classification.json").read_text())
    f1, probe = report["f1_macro"], report["baselines"]["linear probe"]["f1_macro"]
    print(f"macro F1 {f1:.3f}, linear probe {probe:.3f}, all faults right in {report['accuracy']:.1%}")
    assert f1 >= 0.85
    assert f1 >= probe + 0.05
