"""Saving while training goes on: a copy in memory, then a write, both in the background, one at a time.

Between two updates no weight and no moment changes, so the copy may be made during the next forward and
backward pass. Only the next update has to wait for it.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from whet.config.run import Checkpoint
from whet.errors import StorageError
from whet.parallel.object_exchange import ProcessGroup
from whet.parallel.process_group import SOLO, World
from whet.parallel.sharded_checkpoint import local_part, with_local_part
from whet.storage import sync_rows
from whet.training.checkpoint import Contents, checkpoint_path, prune, write_contents

log = logging.getLogger("whet")


class CheckpointWriter:
    """Writes the checkpoints of a run.

    A save that fails costs nothing but itself: the run goes on, what was saved before stays, and the next
    save tries again.
    """

    def __init__(self, directory: Path, settings: Checkpoint, world: World = SOLO) -> None:
        self.world = world
        self.directory = directory
        self.settings = settings
        self.saved_step: int | None = None  # of the newest checkpoint that is written, or being written
        self.failure: StorageError | None = None  # of the newest save, if it failed
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._error: BaseException | None = None
        self._written: list[int] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._last_save = time.monotonic()
        self._group: ProcessGroup = (
            None  # of its own: what is exchanged in the background must not get in the way
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step: by the count of steps, or by the clock."""
        every, minutes = self.settings.every, self.settings.minutes
        by_clock = minutes is not None and time.monotonic() - self._last_save >= minutes * 60
        return by_clock or (every is not None and step % every == 0)

    def save(self, step: int, contents: Contents, *, best_steps: Sequence[int]) -> None:
        """Save what the run is now; with `checkpoint.async`, up to the next update training may go on."""
        self.wait()
        self.saved_step = step
        self._last_save = time.monotonic()
        if not contents.in_shards and not self.world.is_main:
            return
        if contents.in_shards and self._group is None:
            self._group = self.world.new_group()
        if not self.settings.asynchronous:
            self._write(step, contents, best_steps)
            self._settle()
            return
        self._copied.clear()
        arguments = (step, contents, best_steps)
        # a daemon: a second Ctrl-C must end the process, not wait for the disk
        self._thread = threading.Thread(
            target=self._copy_and_write, args=arguments, name="whet-save", daemon=True
        )
        self._thread.start()

    def before_update(self) -> None:
        """Until weights and moments may change again: what is being saved has been copied."""
        self._copied.wait()

    def wait(self) -> None:
        """Until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._settle()

    def written(self) -> Iterator[tuple[int, Path]]:
        """Checkpoints that are on disk since the last call."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        while self._written:
            step = self._written.pop(0)
            yield step, checkpoint_path(self.directory, step)

    def _copy_and_write(self, step: int, contents: Contents, best_steps: Sequence[int]) -> None:
        try:
            copy = self._snapshot(contents)
        except BaseException as error:  # no memory, say: raised where the run can hear it
            self._error = error
            return
        finally:
            self._copied.set()
        self._write(step, copy, best_steps)

    def _write(self, step: int, contents: Contents, best_steps: Sequence[int]) -> None:
        try:
            if self.world.is_main:
                sync_rows(self.directory)  # those of steps that a resume from here does not repeat
            write_contents(checkpoint_path(self.directory, step), contents, self._group)
            if self.world.is_main:
                prune(self.directory, keep=self.settings.keep, best_steps=best_steps)
        except BaseException as error:  # raised, or said, where the run can hear it
            self._error = error

    def _settle(self) -> None:
        """Take note of how the newest write ended."""
        error, self._error = self._error, None
        if error is None:
            if self.failure is not None:
                log.info("saving works again: step %s is saved", self.saved_step)
            self.failure = None
            if self.saved_step is not None:
                self._written.append(self.saved_step)
            return
        if not isinstance(error, StorageError):
            raise error
        if self.failure is None:  # said once, however long it lasts
            log.warning("%s; the run goes on and tries again at the next save", error.message)
        self.failure, self.saved_step = error, None

    def _snapshot(self, contents: Contents) -> Contents:
        """A copy that the next update cannot touch. Its memory is kept: fresh memory is slow to fill."""
        weights = self._copies("weights", contents.weights)
        moments = None if contents.moments is None else self._copies("moments", contents.moments)
        for device in {tensor.device for tensor in contents.weights.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # copies from a device are only queued
        return Contents(weights, moments, contents.state)

    def _copies(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            key, part = f"{kind} {name}", local_part(tensor.detach())
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                pinned = part.device.type == "cuda"
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
                self._buffers[key] = buffer
            buffer.copy_(part, non_blocking=buffer.is_pinned())
            copies[name] = with_local_part(tensor, buffer)
        return copies
