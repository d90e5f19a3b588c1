"""What a person sees while a run goes: a live bar on a terminal, plain lines everywhere else."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from whet.training.callbacks import Callback, Metrics, RunView

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from whet.training.state import RunResult

_PLAIN_LINES = 20  # about as many lines a run prints when nobody watches it live


class ProgressLines(Callback):
    """Loss, speed and time left, as about twenty lines of a run, and one line per evaluation."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.total: int | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Start the clock."""
        self.total = run.total_steps
        self.unit, self.shown = run.unit, run.progress
        self.started_at, self.started = run.step, time.perf_counter()

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Print a line now and then."""
        if step in (1, self.total) or step % max(1, (self.total or 0) // _PLAIN_LINES) == 0:
            self.say(
                f"step {step}{f'/{self.total}' if self.total else ''}  loss {self._loss(metrics)}  "
                f"lr {metrics['lr']:.3g}  {self._speed(metrics)}  {metrics['peak_gib']:.2f} GiB"
                f"{self._time_left(step)}"
            )

    def _time_left(self, step: int) -> str:
        if self.total is None:
            return ""
        per_step = (time.perf_counter() - self.started) / (step - self.started_at)
        return f"  {per_step * (self.total - step):.0f} s left"

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """One line an evaluation."""
        self.say(f"step {step}  {describe(metrics)}")

    def _loss(self, metrics: Metrics) -> str:
        """Return the loss, and what the objective shows beside it."""
        values = {label: metrics[name] for name, label in self.shown.items() if name in metrics}
        return "  ".join([f"{metrics['loss']:.4f}", *(f"{label} {v:.4f}" for label, v in values.items())])

    def _speed(self, metrics: Metrics) -> str:
        """Tokens or rows per second, and what share of the device that takes, where its peak is known."""
        share = f"  {metrics['mfu']:.0%} MFU" if "mfu" in metrics else ""
        return f"{metrics['tokens_per_s']:.0f} {self.unit}/s{share}"


class RunProgress(ProgressLines):
    """The same as a live bar, where the console is a terminal."""

    def __init__(self, console: "Console") -> None:
        super().__init__(lambda line: console.print(line, highlight=False))
        self.console = console
        self.bar: Progress | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Open the bar."""
        super().on_train_begin(run)
        if not self.console.is_terminal:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task("", total=self.total, completed=run.step, loss="-", speed="")
        self.bar.start()

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Move the bar, or print a line now and then."""
        if self.bar is None:
            super().on_step_end(step, metrics)
            return
        self.bar.update(self.task, completed=step, loss=self._loss(metrics), speed=self._speed(metrics))

    def on_train_end(self, result: "RunResult") -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, also after an error."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def describe(metrics: Metrics) -> str:
    """Evaluation numbers on one line."""
    parts = []
    for name, value in metrics.items():
        if isinstance(value, list | dict):
            continue  # too much for a line; metrics.jsonl has them
        if name.startswith("exact_match"):
            parts.append(f"{name.replace('_', ' ')} {value:.1%}")
        elif name.endswith("_s"):
            parts.append(f"({value:.1f} s)")
        else:
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return "  ".join(parts)
