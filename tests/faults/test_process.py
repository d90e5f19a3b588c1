"""A run as a process: locks, signals, and closed output pipes."""

import os
import signal
import time

import pytest

import whet
from faults.harness import Case, assert_same_result, start, whet_process
from tiny import run_config
from whet.errors import CheckpointError
from whet.storage import lock_directory
from whet.training.callbacks import Callback

KEYS = {"checkpoint": {"every": 2}, "run": {"steps": 6}, "eval": {"every": 2}}


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_run_is_locked_by_one_process_until_it_dies(tiny_directory, tmp_path, record_property):
    record_property("fault: second process on the same run", 1)
    case = Case(
        tmp_path, run_config(tiny_directory, tmp_path, run={"steps": 100_000}, checkpoint={"every": 5})
    )
    process = start(*case.command(), output=case.output)
    try:
        wait_for(lambda: list((case.run / "checkpoints").glob("step-*")))
        with pytest.raises(CheckpointError, match=f"in use by process {process.pid}") as caught:
            whet.resume(case.run)
        assert caught.value.exit_code == 2
        assert "wait until that process has ended" in caught.value.hint
    finally:
        process.kill()
        process.join()

    class Stop(Callback):
        def on_train_begin(self, run):
            return whet.StopRun("free again", unfinished=True)

    assert whet.resume(case.run, [Stop()]).stopped_because == "free again"


def test_new_run_is_locked(tiny_directory, tmp_path):
    class Look(Callback):
        def on_step_end(self, step, metrics):
            with (
                pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"),
                lock_directory(tmp_path / "runs" / "test"),
            ):
                pass

    whet.train(run_config(tiny_directory, tmp_path), [Look()])
    with lock_directory(tmp_path / "runs" / "test"):
        pass


def test_closed_output_does_not_end_a_run(tiny_directory, tmp_path, record_property):
    """As with `whet train ... 2>&1 | head -1`."""
    record_property("fault: output closed by its reader", 1)
    case = Case(tmp_path / "read", run_config(tiny_directory, tmp_path, **KEYS))
    assert case.run_once() == 0
    unread = Case(tmp_path / "unread", run_config(tiny_directory, tmp_path, **KEYS))
    assert whet_process(*unread.command(), output=None) == 0
    assert_same_result(unread.result(), case.result())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_evaluation_between_batches_and_resume_repeats_it(
    tiny_directory, tmp_path, number, record_property
):
    """In the evaluation after step 4: of the loss, or of the generated answers."""
    record_property("fault: SIGINT or SIGTERM in a step, an evaluation or a load", 2)
    sections = {
        **KEYS, "eval": {"every": 2, "generate": True, "max_new_tokens": 5}, "data": {"valid": "synth:house-valid:12"}
    }  # fmt: skip
    uninterrupted = whet.train(run_config(tiny_directory, tmp_path / "uninterrupted", **sections))
    for pause in (2, 9):  # batches first, then tokens

        class Send(Callback):
            def on_step_end(self, step, metrics):
                self.step, self.pauses = step, 0

            def on_pause(self):
                if getattr(self, "step", 0) == 4:
                    self.pauses += 1
                    assert self.pauses <= pause + 1, "the evaluation continued"  # noqa: B023
                    if self.pauses == pause:  # noqa: B023
                        os.kill(os.getpid(), number)

        first = whet.train(run_config(tiny_directory, tmp_path / str(pause), **sections), [Send()])
        assert (first.steps, first.unfinished) == (4, True)
        assert "during an evaluation" in first.stopped_because
        result = whet.resume(first.directory)
        assert result.steps == 6
        case = Case(tmp_path / "reader", run_config(tiny_directory, tmp_path))
        case.run = first.directory
        resumed = case.result()
        case.run = uninterrupted.directory
        assert_same_result(resumed, case.result())


def test_run_with_signal_in_last_evaluation_can_be_finished(tiny_directory, tmp_path, record_property):
    record_property("fault: SIGINT or SIGTERM in a step, an evaluation or a load", 1)

    class Send(Callback):
        def on_step_end(self, step, metrics):
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    first = whet.train(run_config(tiny_directory, tmp_path, **KEYS), [Send()])
    assert (first.steps, first.unfinished) == (6, True)
    assert not (first.directory / "final").exists()
    result = whet.resume(first.directory)
    assert (result.steps, result.unfinished) == (6, False)
    assert (first.directory / "final").is_dir()


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_loading_ends_at_once_with_one_line(
    tiny_directory, tmp_path, monkeypatch, number, swallowed, record_property
):
    record_property("fault: SIGINT or SIGTERM in a step, an evaluation or a load", 1)

    def loading(*_, **__):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            if swallowed:  # as some libraries with native code do
                raise ValueError("exception in a callback") from None
            raise

    monkeypatch.setattr("whet.recipes.model_setup.load_base", loading)
    with pytest.raises(KeyboardInterrupt, match="stopped before the first step, so there is nothing to save"):
        whet.train(run_config(tiny_directory, tmp_path))
    assert not (tmp_path / "runs").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_initially_ignored_signal_does_not_stop_a_run(tiny_directory, tmp_path, number):
    """SIGHUP under nohup, SIGINT in a background job of a script."""

    class Send(Callback):
        def on_step_end(self, step, metrics):
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_IGN)
    try:
        result = whet.train(run_config(tiny_directory, tmp_path, run={"steps": 2}), [Send()])
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert (result.steps, result.unfinished) == (2, False)


def test_second_signal_ends_at_once(tiny_directory, tmp_path, monkeypatch):
    """Even if the disk is very slow; earlier checkpoints remain."""
    case = Case(
        tmp_path, run_config(tiny_directory, tmp_path, run={"steps": 100_000}, checkpoint={"every": 50})
    )
    process = start(*case.command(), output=case.output)
    try:
        wait_for(lambda: list((case.run / "checkpoints").glob("step-*")))
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        process.join(30)
        assert process.exitcode in (3, 130), case.output_text()  # 3: it saved before the second signal
    finally:
        process.kill()
        process.join()
    assert "Traceback" not in case.output_text()


def test_exit_code_and_line_of_an_interrupted_start(tiny_directory, tmp_path):
    case = Case(tmp_path, run_config(tiny_directory, tmp_path))
    process = start(*case.command(), output=case.output)
    try:
        wait_for(lambda: "device: cpu" in case.output_text())
        os.kill(process.pid, signal.SIGINT)
        process.join(30)
    finally:
        process.kill()
        process.join()
    if process.exitcode == 3:
        pytest.skip("it had after_first_row before the signal came")
    assert process.exitcode == 130, case.output_text()
    assert "SIGINT: stopped before the first step, so there is nothing to save" in case.output_text()
    assert "error" not in case.output_text()


def test_existing_name_error_suggests_resume(tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, checkpoint={"every": None})

    class Die(Callback):
        def on_step_end(self, step, metrics):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        whet.train(config, [Die()])
    with pytest.raises(whet.WhetError, match="never overwrites a run") as caught:
        whet.train(config)
    assert "restart it, because it has no checkpoint yet (whet resume" in caught.value.hint
