"""`whet.Classifier`: custom training loops, exact accumulation, data-parallel workers, and saved files."""

import json
import re

import numpy as np
import pytest
import torch

import whet
from tiny import write_tiny_model, write_tokenizer
from whet.errors import ConfigError, DataError, ModelError, RunError
from whet.parallel.gradient_sync import flat_gradients, set_flat_gradients
from whet.training.loss import total_weights, weighted_loss
from whet.training.optim.optimizers import masked_step

CLASSES = ["red", "green", "blue"]
SAMPLES = [("fire and rose", "red"), ("moss", "green"), ("the deep sea", "blue"), ("ice", 2), ("a leaf", 1)]
TEXTS = ["rose", "grass of the field", "sky"]
SETTINGS = {"method": {"rank": 4}, "optim": {"lr": 1e-2, "clip": None}, "device": "cpu", "precision": "fp32"}


def new(tiny_directory, **more):
    return whet.Classifier.load(tiny_directory, CLASSES, **{**SETTINGS, **more})


def weights(classifier):
    return torch.cat([p.detach().flatten() for p in classifier.trainable_parameters()])


def test_train_steps_learn_and_return_metrics(tiny_directory):
    classifier = new(tiny_directory, max_length=64)
    before = weights(classifier)
    first = classifier.train_batch(SAMPLES)
    assert first.keys() == {"loss", "correct", "total", "grad_norm"}
    assert first["total"] == 5
    assert first["grad_norm"] > 0
    assert not torch.equal(weights(classifier), before)
    for _ in range(60):
        last = classifier.train_batch(SAMPLES)
    assert last["correct"] == 5
    assert last["loss"] < first["loss"]
    assert classifier.predict([text for text, _ in SAMPLES]) == ["red", "green", "blue", "blue", "green"]
    chances = classifier.predict_proba(TEXTS)
    assert chances.shape == (3, 3)
    np.testing.assert_allclose(chances.sum(1), 1)
    step = classifier.train_step("fire", "red")
    assert step["total"] == 1


def test_classes_without_names_are_named_by_index(tiny_directory):
    classifier = whet.Classifier.load(tiny_directory, 3, **SETTINGS)
    assert classifier.train_batch([("rose", 2), ("rose", "2")])["total"] == 2
    [actual] = classifier.predict(["rose"])
    assert actual in ("0", "1", "2")
    assert classifier.train_step("rose", actual)["total"] == 1


def test_invalid_use_raises_clear_errors(tiny_directory):
    classifier = new(tiny_directory)
    with pytest.raises(ConfigError, match="texts must be a list of texts, not a single text"):
        classifier.predict("rose")
    for ids, message in (
        ([999_999], "token id 999999 is outside the model's vocabulary of"),
        ([-1], "token id -1 is outside"),
        (5, "5 is neither a string nor a sequence of token ids"),
        ([1.5], "neither a string"),
    ):
        with pytest.raises(DataError, match=message):
            classifier.predict([ids])
    for sample in ("rose", "ab", ("rose",), ("rose", "red", 1), {"input": "rose", "label": "red"}, 5):
        with pytest.raises(DataError, match=r"a sample must be \(text, label\), not"):
            classifier.train_batch([("moss", "green"), sample])
    assert classifier.accumulate([]) == 0
    with pytest.raises(DataError, match="there are no records to evaluate"):
        classifier.evaluate([])


def test_numpy_and_torch_values_and_paths_are_accepted(tiny_directory, tmp_path):
    classifier = new(tiny_directory)
    for label in (np.int64(1), torch.tensor(1)):
        assert classifier.train_step("moss", label)["total"] == 1
    assert len(classifier.predict([np.array([1, 2, 3]), torch.tensor([1, 2])])) == 2
    several = new(tiny_directory, multi_label=True)
    assert several.train_step("moss", np.array([0, 1, 1]))["total"] == 1
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"input": "moss", "label": "green"}) + "\n")
    assert classifier.evaluate(path)["examples"] == 1


