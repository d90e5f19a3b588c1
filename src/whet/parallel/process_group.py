"""The processes of a distributed run, and the collectives between them."""

import contextlib
import datetime
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from whet.errors import ConfigError, RunError
from whet.parallel import object_exchange
from whet.parallel.watchdog import Watchdog

T = TypeVar("T")
R = TypeVar("R")

RENDEZVOUS_S = 120.0  # timeout of the rendezvous; all processes are started at the same time
COLLECTIVE_S = (
    7200.0  # timeout of collectives: rank 0 may write files, and the watchdog detects hangs earlier
)


@dataclass(frozen=True)
class World:
    """The processes of a run, from the view of one rank. The default is a run of one process.

    A tensor-parallel group consists of `tp_size` ranks, which compute the same layers on the same data. The
    data is split into `dp_size` shares, one per group, and this rank's group has the share with index
    `dp_rank`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    tp_size: int = 1
    watchdog: Watchdog = field(default_factory=Watchdog, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0, which writes the run's files and logs."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """The index of this rank's share of the data (its data-parallel rank)."""
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        """The number of shares of the data (the data-parallel size)."""
        return self.size // self.tp_size

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order; values are JSON values, tensors and arrays."""
        if self.size == 1:
            return [value]
        with self.watchdog.collective("gather"):
            return object_exchange.gather(value)

    def gather_dp(self, value: T) -> list[T]:
        """Return one value per share of the data, in order."""
        return self.gather(value)[:: self.tp_size]

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on all ranks."""
        if self.size == 1:
            return value
        with self.watchdog.collective("broadcast from rank 0"):
            received: T = object_exchange.broadcast(value)
            return received

    def barrier(self) -> None:
        """Wait until all ranks have reached the barrier."""
        if self.size > 1:
            with self.watchdog.collective("barrier"):
                dist.all_reduce(torch.zeros(()))  # on the CPU, while torch's barrier may use the device

    def new_group(self) -> dist.ProcessGroup:
        """Return a new CPU group of all ranks, for collectives concurrent with those of other groups."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the shares."""
        if self.dp_size == 1:
            return tensor
        total = tensor.clone() if self.rank % self.tp_size == 0 else torch.zeros_like(tensor)
        with self.watchdog.collective("all-reduce"):
            dist.all_reduce(total)
        return total

    def sum_values(self, values: Mapping[str, Any]) -> dict[str, Any]:  # Any: numbers, and lists of numbers
        """Return the sums of named values over the shares; names may be missing on some ranks."""
        if self.dp_size == 1:
            return dict(values)
        totals: dict[str, Any] = {}  # Any: as above
        for rank_values in self.gather_dp(dict(values)):
            for name, value in rank_values.items():
                totals[name] = np.add(totals[name], value).tolist() if name in totals else value
        return totals

    def local_items(self, items: Sequence[T], *, pad: bool = False) -> Iterator[tuple[int, T, bool]]:
        """Yield this rank's items as (index, item, whether it counts).

        Args:
            items: the items of all ranks.
            pad: give every rank equally many items, by adding items that do not count.
        """
        for first in range(0, len(items), self.dp_size):
            index = first + self.dp_rank
            if index < len(items):
                yield index, items[index], True
            elif pad:
                yield first, items[first], False

    def gather_in_order(self, results: Sequence[R], count: int) -> list[R]:
        """Gather the results of all ranks in the order of the `count` items that `local_items` distributed.

        Args:
            results: this rank's results.
            count: the number of items of all ranks.
        """
        by_share = self.gather_dp(list(results))
        return [by_share[index % self.dp_size][index // self.dp_size] for index in range(count)]

    def map_items(self, items: Sequence[T], compute: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """Apply `compute` to the items, each rank to its share; return all results, in order, on all ranks.

        If `compute` raises on one rank, the error is raised on all ranks, so that none of them waits forever.
        """
        if self.size == 1:
            return list(compute(items))
        results: Sequence[R] = ()
        error: Exception | None = None
        try:
            results = compute(items[self.dp_rank :: self.dp_size])
        except Exception as raised:
            error = raised
        self.raise_first_error(error)
        return self.gather_in_order(results, len(items))

    def raise_first_error(self, error: Exception | None) -> None:
        """Raise the error of the first rank that passes one, on all ranks; return if no rank does."""
        for rank, described in enumerate(
            self.gather(None if error is None else object_exchange.describe_error(error))
        ):
            if described is not None:
                first = object_exchange.restore_error(described)
                if error is not None and rank == self.rank:
                    first = error
                first.is_collective = True  # type: ignore[attr-defined]  # so no single rank is named
                raise first

    @contextlib.contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Run a block without collectives on all ranks; if it raises on one rank, all ranks raise."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.raise_first_error(error)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run a block on rank 0, then on the first rank of every machine, then on the remaining ranks.

        The later ranks can use files that the earlier ones have written.
        """
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(2 - turn):
            self.barrier()


SINGLE_PROCESS = World()
_CURRENT: ContextVar[World] = ContextVar("world")  # the world of an enclosing call of `distributed_world`


def is_distributed_launch() -> bool:
    """Return whether torchrun or `--nproc` has started this process as one of several."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def was_restarted() -> bool:
    """Return whether torchrun or `--nproc` has restarted this process after a failure of any rank."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextlib.contextmanager
def distributed_world(*, timeout_s: float | None = None) -> Iterator[World]:
    """Join the process group that this process was started for, and leave it at the end of the block.

    Args:
        timeout_s: the timeout of the rendezvous. None: WHET_RENDEZVOUS_S, or 120 seconds.

    Raises:
        UnreachableError: not all processes joined in time.
    """
    if not is_distributed_launch():
        yield SINGLE_PROCESS
        return
    rank, size, local_rank = (_env_int(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if (current := _CURRENT.get(None)) is not None:
        yield current
        return
    if dist.is_initialized():  # by the caller, who also destroys the group
        yield World(rank, size, local_rank)
        return
    store = _rendezvous(rank, size, timeout_s or float(os.environ.get("WHET_RENDEZVOUS_S", RENDEZVOUS_S)))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=COLLECTIVE_S)
    )
    world = World(
        rank, size, local_rank, watchdog=Watchdog(PrefixStore("watch", store), rank=rank, size=size)
    )
    world.watchdog.start()
    token = _CURRENT.set(world)
    try:
        yield world
    except BaseException as error:
        # destroying the group would hang, because other ranks may be waiting in a collective
        world.watchdog.fail(error)
        raise
    finally:
        _CURRENT.reset(token)
    world.barrier()
    world.watchdog.stop()
    dist.destroy_process_group()


def _env_int(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {name}={text!r} is not an integer",
            hint="start several processes with torchrun or with --nproc",
        )
    return int(text)


def _open_store(rank: int, size: int, timeout: datetime.timedelta) -> Any:  # Any: torch's store
    """Return the store at MASTER_ADDR; if that is a loopback address, listen on this interface only."""
    address = os.environ.get("MASTER_ADDR", "")
    is_local = _is_loopback(address)
    if is_local and (interface := _loopback_interface()) is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
    if not is_local or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun hosts a store
        from torch.distributed.rendezvous import rendezvous

        store, *_ = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
        return store
    port, fd = _env_int("MASTER_PORT"), None
    if rank == 0:  # because torch would listen on all interfaces
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        fd = socket.create_server((address, port), family=family, backlog=size).detach()
    return TCPStore(address, port, size, rank == 0, timeout, multi_tenant=True, master_listen_fd=fd)


def _loopback_interface() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class RendezvousError(RunError):
    """The rendezvous of a run's processes failed."""


def _rendezvous(rank: int, size: int, timeout_s: float) -> Any:  # Any: torch's store
    """Return the store of the process group, once all ranks have connected to it."""
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = _open_store(rank, size, timeout)
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        store.set(f"here/{rank}", "")
        for each in range(size):
            store.wait([f"here/{each}"], timeout)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RendezvousError(
            f"rank {rank} of {size} waited {timeout_s:g} s at {address} for the other ranks: {reason[:200]}",
            hint="start all processes, and make MASTER_ADDR:MASTER_PORT reachable from every machine",
        ) from error
    return store
