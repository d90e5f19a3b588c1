"""A long run with many checkpoints does not need more memory, threads or files over time."""

import threading

import psutil
import pytest

import whet
from tiny import run_config
from whet.training.callbacks import Callback

STEPS, WARM_UP, EVERY = 2000, 700, 20
# RunResult.history stores every row, about 1.1 kB each; nothing else may grow
MAX_BYTES_PER_STEP = 2048


class ResourceMonitor(Callback):
    def __init__(self):
        self.process = psutil.Process()
        self.samples = []

    def on_step_end(self, step, metrics):
        if step % EVERY == 0:
            rss, open_files = self.process.memory_info().rss, self.process.num_fds()
            self.samples.append((step, rss, open_files, threading.active_count()))


@pytest.mark.slow
def test_two_thousand_steps_and_a_hundred_checkpoints(tiny_directory, tmp_path):
    monitor = ResourceMonitor()
    config = run_config(
        tiny_directory,
        tmp_path,
        run={"steps": STEPS},
        checkpoint={"every": EVERY, "keep": 2},
        eval={"every": 200},
    )
    whet.train(config, [monitor])
    later = [row for row in monitor.samples if row[0] >= WARM_UP]
    steps, memory, open_files, threads = zip(*later, strict=True)
    middle = sum(steps) / len(steps)
    spread = sum((step - middle) ** 2 for step in steps)
    slope = sum((step - middle) * rss for step, rss in zip(steps, memory, strict=True)) / spread
    assert slope < MAX_BYTES_PER_STEP
    assert max(open_files) - min(open_files) <= 2, "a checkpoint being written may have a file open"
    assert max(threads) - min(threads) <= 1, "one more while a checkpoint is written"
