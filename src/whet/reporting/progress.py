"""What a person sees while a run goes: a live bar on a terminal, plain lines everywhere else."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from whet.config.quality import Quality
from whet.training.callbacks import Metrics, NumbersOnly

if TYPE_CHECKING:
    from whet.training.state import RunResult
    from whet.training.trainer import Trainer

_PLAIN_LINES = 20  # about as many lines a run prints when nobody watches it live


class RunProgress(NumbersOnly):
    """Loss, speed and time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None
        self.total = 0
        self.unit = "tok"

    def on_train_begin(self, run: "Trainer") -> None:
        """Open the bar."""
        self.total = run.total_steps
        self.unit = "rows" if isinstance(run.config.model, Quality) else "tok"
        self.started_at, self.started = run.state.step, time.perf_counter()
        if not self.console.is_terminal:
            return
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
        self.task = self.bar.add_task("", total=self.total, completed=run.state.step, loss="-", speed="")
        self.bar.start()

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Move the bar, or print a line now and then."""
        if self.bar is not None:
            self.bar.update(
                self.task,
                completed=step,
                loss=self._loss(metrics),
                speed=self._speed(metrics),
            )
        elif step in (1, self.total) or step % max(1, self.total // _PLAIN_LINES) == 0:
            done = step - self.started_at
            left = (time.perf_counter() - self.started) / done * (self.total - step)
            self.console.print(
                f"step {step}/{self.total}  loss {self._loss(metrics)}  lr {metrics['lr']:.3g}  "
                f"{self._speed(metrics)}  {metrics['peak_gib']:.2f} GiB  {left:.0f} s left",
                highlight=False,
            )

    def on_eval_end(self, step: int, metrics: Metrics) -> None:
        """One line an evaluation."""
        self.console.print(f"step {step}  {describe(metrics)}", highlight=False)

    def on_train_end(self, result: "RunResult") -> None:
        """Close the bar."""
        self.close()

    def _loss(self, metrics: Metrics) -> str:
        """Return the loss; of the quality models also what shows early that a router collapses."""
        shown = f"{metrics['loss']:.4f}"
        if self.unit == "rows":
            shown += f"  grad norm {metrics['grad_norm']:.4f}"
            if "router_entropy_mean" in metrics:
                shown += f"  router entropy {metrics['router_entropy_mean']:.4f}"
        return shown

    def _speed(self, metrics: Metrics) -> str:
        """Tokens or rows per second, and what share of the device that takes, where its peak is known."""
        share = f"  {metrics['mfu']:.0%} MFU" if "mfu" in metrics else ""
        return f"{metrics['tokens_per_s']:.0f} {self.unit}/s{share}"

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