def test_an_empty_batch_changes_nothing(tiny_directory):
    classifier = new(tiny_directory)
    before = weights(classifier)
    assert classifier.train_batch([]) == {"loss": 0.0, "correct": 0, "total": 0, "grad_norm": 0.0}
    assert classifier.apply()["total"] == 0
    assert torch.equal(weights(classifier), before)
    assert classifier.predict([]) == []
    assert classifier.predict_proba([]).shape == (0, 3)


@pytest.mark.parametrize("more", [{}, {"class_weights": [3.0, 1.0, 0.5], "normalise": "weights"}])
def test_accumulated_samples_equal_one_batch(tiny_directory, more):
    """The update is bit-identical, because the same micro-batches are computed."""
    batched, pieces = new(tiny_directory, **more), new(tiny_directory, **more)
    for _ in range(3):
        at_once = batched.train_batch(SAMPLES)
        assert pieces.accumulate(SAMPLES[:2]) == 2
        assert pieces.accumulate(SAMPLES[2:]) == 5
        assert pieces.apply() == at_once
    assert torch.equal(weights(batched), weights(pieces))


def test_trainable_parameters_and_learning_rate(tiny_directory):
    classifier = new(tiny_directory, bias=True)
    # rank * (in + out) an adapter on q (32 -> 32) and v (32 -> 16), in two layers, and the head
    assert classifier.num_trainable_parameters == 2 * 4 * ((32 + 32) + (32 + 16)) + 3 * 32 + 3
    shapes = [tuple(p.shape) for p in classifier.trainable_parameters()]
    assert shapes == [(4, 32), (32, 4), (4, 32), (16, 4)] * 2 + [(3, 32), (3,)]
    before = weights(classifier)
    classifier.set_lr(0.0)
    classifier.train_batch(SAMPLES)
    assert torch.equal(weights(classifier), before)
    classifier.merge_adapters()
    head = weights(classifier)
    classifier.train_batch(SAMPLES)
    assert torch.equal(weights(classifier), head)
    classifier = new(tiny_directory, bias=True)
    summary = classifier.summary()
    assert "4 layers, rank 4, alpha 16" in summary
    assert "995 parameters, 99 of them in the head" in summary


def test_merged_adapters_give_the_same_probabilities(tiny_directory):
    classifier = new(tiny_directory)
    for _ in range(5):
        classifier.train_batch(SAMPLES)
    before = classifier.predict_proba(TEXTS)
    classifier.merge_adapters()
    np.testing.assert_allclose(classifier.predict_proba(TEXTS), before, atol=1e-5)
    assert classifier.num_trainable_parameters == 3 * 32


def test_several_classes_and_token_ids(tiny_directory):
    classifier = new(tiny_directory, multi_label=True)
    ids = classifier.tokenizer("fire")["input_ids"]
    assert (
        classifier.train_batch([("fire and sea", ["red", "blue"]), (ids, [1, 0, 0]), ("x", [])])["total"] == 3
    )
    np.testing.assert_array_equal(classifier.predict_proba([ids]), classifier.predict_proba(["fire"]))
    report = classifier.evaluate(
        [{"input": "fire", "labels": ["red"]}, {"input": "sea", "labels": [0, 0, 1]}]
    )
    assert report["multi_label"]


