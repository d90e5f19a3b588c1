"""Progress of a run: a live progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from whet.training.callbacks import Callback, Metrics, RunView

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from whet.training.state import RunResult

_PLAIN_LINES = 20  # approximate number of progress lines per run without a terminal


class ProgressLines(Callback):
    """Print loss, throughput and remaining time about twenty times per run, and one line per evaluation."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.print_line = print_line
        self.total: int | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Store the number of steps and start timing."""
        self.total = run.total_steps
        self.unit, self.labels = run.unit, run.progress
        self.first_step, self.start_time = run.step, time.perf_counter()

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Print a progress line at the first, the last and about twenty evenly spaced steps."""
        if step in (1, self.total) or step % max(1, (self.total or 0) // _PLAIN_LINES) == 0:
            self.print_line(
                f"step {step}{f'/{self.total}' if self.total else ''}  loss {self._loss(metrics)}  "
                f"lr {metrics['lr']:.3g}  {self._speed(metrics)}  {metrics['peak_gib']:.2f} GiB"
                f"{self._time_left(step)}"
            )

    def _time_left(self, step: int) -> str:
        if self.total is None:
            return ""
        per_step = (time.perf_counter() - self.start_time) / (step - self.first_step)
        return f"  {per_step * (self.total - step):.0f} s left"

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """Print the metrics of an evaluation on one line."""
        self.print_line(f"step {step}  {format_metrics(metrics)}")

    def _loss(self, metrics: Metrics) -> str:
        """Return the loss and the objective's progress metrics, such as the mean reward."""
        values = {label: metrics[name] for name, label in self.labels.items() if name in metrics}
        return "  ".join([f"{metrics['loss']:.4f}", *(f"{label} {v:.4f}" for label, v in values.items())])

    def _speed(self, metrics: Metrics) -> str:
        """Return the throughput in tokens or rows per second, and the MFU if the device's peak is known."""
        mfu = f"  {metrics['mfu']:.0%} MFU" if "mfu" in metrics else ""
        return f"{metrics['tokens_per_s']:.0f} {self.unit}/s{mfu}"


class RunProgress(ProgressLines):
    """Show a live progress bar if the console is a terminal, and progress lines otherwise."""

    def __init__(self, console: "Console") -> None:
        super().__init__(lambda line: console.print(line, highlight=False))
        self.console = console
        self.bar: Progress | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Start the progress bar."""
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
        """Update the progress bar, or print a progress line."""
        if self.bar is None:
            super().on_step_end(step, metrics)
            return
        self.bar.update(self.task, completed=step, loss=self._loss(metrics), speed=self._speed(metrics))

    def on_train_end(self, result: "RunResult") -> None:
        """Remove the progress bar."""
        self.close()

    def close(self) -> None:
        """Stop the progress bar and restore the terminal; call it after an error, too."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def format_metrics(metrics: Metrics) -> str:
    """Return evaluation metrics on one line."""
    parts = []
    for name, value in metrics.items():
        if isinstance(value, list | dict):
            continue  # too long for a line; they are in metrics.jsonl
        if name.startswith("exact_match"):
            parts.append(f"{name.replace('_', ' ')} {value:.1%}")
        elif name == "s" or name.endswith("_s"):
            parts.append(f"({value:.1f} s)")
        else:
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return "  ".join(parts)
