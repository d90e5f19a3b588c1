"""Progress of a run: a progress bar on a terminal, plain lines in a pipe."""

import io
import re

import pytest
from rich.console import Console

import whet
from tiny import run_config
from whet.reporting.progress import RunProgress
from whet.training.callbacks import Callback, Injector


class FakeMfu(Injector):
    def on_step_end(self, step, metrics):
        metrics["mfu"] = 0.416


def train_with_progress(tiny_directory, tmp_path, callbacks=(), *, terminal, **sections):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, markup=False, emoji=False)
    progress = RunProgress(console)
    try:
        whet.train(run_config(tiny_directory, tmp_path, **sections), [progress, *callbacks])
    finally:
        progress.close()
    return console.file.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_terminal_shows_progress_bar_and_evaluation_lines(tiny_directory, tmp_path):
    shown = train_with_progress(tiny_directory, tmp_path, [FakeMfu()], terminal=True)
    text = plain(shown)
    assert "training" in text
    assert "4/4" in text
    assert re.search(r"loss \d\.\d{4}", text)
    assert re.search(r"\d+ tok/s  42% MFU", text)
    assert text.count("eval loss") == 2, "one line per evaluation, above the bar"
    assert "step 4/4  loss" not in text
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h"), "the cursor is visible again"


def test_pipe_shows_progress_lines(tiny_directory, tmp_path):
    shown = train_with_progress(tiny_directory, tmp_path, [FakeMfu()], terminal=False)
    assert "\x1b" not in shown
    assert "\r" not in shown
    lines = [line for line in shown.splitlines() if line.startswith("step ") and "/4" in line]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(re.search(r"tok/s  42% MFU", line) for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_grpo_progress_shows_the_mean_reward(tiny_directory, tmp_path, terminal):
    class FixedReward(Injector):
        def on_step_end(self, step, metrics):
            metrics["reward_mean"] = 0.625

    grpo = {
        "kind": "grpo",
        "rewards": [{"function": "length", "arguments": {"longest": 4}}],
        **{"group_size": 2, "max_new_tokens": 4, "samples": 0},
    }
    shown = plain(
        train_with_progress(
            tiny_directory,
            tmp_path,
            [FixedReward()],
            terminal=terminal,
            objective=grpo,
            data={"train": "synth:house:24", "max_length": 256},
            run={"name": "grpo", "dir": f"{tmp_path}/runs", "steps": 2, "batch_size": 2},
        )
    )
    assert re.search(r"loss -?\d\.\d{4}  reward 0\.6250", shown)


def test_cursor_is_restored_after_an_error(tiny_directory, tmp_path):
    class Fail(Callback):
        def on_step_end(self, step, metrics):
            raise ZeroDivisionError

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    progress = RunProgress(console)
    with pytest.raises(ZeroDivisionError):
        whet.train(run_config(tiny_directory, tmp_path), [progress, Fail()])
    progress.close()
    shown = console.file.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