def test_soft_labels_train_exactly_for_texts_and_token_ids(tiny_directory):
    """The loss is binary cross-entropy in float64; the update is the same for a text and for its ids."""
    targets = [0.3, 0.7, 0.9]
    weights_of_classes = [2.0, 1.0, 0.5]
    texts = new(tiny_directory, multi_label=True, class_weights=weights_of_classes)
    ids = new(tiny_directory, multi_label=True, class_weights=weights_of_classes)
    logits = torch.from_numpy(texts.logits(["fire"])).double()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.tensor([targets]).double(), pos_weight=torch.tensor(weights_of_classes).double()
    )
    one = texts.train_batch([("fire", targets)])
    assert one["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert one == ids.train_batch([(ids.tokenizer("fire")["input_ids"], np.array(targets))])
    assert torch.equal(weights(texts), weights(ids))
    for _ in range(150):
        texts.train_batch([("fire", targets)])
    np.testing.assert_allclose(texts.predict_proba(["fire"])[0], targets, atol=0.2)
    record = {"input": "fire", "labels": targets}
    for report in (ids.evaluate([record]), ids.evaluate([{**record, "input": [5, 6, 7]}])):
        assert report["log_loss"] > 0


@pytest.mark.parametrize("text", ["fire", [5, 6, 7]])
@pytest.mark.parametrize(
    ("several", "label", "message"),
    [
        (False, 1.5, "label must be a class name or an integer >= 0, not 1.5"),
        (False, None, "a record with the fields"),
        (False, [0.5, 0.5, 0.0], "the objective expects a single label"),
        (True, [0.3, 0.7], "the record has 2 soft labels, but there are 3 classes"),
        (True, [0.3, 0.7, 1.5], "labels must be"),
        (True, [0.3, 0.7, float("nan")], "labels must be"),
        (True, 0.5, "label must be a class name or an integer >= 0, not 0.5"),
    ],
)
def test_invalid_labels_are_rejected_for_texts_and_token_ids(tiny_directory, text, several, label, message):
    with pytest.raises(DataError, match=message):
        new(tiny_directory, multi_label=several).train_batch([(text, label)])


def test_texts_are_truncated_at_max_length(tiny_directory):
    classifier = new(tiny_directory, max_length=5)
    np.testing.assert_array_equal(classifier.predict_proba(["abcdefgh"]), classifier.predict_proba(["abcde"]))
    assert not np.array_equal(classifier.predict_proba(["abcdX"]), classifier.predict_proba(["abcde"]))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (("x", "pink"), "label 'pink' is not in objective.classes"),
        (("x", 3), "a sample: label 3 is out of range"),
        (("", 0), "the text has no tokens, so it cannot be classified"),
    ],
)
def test_invalid_samples_are_rejected(tiny_directory, sample, message):
    with pytest.raises(DataError, match=message):
        new(tiny_directory).train_batch([sample])


def test_invalid_settings_are_rejected(tiny_directory):
    with pytest.raises(ConfigError, match="did you mean 'pooling'"):
        new(tiny_directory, poling="mean")


def test_schedule_spans_total_steps(tiny_directory):
    """Learning rates match the formulas, and stay constant after the last update."""
    cosine = new(tiny_directory, optim={"lr": 1e-2, "schedule": "cosine", "warmup": 2}, total_steps=10)
    rates = []
    for _ in range(12):
        rates.append(cosine.optimizer_lr())
        cosine.train_step("rose", "red")
    expected = [0.005, 0.01]  # the warm-up
    expected += [1e-3 + 9e-3 * (1 + np.cos(np.pi * done / 8)) / 2 for done in (*range(1, 9), 8, 8)]
    np.testing.assert_allclose(rates, expected)
    linear = new(tiny_directory, optim={"lr": 1e-2, "schedule": "linear", "min_lr_ratio": 0}, total_steps=4)
    before = weights(linear)
    rates = []
    for _ in range(4):
        rates.append(linear.optimizer_lr())
        linear.train_step("rose", "red")
    np.testing.assert_allclose(rates, [0.0075, 0.005, 0.0025, 0.0], atol=1e-12)
    assert not torch.equal(weights(linear), before)


