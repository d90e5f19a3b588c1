"""The trainer: metrics, evaluations, checkpoints, stops, and steps with non-finite values."""

import importlib
import inspect
import json
import math
import pkgutil
from typing import ClassVar

import numpy as np
import pytest
import torch

import whet
from tiny import random_examples, run_config
from whet.config.load_config import validate_config
from whet.data.batches import BatchStream, IteratorStream, evaluation_batches, make_batch
from whet.data.packing import StepSettings
from whet.errors import CheckpointError, ConfigError, DataError, RunError
from whet.objectives.objective import Loss, Objective
from whet.objectives.sft import SFT
from whet.training.callbacks import Callback, Injector, StopRun, upgrade_state_names, with_state_names
from whet.training.checkpoint import load_checkpoint, save_checkpoint
from whet.training.early_stopping import EarlyStopping
from whet.training.observe.metrics_logger import MetricsLogger
from whet.training.trainer import Trainer

SETTINGS = StepSettings(batch_size=4, batch_tokens=None, micro_batch_tokens=128, pack=True)


def trainer(tiny_directory, tmp_path=None, callbacks=(), examples=None, **sections):
    torch.manual_seed(0)
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    whet.attach_lora(model, rank=4)
    examples = examples or random_examples(20)
    return Trainer(
        model,
        SFT(),
        BatchStream(examples, SETTINGS, seed=0),
        validate_config(run_config(tiny_directory, tmp_path or ".", **sections)),
        callbacks,
        eval_batches=evaluation_batches(random_examples(6, seed=9), SETTINGS),
        directory=tmp_path,
    )


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_train_begin(self, run):
        self.calls.append(("begin", run.step))

    def on_step_end(self, step, metrics):
        self.calls.append(("step", step))

    def on_eval_end(self, step, metrics):
        self.calls.append(("eval", step))

    def on_save(self, step, path):
        self.calls.append(("save", step))

    def on_train_end(self, result):
        self.calls.append(("end", result.steps))


def test_evaluations_before_during_and_after_training(tiny_directory):
    recorder = Recorder()
    trainer(tiny_directory, callbacks=[recorder], run={"steps": 5}, eval={"every": 2}).fit()
    events = [event for event in recorder.calls if event[0] in ("eval", "step")]
    assert events == [
        ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4), ("step", 5),
        ("eval", 5),
    ]  # fmt: skip
    assert recorder.calls[0] == ("begin", 0)
    assert recorder.calls[-1] == ("end", 5)


def test_evaluation_due_at_the_last_step_runs_once(tiny_directory):
    recorder = Recorder()
    trainer(tiny_directory, callbacks=[recorder], run={"steps": 4}, eval={"every": 2}).fit()
    assert [step for kind, step in recorder.calls if kind == "eval"] == [0, 2, 4]


def test_training_row_has_all_documented_fields(tiny_directory):
    result = trainer(tiny_directory).fit()
    row = next(row for row in result.history if "loss" in row)
    assert row.keys() >= {
        "step", "loss", "lr", "grad_norm", "tokens", "supervised_tokens", "tokens_total", "tokens_per_s",
        "step_s", "elapsed_s", "peak_gib",
    }  # fmt: skip
    rows = [row for row in result.history if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["tokens_total"] == sum(row["tokens"] for row in rows)
    assert [row["lr"] for row in rows[:2]] == [0.005, 0.01]
    evaluation = next(row for row in result.history if "eval_loss" in row)
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))


def test_evaluation_loss_is_weighted_by_tokens(tiny_directory):
    run = trainer(tiny_directory)
    examples = random_examples(5, seed=4)
    whole = run.evaluate(evaluation_batches(examples, SETTINGS))["eval_loss"]
    parts = [run.evaluate(evaluation_batches([example], SETTINGS))["eval_loss"] for example in examples]
    counts = [example.supervised_count for example in examples]
    assert whole == pytest.approx(
        sum(p * c for p, c in zip(parts, counts, strict=True)) / sum(counts), rel=1e-5
    )


def test_grad_norm_is_reported_before_clipping_and_the_update_is_clipped(tiny_directory):
    run = trainer(
        tiny_directory, optim={"clip": 1e-4, "name": "sgd", "momentum": 0.0, "lr": 1.0, "warmup": 0}
    )
    before = [p.detach().clone() for p in run.trained]
    metrics = run.step(next(run.stream))
    assert metrics["grad_norm"] > 1e-3
    moved = torch.stack([(p - b).norm() for p, b in zip(run.trained, before, strict=True)]).norm().item()
    assert moved == pytest.approx(1e-4 * metrics["lr"], rel=1e-2)


