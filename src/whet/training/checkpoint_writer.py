"""Asynchronous checkpoint writer: a background thread copies tensors to host memory and writes them.

Weights and optimizer state change only in updates, so the copy overlaps the next forward and backward pass.
Only the next update has to wait for it.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from whet.config.run import Checkpoint
from whet.errors import RunError, StorageError
from whet.parallel.object_exchange import ProcessGroup
from whet.parallel.process_group import SINGLE_PROCESS, World
from whet.parallel.sharded_checkpoint import local_shard, with_local_shard
from whet.storage import fsync_jsonl_files
from whet.training.checkpoint import Contents, checkpoint_path, prune_checkpoints, write_contents

log = logging.getLogger("whet")


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    A failed save does not stop the run: earlier checkpoints stay, and the next save tries again.
    """

    def __init__(self, directory: Path, settings: Checkpoint, world: World = SINGLE_PROCESS) -> None:
        self.world = world
        self.directory = directory
        self.settings = settings
        self.saved_step: int | None = None  # step of the newest checkpoint, written or in progress
        self.failure: StorageError | None = None  # error of the newest save, if it failed
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._error: BaseException | None = None
        self._written_steps: list[int] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._last_save = time.monotonic()
        self._group: ProcessGroup = None  # separate, so that background traffic cannot mix with the step's

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step, by steps or by time since the last one."""
        every, minutes = self.settings.every, self.settings.minutes
        by_clock = minutes is not None and time.monotonic() - self._last_save >= minutes * 60
        return by_clock or (every is not None and step % every == 0)

    def save(self, step: int, contents: Contents, *, best_steps: Sequence[int]) -> None:
        """Save a checkpoint; with `checkpoint.async` this returns before the tensors are copied.

        Args:
            step: The step of the checkpoint.
            contents: What to save. Its tensors must not change before `wait_for_copy` returns.
            best_steps: Steps that were the best so far; the checkpoint of the last one is never deleted.
        """
        self.wait()
        self.saved_step = step
        self._last_save = time.monotonic()
        if not contents.is_sharded and not self.world.is_main:
            return
        if contents.is_sharded and self._group is None:
            self._group = self.world.new_group()
        if not self.settings.asynchronous:
            self._write(step, contents, best_steps)
            self._handle_outcome()
            return
        self._copied.clear()
        # A daemon thread, so that a second Ctrl-C ends the process without waiting for the disk.
        self._thread = threading.Thread(
            target=self._copy_and_write, args=(step, contents, best_steps), name="whet-save", daemon=True
        )
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Wait until the tensors of a save in progress are copied, so that an update may change them."""
        self._copied.wait()

    def wait(self) -> None:
        """Wait until the save in progress, if any, has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._handle_outcome()

    def pop_completed(self) -> Iterator[tuple[int, Path]]:
        """Yield the step and path of each checkpoint completed since the last call."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        while self._written_steps:
            step = self._written_steps.pop(0)
            yield step, checkpoint_path(self.directory, step)

    def raise_failure(self, *, unfinished: bool) -> None:
        """Raise an error if the newest checkpoint could not be written; `unfinished` adds how to resume."""
        if self.failure is not None:
            raise RunError(
                f"the last checkpoint is missing: {self.failure.message}",
                hint=f"free disk space, then run: whet resume {self.directory}" if unfinished else None,
            )

    def _copy_and_write(self, step: int, contents: Contents, best_steps: Sequence[int]) -> None:
        try:
            copy = self._snapshot(contents)
        except BaseException as error:  # such as out of memory; `wait` raises it in the main thread
            self._error = error
            return
        finally:
            self._copied.set()
        self._write(step, copy, best_steps)

    def _write(self, step: int, contents: Contents, best_steps: Sequence[int]) -> None:
        try:
            if self.world.is_main:
                fsync_jsonl_files(
                    self.directory
                )  # a run resumed from this checkpoint does not repeat their steps
            write_contents(checkpoint_path(self.directory, step), contents, self._group)
            if self.world.is_main:
                prune_checkpoints(self.directory, keep=self.settings.keep, best_steps=best_steps)
        except BaseException as error:  # `_handle_outcome` raises or logs it in the main thread
            self._error = error

    def _handle_outcome(self) -> None:
        """Log or raise the error of the newest save, or record that it succeeded."""
        error, self._error = self._error, None
        if error is None:
            if self.failure is not None:
                log.info("saving works again: saved step %s", self.saved_step)
            self.failure = None
            if self.saved_step is not None:
                self._written_steps.append(self.saved_step)
            return
        if not isinstance(error, StorageError):
            raise error
        if self.failure is None:  # log only the first of several failures in a row
            log.warning("%s; the run continues and tries again at the next save", error.message)
        self.failure, self.saved_step = error, None

    def _snapshot(self, contents: Contents) -> Contents:
        """Copy the contents to host memory. Buffers are reused, because fresh pages are slow to write."""
        weights = self._copy_tensors("weights", contents.weights)
        moments = None if contents.moments is None else self._copy_tensors("moments", contents.moments)
        for device in {tensor.device for tensor in contents.weights.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # non-blocking copies may still be in progress
        return Contents(weights, moments, contents.state)

    def _copy_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            key, local = f"{kind} {name}", local_shard(tensor.detach())
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                pinned = local.device.type == "cuda"
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
                self._buffers[key] = buffer
            buffer.copy_(local, non_blocking=buffer.is_pinned())
            copies[name] = with_local_shard(tensor, buffer)
        return copies