def test_schedule_without_total_steps_is_constant_after_warmup(tiny_directory):
    for schedule in ("cosine", "linear", "wsd", [{"kind": "constant", "steps": 2}, {"kind": "cosine"}]):
        with pytest.raises(ConfigError, match="needs the number of updates") as caught:
            new(tiny_directory, optim={"schedule": schedule})
        assert "total_steps" in caught.value.hint
    with pytest.raises(ConfigError, match="total_steps must be at least 1, not 0"):
        new(tiny_directory, total_steps=0)
    constant = new(tiny_directory, optim={"lr": 1e-2, "warmup": 2})
    rates = []
    for _ in range(4):
        rates.append(constant.optimizer_lr())
        constant.train_step("rose", "red")
    assert rates == [0.005, 0.01, 0.01, 0.01]
    constant.set_lr(3e-4)
    assert constant.optimizer_lr() == 3e-4


def test_schedule_continues_after_merging(tiny_directory):
    classifier = new(tiny_directory, optim={"lr": 1e-2, "schedule": "linear"}, total_steps=10)
    for _ in range(3):
        classifier.train_batch(SAMPLES)
    rate = classifier.optimizer_lr()
    classifier.merge_adapters()
    assert classifier.optimizer_lr() == rate


def test_saved_classifier_trains_with_given_settings_or_rejects_them(tiny_directory, tmp_path):
    new(tiny_directory).save(tmp_path / "saved")
    again = whet.Classifier.load(
        tmp_path / "saved", optim={"lr": 2e-3, "schedule": "linear", "min_lr_ratio": 0}, total_steps=2
    )
    assert again.optimizer_lr() == pytest.approx(1e-3)
    with pytest.raises(ConfigError, match="linear needs the number of updates"):
        whet.Classifier.load(tmp_path / "saved", optim={"schedule": "linear"})
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        whet.Classifier.load(tmp_path / "saved", optim={"lrr": 1})
    with pytest.raises(ConfigError, match="method, pooling: only supported for a new head"):
        whet.Classifier.load(tmp_path / "saved", method={"rank": 2}, pooling="mean")


# --- gradients without an update, and updates with given gradients


@pytest.mark.parametrize("cut", [0, 2, 5])
@pytest.mark.parametrize("more", [{}, {"class_weights": [3.0, 1.0, 0.5]}])
def test_workers_that_exchange_gradients_match_a_single_worker(tiny_directory, cut, more):
    optim = {"lr": 1e-2, "clip": 0.5, "schedule": "linear"}
    alone, *workers = (new(tiny_directory, optim=optim, total_steps=5, **more) for _ in range(3))
    for _ in range(3):
        before = weights(workers[0])
        uninterrupted = alone.train_batch(SAMPLES)
        shards = (SAMPLES[:cut], SAMPLES[cut:])
        parts = [w.collect_gradients(s, total=len(SAMPLES)) for w, s in zip(workers, shards, strict=True)]
        assert torch.equal(weights(workers[0]), before), "nothing is updated yet"
        vectors, results = zip(*parts, strict=True)
        assert sum(result["loss"] for result in results) == pytest.approx(uninterrupted["loss"], rel=1e-5)
        for key in ("correct", "total"):
            assert sum(result[key] for result in results) == uninterrupted[key]
        rate = workers[0].optimizer_lr()
        updates = [worker.apply_gradients(sum(vectors)) for worker in workers]
        assert updates[0] == updates[1]
        assert updates[0]["lr"] == rate
        assert updates[0]["grad_norm"] == pytest.approx(uninterrupted["grad_norm"], rel=1e-4)
        assert torch.equal(weights(workers[0]), weights(workers[1]))
    assert workers[0].optimizer_lr() == alone.optimizer_lr()
    # the order of the sums differs from one worker's, and Adam's first steps magnify it
    assert (weights(workers[0]) - weights(alone)).norm() <= 1e-3 * weights(alone).norm()