def test_training_reduces_the_loss(tiny_directory):
    result = trainer(tiny_directory, run={"steps": 30}, examples=random_examples(4)).fit()
    losses = [row["loss"] for row in result.history if "loss" in row]
    assert losses[-1] < losses[0] - 1.0


def poison(run, at):
    """Make the loss NaN in one step."""
    original = run.objective.loss

    def loss(model, batch):
        result = original(model, batch)
        if run.state.step + 1 == at and model.training:
            return type(result)({"loss": result.sums["loss"] * math.nan})
        return result

    run.objective.loss = loss


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "lion", "adafactor", "muon", "adamw8bit"])
def test_nonfinite_step_stops_the_run_with_unchanged_weights(tiny_directory, tmp_path, optimizer):
    run = trainer(tiny_directory, tmp_path, optim={"name": optimizer, "weight_decay": 0.1})
    poison(run, at=3)
    weights = {}

    class Keep(Callback):
        def on_step_end(self, step, metrics):
            weights[step] = [p.detach().clone() for p in run.trained]

    run.callbacks.callbacks.append(Keep())
    with pytest.raises(
        RunError,
        match=r"step 3: loss nan.*the update was skipped, the weights are unchanged.*nonfinite-step-000003",
    ) as e:
        run.fit()
    assert e.value.exit_code == 1
    assert all(torch.equal(a, b) for a, b in zip(weights[2], run.trained, strict=True))
    saved = json.loads((tmp_path / "nonfinite-step-000003.json").read_text())
    assert saved["micro_batches"][0]["records"]
    assert saved["micro_batches"][0]["tokens"]


def test_run_stopped_by_a_nonfinite_step_is_saved_before_that_step(tiny_directory, tmp_path):
    run = trainer(tiny_directory, tmp_path)
    poison(run, at=3)
    with pytest.raises(RunError):
        run.fit()
    again = trainer(tiny_directory, tmp_path)
    again.restore(tmp_path / "checkpoints" / "step-000002")
    whole = trainer(tiny_directory)
    assert again.fit().metrics["loss"] == whole.fit().metrics["loss"]


def test_nonfinite_step_can_be_skipped(tiny_directory):
    run = trainer(tiny_directory, run={"on_nonfinite": "skip"})
    poison(run, at=2)
    result = run.fit()
    rows = [row for row in result.history if "loss" in row]
    assert result.steps == 4
    assert [row.get("skipped", False) for row in rows] == [False, True, False, False]
    assert all(p.isfinite().all() for p in run.trained)


def test_step_without_supervised_tokens_is_an_error_with_its_records(tiny_directory):
    run = trainer(tiny_directory)
    batch = next(run.stream)[0]
    empty = type(batch)(**{**vars(batch), "supervised": 0})
    with pytest.raises(DataError, match=r"no supervised tokens .records: example"):
        run.step([empty])


def test_early_stopping_stops_with_a_reason(tiny_directory):
    stop = EarlyStopping(patience=2, min_delta=100.0)
    result = trainer(tiny_directory, callbacks=[stop], run={"steps": 20}, eval={"every": 2}).fit()
    assert result.steps == 4  # the first evaluation sets the mark, two more do not beat it
    assert "has not improved" in result.stopped_because
    assert not result.unfinished


def test_early_stopping_handles_nan():
    stop = EarlyStopping(patience=1)
    assert "has not improved" in stop.on_eval_end(0, {"eval_loss": math.nan}).reason


def test_terms_are_divided_by_their_own_weights_and_metrics_by_those_of_the_first(tiny_directory):
    """One of two terms has no units in one micro-batch, and none in the evaluation."""

    class Two(Objective):
        coefficients: ClassVar = {"a": 1.0, "b": 0.5}

        def weights(self, batch):
            return {
                "a": float(batch.supervised),
                "b": float(batch.real_tokens if batch.real_tokens > 30 else 0),
            }

        def loss(self, model, batch):
            touched = model.hidden(batch.tokens).sum() * 0
            has_b = batch.real_tokens > 30
            return Loss(
                {
                    "a": touched + 3.0 * batch.supervised,
                    "b": touched + (8.0 * batch.real_tokens if has_b else 0),
                },
                {"share": torch.tensor(2.0 * batch.supervised)},
            )

    run = trainer(tiny_directory)
    run.objective = run.train_step.objective = Two()
    long, short = (
        make_batch([[e]]) for e in (random_examples(1, shortest=40)[0], random_examples(1, longest=9)[0])
    )
    metrics = run.step([long, short])
    assert metrics["loss"] == pytest.approx(3.0 + 0.5 * 8.0)
    assert metrics["share"] == pytest.approx(2.0)
    actual = run.evaluate([short])
    assert (actual["eval_loss"], actual["eval_share"]) == pytest.approx((3.0, 2.0))


