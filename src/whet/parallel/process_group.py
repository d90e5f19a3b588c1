"""The processes of a run: who they are, and what they tell one another."""

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
from whet.parallel.watchdog import Watch

T = TypeVar("T")
R = TypeVar("R")

RENDEZVOUS_S = 120.0  # for all processes to find one another; they are started together
COLLECTIVE_S = 7200.0  # for the slowest of them: rank 0 writes files; the watch knows sooner who hangs


@dataclass(frozen=True)
class World:
    """All processes of a run, as one of them sees it. The default is a run of one.

    Ranks that compute the same layers together (`tensor` of them) take the same share of the data: there are
    `shares` shares, and this rank's is number `share`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    tensor: int = 1
    watch: Watch = field(default_factory=Watch, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and speaks for all."""
        return self.rank == 0

    @property
    def share(self) -> int:
        """Which share of the data is this rank's."""
        return self.rank // self.tensor

    @property
    def shares(self) -> int:
        """How many shares the data is cut into."""
        return self.size // self.tensor

    def gather(self, value: T) -> list[T]:
        """Everyone's value, in the order of the ranks: JSON values, tensors and arrays."""
        if self.size == 1:
            return [value]
        with self.watch.collective("a gathering"):
            return object_exchange.gather(value)

    def gather_shares(self, value: T) -> list[T]:
        """One value for each share of the data, in order."""
        return self.gather(value)[:: self.tensor]

    def from_main(self, value: T) -> T:
        """The value that rank 0 has."""
        if self.size == 1:
            return value
        with self.watch.collective("a word from rank 0"):
            received: T = object_exchange.from_first(value)
            return received

    def barrier(self) -> None:
        """Wait for everyone."""
        if self.size > 1:
            with self.watch.collective("a barrier"):
                dist.all_reduce(torch.zeros(()))  # on the host: torch's barrier may choose the device

    def new_group(self) -> dist.ProcessGroup:
        """All ranks again, for exchanges on the host that go on beside the others."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the shares."""
        if self.shares == 1:
            return tensor
        total = tensor.clone() if self.rank % self.tensor == 0 else torch.zeros_like(tensor)
        with self.watch.collective("a sum of numbers"):
            dist.all_reduce(total)
        return total

    def sums(self, found: Mapping[str, Any]) -> dict[str, Any]:  # Any: numbers, and lists of numbers
        """Numbers by name, added up over the shares; some ranks may have some that others have not."""
        if self.shares == 1:
            return dict(found)
        total: dict[str, Any] = {}  # Any: as above
        for each in self.gather_shares(dict(found)):
            for name, value in each.items():
                total[name] = np.add(total[name], value).tolist() if name in total else value
        return total

    def rounds(self, items: Sequence[T], *, matched: bool = False) -> Iterator[tuple[int, T, bool]]:
        """This rank's share of some items, each with its place, and whether it counts.

        `matched`: every rank gets as many as any other; what fills up a shorter share does not count.
        """
        for first in range(0, len(items), self.shares):
            place = first + self.share
            if place < len(items):
                yield place, items[place], True
            elif matched:
                yield first, items[first], False

    def in_order(self, mine: Sequence[R], count: int) -> list[R]:
        """What the shares of `count` items became, in the order of the items."""
        found = self.gather_shares(list(mine))
        return [found[place % self.shares][place // self.shares] for place in range(count)]

    def each(self, items: Sequence[T], compute: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """What `compute` makes of each item: of this rank's share here, of the others' elsewhere.

        What one rank raises is raised on all of them: nobody is left waiting.
        """
        if self.size == 1:
            return list(compute(items))
        mine: Sequence[R] = ()
        error: Exception | None = None
        try:
            mine = compute(items[self.share :: self.shares])
        except Exception as raised:
            error = raised
        self.together(error)
        return self.in_order(mine, len(items))

    def together(self, error: Exception | None) -> None:
        """Raise the first error that any rank brings here, on all of them."""
        for rank, described in enumerate(
            self.gather(None if error is None else object_exchange.describe_error(error))
        ):
            if described is not None:
                first = object_exchange.restore_error(described)
                if error is not None and rank == self.rank:
                    first = error
                first.is_of_all = True  # type: ignore[attr-defined]  # no rank is to blame alone
                raise first

    @contextlib.contextmanager
    def abreast(self) -> Iterator[None]:
        """Do something that has no exchange in it; where one rank fails, all do."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.together(error)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let rank 0 go first, then the first of every machine, then the rest: they find what is ready."""
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(2 - turn):
            self.barrier()


SOLO = World()
_JOINED: ContextVar[World] = ContextVar("joined")  # what a run inside another call of `joined` is part of


def started_as_one_of_many() -> bool:
    """Whether torchrun, or `--nproc`, has started this process as one of several."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def was_restarted() -> bool:
    """Whether torchrun, or `--nproc`, has started this process again, after a failure of any rank."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextlib.contextmanager
def joined(*, timeout_s: float | None = None) -> Iterator[World]:
    """The world that this process was started in, for as long as it lasts."""
    if not started_as_one_of_many():
        yield SOLO
        return
    rank, size, local_rank = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if (around := _JOINED.get(None)) is not None:
        yield around
        return
    if dist.is_initialized():  # by the caller, who looks after it
        yield World(rank, size, local_rank)
        return
    store = _meet(rank, size, timeout_s or float(os.environ.get("WHET_RENDEZVOUS_S", RENDEZVOUS_S)))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=COLLECTIVE_S)
    )
    world = World(rank, size, local_rank, watch=Watch(PrefixStore("watch", store), rank=rank, size=size))
    world.watch.start()
    token = _JOINED.set(world)
    try:
        yield world
    except BaseException as error:
        # others may be waiting in a collective, so that taking the group apart would hang
        world.watch.fail(error)
        raise
    finally:
        _JOINED.reset(token)
    world.barrier()
    world.watch.stop()
    dist.destroy_process_group()


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text!r} in the environment is no number",
            hint="start several processes with torchrun or with --nproc",
        )
    return int(text)


def _store(rank: int, size: int, limit: datetime.timedelta) -> Any:  # Any: torch's store
    """The store at MASTER_ADDR; where that is a loopback address, nothing listens on any other."""
    address = os.environ.get("MASTER_ADDR", "")
    is_local = _is_loopback(address)
    if is_local and (interface := _loopback_interface()) is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
    if not is_local or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun has a store
        from torch.distributed.rendezvous import rendezvous

        store, *_ = next(iter(rendezvous("env://", rank, size, timeout=limit)))
        return store
    port, descriptor = _number("MASTER_PORT"), None
    if rank == 0:  # torch would listen on all interfaces
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        descriptor = socket.create_server((address, port), family=family, backlog=size).detach()
    return TCPStore(address, port, size, rank == 0, limit, multi_tenant=True, master_listen_fd=descriptor)


def _loopback_interface() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class UnreachableError(RunError):
    """The processes of a run did not find one another."""


def _meet(rank: int, size: int, timeout_s: float) -> Any:  # Any: torch's store
    """The store through which ranks find one another, once all of them are there."""
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store = _store(rank, size, limit)
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        store.set(f"here/{rank}", "")
        for other in range(size):
            store.wait([f"here/{other}"], limit)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnreachableError(
            f"rank {rank} of {size} waited {timeout_s:g} s at {where} for the others: {reason[:200]}",
            hint="MASTER_ADDR and MASTER_PORT must be reachable from every machine, and all must be started",
        ) from error
    return store