def test_collected_gradients_match_autograd(tiny_directory):
    """The reference is autograd in float64 of the mean of w[label] * -log p over the samples."""
    classifier = new(tiny_directory, bias=True, class_weights=[3.0, 1.0, 0.5])
    vector, result = classifier.collect_gradients(SAMPLES)
    assert all(parameter.grad is None for parameter in classifier.trainable_parameters())
    head = classifier.objective.head.score
    [batch] = classifier.batches([classifier._example(*sample) for sample in SAMPLES])
    with torch.no_grad():
        features = classifier.objective.features(classifier.model, batch).double()
    weight, bias = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    logp = (features @ weight.T + bias).log_softmax(1)
    classes = batch.column("values")[:, 0].long()  # the texts of a batch are in an order of its own
    assert sorted(classes.tolist()) == [0, 1, 1, 2, 2]
    loss = (torch.tensor([3.0, 1.0, 0.5]).double()[classes] * -logp[range(5), classes]).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, (weight, bias))])
    torch.testing.assert_close(vector[-expected.numel() :].double(), expected, rtol=1e-4, atol=1e-6)
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    before = weights(classifier)
    with pytest.raises(RunError, match="not finite"):
        classifier.apply_gradients(vector * float("nan"))
    with pytest.raises(RunError, match="parameters have .* elements, and the gradient vector has the shape"):
        classifier.apply_gradients(vector[1:])
    with pytest.raises(ConfigError, match="total must be above 0"):
        classifier.collect_gradients(SAMPLES, total=0)
    assert torch.equal(weights(classifier), before)


