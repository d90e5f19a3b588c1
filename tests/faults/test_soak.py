"""A long run with many checkpoints needs no more of the machine at its end than near its beginning."""

import threading

import psutil
import pytest

import whet
from tiny import run_config
from whet.training.callbacks import Callback

STEPS, WARM_UP, EVERY = 2000, 700, 20
# RunResult.history keeps every row, about 1.1 kB each; nothing else may grow
MOST_BYTES_PER_STEP = 2048


class Watch(Callback):
    def __init__(self):
        self.process = psutil.Process()
        self.seen = []

    def on_step_end(self, step, metrics):
        if step % EVERY == 0:
            rss, descriptors = self.process.memory_info().rss, self.process.num_fds()
            self.seen.append((step, rss, descriptors, threading.active_count()))


@pytest.mark.slow
def test_two_thousand_steps_and_a_hundred_checkpoints(tiny_directory, tmp_path):
    watch = Watch()
    config = run_config(
        tiny_directory,
        tmp_path,
        run={"steps": STEPS},
        checkpoint={"every": EVERY, "keep": 2},
        eval={"every": 200},
    )
    whet.train(config, [watch])
    later = [row for row in watch.seen if row[0] >= WARM_UP]
    steps, memory, descriptors, threads = zip(*later, strict=True)
    middle = sum(steps) / len(steps)
    spread = sum((step - middle) ** 2 for step in steps)
    slope = sum((step - middle) * rss for step, rss in zip(steps, memory, strict=True)) / spread
    assert slope < MOST_BYTES_PER_STEP
    assert max(descriptors) - min(descriptors) <= 2, "a checkpoint being written may have a file open"
    assert max(threads) - min(threads) <= 1, "one more while a checkpoint is written"