def test_too_few_batches_are_an_error(tiny_directory):
    run = trainer(tiny_directory)
    run.queue.stream = IteratorStream([next(run.stream)])
    with pytest.raises(RunError, match="the batches ran out after step 1 of 4"):
        run.fit()


def test_callback_state_survives_a_resume(tiny_directory, tmp_path):
    class Counting(Callback):
        def __init__(self):
            self.count = 0

        def on_step_end(self, step, metrics):
            self.count += 1
            return StopRun("test", unfinished=True) if step == 2 else None

        def state(self):
            return {"count": self.count}

        def restore(self, state):
            self.count = state["count"]

    first, second = Counting(), Counting()
    trainer(tiny_directory, tmp_path, callbacks=[first, second]).fit()
    run = trainer(tiny_directory, tmp_path, callbacks=[a := Counting(), b := Counting()])
    run.restore(tmp_path / "checkpoints" / "step-000002")
    b.count += 10
    run.fit()
    assert (a.count, b.count) == (4, 14)


def test_early_stopping_needs_an_existing_metric(tiny_directory):
    with pytest.raises(ConfigError, match="evaluations have no metric 'f1'"):
        trainer(tiny_directory, callbacks=[EarlyStopping("f1")]).fit()


def test_higher_exact_match_is_better():
    stop = EarlyStopping("exact_match", patience=1)
    assert stop.on_eval_end(0, {"exact_match": 0.1}) is None
    assert stop.on_eval_end(1, {"exact_match": 0.2}) is None
    assert isinstance(stop.on_eval_end(2, {"exact_match": 0.2}), StopRun)


def test_injectors_run_first_and_any_callback_may_stop(tiny_directory):
    read = []

    class Reader(Callback):
        def on_step_end(self, step, metrics):
            read.append(metrics["exp_answer"])
            return StopRun("enough") if step == 2 else None

    class Writer(Injector):
        def on_step_end(self, step, metrics):
            metrics["exp_answer"] = 42 + step

    result = trainer(tiny_directory, callbacks=[Reader(), Writer()]).fit()
    assert read == [43, 44]
    assert [row["exp_answer"] for row in result.history if "loss" in row] == [43, 44]
    assert (result.steps, result.stopped_because) == (2, "enough")