def reference_gradient(tiny_directory, classifier, samples, class_weights):
    """Return the gradient of the summed loss, computed by transformers in float64 on merged weights.

    At the start B is zero, so the update of a matrix W is scale * B A with dL/dB = scale * dL/dW A^T, dL/dA = 0.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)
    head = classifier.objective.head.score.weight.detach().double().requires_grad_()
    loss = 0.0
    for text, label in samples:
        ids = torch.tensor([classifier.tokenizer(text)["input_ids"]])
        state = model.model(ids).last_hidden_state[0, -1]
        number = CLASSES.index(label) if isinstance(label, str) else label
        loss = loss - class_weights[number] * (head @ state).log_softmax(0)[number]
    loss.backward()
    parts = []
    own = iter(classifier.trainable_parameters())
    for layer in model.model.layers:
        for matrix in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            a, _ = next(own).detach().double(), next(own)
            parts += [torch.zeros_like(a), 16 / 4 * matrix.weight.grad @ a.T]
    return torch.cat([part.flatten() for part in (*parts, head.grad)]), loss.item()


@pytest.mark.parametrize("normalise", ["samples", "weights"])
@pytest.mark.parametrize("cut", [0, 2])
def test_gradients_of_two_halves_sum_to_the_batch_gradient(tiny_directory, cut, normalise):
    class_weights = [3.0, 1.0, 0.5]
    more = {"class_weights": class_weights, "normalise": normalise, "optim": {"name": "sgd", "lr": 0.1}}
    alone, *workers = (new(tiny_directory, **more) for _ in range(3))
    count = 5 if normalise == "samples" else 3.0 + 1.0 + 0.5 + 0.5 + 1.0
    expected, summed = reference_gradient(tiny_directory, alone, SAMPLES, class_weights)
    assert alone.loss(SAMPLES) == pytest.approx(summed / count, rel=1e-5)
    for step in range(4):
        parts = [
            worker.gradients(half)
            for worker, half in zip(workers, (SAMPLES[:cut], SAMPLES[cut:]), strict=True)
        ]
        flat, n = sum(part for part, _ in parts), sum(n for _, n in parts)
        assert (flat.ndim, flat.dtype, n) == (1, torch.float32, pytest.approx(count))
        if step == 0:
            torch.testing.assert_close(flat.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(flat.double(), alone.gradients(SAMPLES)[0].double(), rtol=1e-4, atol=1e-5)
        before = alone.loss(SAMPLES)
        uninterrupted = alone.train_batch(SAMPLES)
        assert uninterrupted["loss"] == pytest.approx(before, rel=1e-6)
        first, second = workers[0].apply_gradients(flat, n), workers[1].apply_gradients(flat.numpy(), n)
        assert first == second
        assert first["grad_norm"] == pytest.approx(uninterrupted["grad_norm"], rel=1e-4)
        assert torch.equal(weights(workers[0]), weights(workers[1]))
        torch.testing.assert_close(weights(workers[0]), weights(alone), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(alone), weights(new(tiny_directory, **more)))


def test_invalid_gradients_are_rejected(tiny_directory):
    classifier = new(tiny_directory)
    before = weights(classifier)
    flat, n = classifier.gradients([])
    assert (flat.abs().sum(), n) == (0, 0)
    with pytest.raises(ConfigError, match="n must be above 0, not 0"):
        classifier.apply_gradients(flat, n)
    with pytest.raises(DataError, match="an empty list of samples"):
        classifier.loss([])
    assert torch.equal(weights(classifier), before)
    assert classifier.counts()["steps"] == 0


def test_summary_contains_all_counts(tiny_directory, tmp_path):
    classifier = new(
        tiny_directory, optim={"lr": 1e-2, "schedule": "linear", "min_lr_ratio": 0}, total_steps=4
    )
    base = sum(p.numel() for p in whet.load(tiny_directory)[0].parameters())
    adapters = 2 * 4 * ((32 + 32) + (32 + 16))
    expected = {
        "parameters": base + adapters + 96,
        "trained_parameters": adapters + 96,
        "head_parameters": 96,
        "classes": 3,
        "steps": 0,
        "samples_seen": 0,
    }
    assert classifier.counts() == expected
    rates = [classifier.learning_rate]
    classifier.train_batch(SAMPLES)
    rates.append(classifier.learning_rate)
    classifier.accumulate(SAMPLES[:2])
    classifier.apply()
    rates.append(classifier.learning_rate)
    classifier.apply_gradients(*classifier.gradients(SAMPLES[:3]))
    assert rates == pytest.approx([0.75e-2, 0.5e-2, 0.25e-2])
    assert classifier.counts() == expected | {"steps": 3, "samples_seen": 10}
    classifier.merge_adapters()
    assert classifier.counts() == expected | {
        "parameters": base + 96,
        "trained_parameters": 96,
        "steps": 3,
        "samples_seen": 10,
    }
    summary = classifier.summary()
    assert f"{base + 96:,} parameters with the head" in summary
    assert "3 updates, 10 samples" in summary
    assert str(tiny_directory) in summary
    assert re.search(r"method +lora", summary)


def test_forward_only_returns_loss_and_class(tiny_directory):
    weights_of_classes = [3.0, 1.0, 0.5]
    classifier = new(tiny_directory, class_weights=weights_of_classes)
    before = weights(classifier)
    for text, label in (("rose", "red"), ("the sea", "blue")):
        loss, predicted = classifier.forward_only(text, label)
        logp = torch.from_numpy(classifier.logits([text])).double().log_softmax(1)[0]
        number = CLASSES.index(label)
        assert loss == pytest.approx(-weights_of_classes[number] * logp[number].item(), rel=1e-5)
        assert predicted == classifier.predict([text])[0]
    assert torch.equal(weights(classifier), before)


def test_load_corpus_reads_samples(tiny_directory, tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"input": "rose", "label": "red"}, {"text": "sea", "label": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    classifier = new(tiny_directory)
    for source in (path, str(path)):
        assert classifier.load_corpus(source) == [("rose", "red"), ("sea", 2)]
    assert classifier.train_batch(classifier.load_corpus(path))["total"] == 2
    path.write_text(json.dumps({"input": "rose", "labels": [0.3, 0, 1]}) + "\n")
    assert new(tiny_directory, multi_label=True).load_corpus(path) == [("rose", [0.3, 0, 1])]
    path.write_text('{"input": "rose", "label": "red"}\n{"input": "rose", "label": "pink"}\n')
    with pytest.raises(DataError, match="corpus.jsonl:2: label 'pink' is not in objective.classes"):
        classifier.load_corpus(path)


# --- F-DP-001: identical weights on every worker after each step, whatever the shards


def worker_step(worker, shard, step):
    """Return the gradients of a worker's shard, divided by the weight of the step."""
    own = [worker._example(*sample) for sample in shard]
    everything = worker.batches([worker._example(*sample) for sample in step])
    total = total_weights(worker.objective, everything)
    for parameter in worker.trainable_parameters():
        parameter.grad = None
    for batch in worker.batches(own) if own else []:
        share, _ = weighted_loss(
            worker.model, worker.objective, batch, weights=total, precision=worker.precision
        )
        share.backward()
    return flat_gradients(worker.trainable_parameters())


@pytest.mark.parametrize("cut", [0, 1, 2, 4])
@pytest.mark.parametrize("more", [{}, {"class_weights": [3.0, 1.0, 0.5], "normalise": "weights"}])
def test_workers_that_sum_gradients_match_a_single_worker(tiny_directory, cut, more):
    alone = new(tiny_directory, **more)
    workers = [new(tiny_directory, **more), new(tiny_directory, **more)]
    for _ in range(3):
        alone.train_batch(SAMPLES)
        shards = (SAMPLES[:cut], SAMPLES[cut:])
        vectors = [worker_step(w, shard, SAMPLES) for w, shard in zip(workers, shards, strict=True)]
        for worker in workers:
            set_flat_gradients(worker.trainable_parameters(), vectors[0] + vectors[1])
            masked_step(worker.trainer.optimizer, lr=1e-2, skip=torch.zeros(()))
        assert torch.equal(weights(workers[0]), weights(workers[1]))
    # the order of the sums differs from one worker's, and Adam's first steps magnify it
    assert (weights(workers[0]) - weights(alone)).norm() <= 1e-3 * weights(alone).norm()


def test_flat_gradient_has_adapters_by_layer_then_head(tiny_directory):
    classifier = new(tiny_directory, bias=True)
    worker_step(classifier, SAMPLES, SAMPLES)
    named = dict(classifier.trainer.learner.named_parameters())
    order = [
        f"layers.{layer}.self_attn.{kind}_proj.lora_{side}"
        for layer in (0, 1)
        for kind in ("q", "v")
        for side in ("A", "B")
    ]
    order += ["heads.score.weight", "heads.score.bias"]
    expected = torch.cat([named[name].grad.flatten() for name in order])
    assert torch.equal(flat_gradients(classifier.trainable_parameters()), expected)
    with pytest.raises(RunError, match="parameters have .* elements, and the gradient vector has the shape"):
        set_flat_gradients(classifier.trainable_parameters(), expected[1:])
    with pytest.raises(RunError, match="not finite"):
        set_flat_gradients(classifier.trainable_parameters(), expected * float("nan"))


# --- files


def trained(directory, tmp_path, **more):
    classifier = new(directory, **more)
    for _ in range(8):
        classifier.train_batch(SAMPLES)
    classifier.save(tmp_path / "saved")
    return classifier