def test_best_and_last_checkpoints_are_retained(tiny_directory, tmp_path):
    run = trainer(
        tiny_directory,
        tmp_path,
        run={"steps": 9},
        checkpoint={"every": 2, "keep": 2},
        eval={"every": 1},
        optim={"lr": 1e-9},
    )
    losses = iter([5.0, 4.0, 3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    run.evaluate = lambda batches: {"eval_loss": next(losses)}
    result = run.fit()
    assert result.best == {"metric": "eval_loss", "value": 1.0, "step": 3}
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000003", "step-000008", "step-000009"]


def test_checkpoint_round_trip_of_weights_optimizer_and_metadata(tiny_directory, tmp_path):
    run = trainer(tiny_directory)
    run.step(next(run.stream))
    save_checkpoint(tmp_path / "c", run.model, run.optimizer, 1, {"note": "hello"})
    other = trainer(tiny_directory)
    metadata = load_checkpoint(tmp_path / "c", other.model, other.optimizer)
    assert metadata == {"step": 1, "note": "hello"}
    for a, b in zip(run.trained, other.trained, strict=True):
        assert torch.equal(a, b)
        for key, value in run.optimizer.state[a].items():
            assert torch.equal(value, other.optimizer.state[b][key])


@pytest.mark.parametrize(
    ("step", "metadata", "message"),
    [
        (5, {"step": 9}, "metadata must not have the key 'step'"),
        (5, {"note": torch.zeros(1)}, "metadata is not JSON-serializable: Object of type Tensor"),
        (5, {"note": {"a", "b"}}, "metadata is not JSON-serializable"),
        (5, {1: "one"}, "metadata must be a dictionary whose keys are strings"),
        (5, ["note"], "metadata must be a dictionary whose keys are strings"),
        (-1, None, "must be an integer >= 0, not -1"),
        (1.5, None, "must be an integer >= 0, not 1.5"),
    ],
)
def test_unserializable_checkpoint_state_is_an_error(tiny, tmp_path, step, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "c", tiny[0], step=step, metadata=metadata)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(1.5), 1.5),
        (np.int64(2), 2),
        (torch.tensor(1.5), 1.5),
        (np.ones(2), [1.0, 1.0]),
        ({"a": [np.float64(3)]}, {"a": [3.0]}),
    ],
)
def test_numpy_and_torch_metrics_become_python_values(tiny_directory, tmp_path, value, expected):
    class Writer(Injector):
        def on_step_end(self, step, metrics):
            metrics["mine"] = value

        def on_eval_end(self, step, metrics):
            metrics["eval_mine"] = value

        def on_train_end(self, result):
            result.summary["mine"] = value

    class Reader(Callback):
        def on_step_end(self, step, metrics):
            seen.append(metrics["mine"])

    seen = []
    rows = tmp_path / "rows.jsonl"
    callbacks = [MetricsLogger(rows), Reader(), Writer()]
    result = trainer(tiny_directory, tmp_path, callbacks=callbacks, run={"steps": 2}).fit()
    assert seen == [expected] * 2
    assert type(seen[0]) is type(expected)
    assert result.metrics["mine"] == result.metrics["eval_mine"] == expected
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["mine"] for row in written if "loss" in row] == [expected] * 2
    assert written[-1]["summary"]["mine"] == expected
    state = json.loads((tmp_path / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["run"]["latest"]["mine"] == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MetricsLogger("rows.jsonl", every=0), "every must be at least 1, not 0"),
        (lambda: whet.GradientStats([], every=0), "every must be"),
        (lambda: whet.WeightStats(every=0), "every must be"),
        (lambda: EarlyStopping(patience=0), "patience must be at least 1, not 0"),
    ],
)
def test_counts_below_one_are_errors(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_negative_min_delta_is_an_error():
    with pytest.raises(ConfigError, match="min_delta must be >= 0, not -1"):
        EarlyStopping(min_delta=-1)


def test_total_steps_must_be_positive(tiny_directory):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    config = validate_config(run_config(tiny_directory, "."))
    with pytest.raises(ConfigError, match="total_steps must be at least 1, not 0"):
        Trainer(model, SFT(), (), config, total_steps=0)


def test_only_a_stop_run_aborts_an_evaluation(tiny_directory):
    class Odd(Callback):
        def on_pause(self):
            return True

    result = trainer(tiny_directory, callbacks=[Odd()], run={"steps": 1}).fit()
    assert "eval_loss" in result.metrics


def test_early_stopping_needs_a_numeric_metric():
    with pytest.raises(ConfigError, match=r"have no metric 'shares' \(available: eval_loss\)"):
        EarlyStopping("shares").on_eval_end(0, {"eval_loss": 1.0, "shares": {"a": 1}})


def test_state_names_survive_a_renamed_class():
    class Renamed(EarlyStopping):
        pass

    callbacks = [EarlyStopping(), Renamed("loss"), Callback()]
    assert [name for name, _ in with_state_names(callbacks)] == [
        "early-stopping-0",
        "early-stopping-1",
        "Callback-0",
    ]


def test_state_names_of_older_checkpoints_are_upgraded():
    old = {
        "EarlyStopping-0": {"best": 1},
        "MetricsLogger-0": {"window": 2},
        "SinkCallback-1": {},
        "Mine-0": {"a": 3},
    }
    assert upgrade_state_names(old) == {
        "early-stopping-0": {"best": 1},
        "metrics-logger-0": {"window": 2},
        "sink-1": {},
        "Mine-0": {"a": 3},
    }
    assert upgrade_state_names(upgrade_state_names(old)) == upgrade_state_names(old)


def test_every_stateful_callback_has_its_own_state_key():
    optional = (
        "triton",
        "__main__",
        "evaluation.harness",
    )  # these need Triton or lm-eval, or start the command
    for module in pkgutil.walk_packages(whet.__path__, "whet."):
        if not any(name in module.name for name in optional):
            importlib.import_module(module.name)
    stack, keys = [Callback], {}
    while stack:
        kind = stack.pop()
        stack += kind.__subclasses__()
        if (
            kind.__module__.startswith("whet.")
            and kind.state is not Callback.state
            and not inspect.isabstract(kind)
        ):
            assert kind.state_key is not None, kind
            assert keys.setdefault(kind.state_key, kind) is kind
    assert len(keys) == 5