@pytest.mark.parametrize("more", [{}, {"method": {"kind": "full"}}, {"pooling": "mean", "bias": True}])
def test_saved_classifier_loads_bit_exactly(tiny_directory, tmp_path, more):
    classifier = trained(tiny_directory, tmp_path, **more)
    again = whet.Classifier.load(tmp_path / "saved", device="cpu", precision="fp32")
    np.testing.assert_array_equal(again.predict_proba(TEXTS), classifier.predict_proba(TEXTS))
    assert again.info == classifier.info


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_classifier_keeps_its_precision(tiny_directory, tmp_path, precision):
    trained(tiny_directory, tmp_path, precision=precision)
    again = whet.Classifier.load(tmp_path / "saved", device="cpu")
    assert again.settings.precision == precision
    other = whet.Classifier.load(tmp_path / "saved", device="cpu", precision="bf16-pure")
    other.save(tmp_path / "other")
    assert whet.Classifier.load(tmp_path / "other").settings.precision == "bf16-pure"
    info = tmp_path / "saved" / "classifier.json"
    stored = json.loads(info.read_text())
    info.write_text(json.dumps({name: stored[name] for name in stored if name != "precision"}))
    assert whet.Classifier.load(tmp_path / "saved").settings.precision == "auto"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"class_weights": "inverse"}, "class_weights: inverse needs the class counts of a training set"),
        ({"class_weights": "sqrt_inverse"}, "class_weights: sqrt_inverse needs"),
        ({"class_weights": "effective"}, "class_weights: effective needs"),
        ({"oversample": True}, "oversample is only supported in runs"),
        ({"calibrate": True}, "calibrate is only supported in runs"),
        ({"valid_share": 0.3}, "valid_share is only supported in runs"),
        ({"probe": True}, "probe is only supported in runs"),
    ],
)
def test_run_only_keys_are_rejected(tiny_directory, more, message):
    with pytest.raises(ConfigError, match=message):
        new(tiny_directory, **more)


def padded(tokenizer, texts):
    return tokenizer(texts, return_tensors="pt", padding=True)


def peft_probabilities(directory, base, classes=3):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=classes, pad_token_id=256)
    model = PeftModel.from_pretrained(model, directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        return model(**padded(tokenizer, TEXTS)).logits.softmax(-1).numpy()


@pytest.mark.parametrize("targets", ["qv", "all-linear"])
def test_peft_and_transformers_give_equal_probabilities(tiny_directory, tmp_path, targets):
    classifier = trained(tiny_directory, tmp_path, method={"rank": 4, "targets": targets})
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["score"]
    actual = peft_probabilities(tmp_path / "saved", tiny_directory)
    np.testing.assert_allclose(actual, classifier.predict_proba(TEXTS), atol=1e-5)


def test_peft_loads_classifier_on_bridge_model(tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    directory = tmp_path / "opt"
    torch.manual_seed(0)
    OPTForCausalLM(
        OPTConfig(
            vocab_size=260,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
            eos_token_id=256,
            pad_token_id=256,
        )
    ).save_pretrained(directory)
    write_tokenizer(directory)
    classifier = trained(directory, tmp_path)
    np.testing.assert_allclose(
        peft_probabilities(tmp_path / "saved", directory), classifier.predict_proba(TEXTS), atol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_full_model_classifier(tmp_path, tied):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    write_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    classifier = trained(tmp_path / "model", tmp_path, method={"kind": "full"})
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert [model.config.id2label[number] for number in range(3)] == CLASSES
    with torch.no_grad():
        actual = model(**padded(AutoTokenizer.from_pretrained(tmp_path / "saved"), TEXTS)).logits.softmax(-1)
    np.testing.assert_allclose(actual.numpy(), classifier.predict_proba(TEXTS), atol=1e-5)


def test_head_unsupported_by_transformers_is_saved_for_whet_only(tiny_directory, tmp_path):
    trained(tiny_directory, tmp_path, pooling="mean")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None
    assert "score" not in (tmp_path / "saved" / "adapter_config.json").read_text()
    with pytest.raises(ModelError, match="is a classifier"):
        whet.load(tmp_path / "saved")


def test_muon_does_not_update_the_classification_head(tiny_directory):
    model = new(tiny_directory, method={"kind": "full"}, optim={"name": "muon", "lr": 1e-3})
    names = {id(p): name for name, p in model.trainer.learner.named_parameters()}
    groups = model.trainer.optimizer.param_groups
    [rule] = [g["rule"] for g in groups for p in g["params"] if "score" in names[id(p)]]
    assert rule == "adamw"
