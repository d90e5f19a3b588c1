"""What runs on every rank of a test's world; each returns something JSON can hold."""

import hashlib
import math

import numpy as np
import torch
from torch.distributed import distributed_c10d

import whet
import whet.errors
from whet.parallel.fsdp import local_bytes_of
from whet.training import step
from whet.training.callbacks import Callback, EvaluationStoppedError, ModelCallback


def _hash(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Watch(ModelCallback):
    """Remembers, of each step, the loss, a hash of the weights, and the records this rank computed."""

    def __init__(self):
        self.losses, self.norms, self.hashes, self.records, self.evaluations = [], [], [], [], []
        self.gradient = None
        self._now = []

    def on_step_end(self, step, metrics):
        self.losses.append(metrics["loss"])
        self.norms.append(metrics["grad_norm"])
        self.hashes.append(_hash(whole(p) for p in self.trainer.learner.parameters()))
        self.records.append(self._now)
        self._now = []

    def on_eval_end(self, step, metrics):
        self.evaluations.append({name: value for name, value in metrics.items() if not name.endswith("_s")})

    def found(self):
        return {
            "losses": self.losses,
            "norms": self.norms,
            "hashes": self.hashes,
            "records": self.records,
            "evaluations": self.evaluations,
            "bytes": self._bytes(),
        }

    def _bytes(self):
        """Of weights and moments that this rank holds."""
        moments = [value for state in self.trainer.optimizer.state.values() for value in state.values()]
        return local_bytes_of([*self.trainer.learner.parameters(), *moments])


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def watched_train(config, again=None, stop_at=None):
    """Train, and tell what was computed where."""
    watch = Watch()
    taken, masked_step = step.taken, step.masked_step

    def noted(world, batches, **rest):
        for place, batch, counts in taken(world, batches, **rest):
            watch._now += [list(batch.origins)] if counts else []
            yield place, batch, counts

    def noted_step(optimizer, **rest):
        found = [p.grad for p in watch.trainer.trained if p.grad is not None]
        watch.gradient = torch.cat([whole(g).detach().double().flatten() for g in found])
        if (divisor := rest.get("divisor")) is not None:  # the optimizer clips them itself
            watch.gradient /= divisor.double()
        masked_step(optimizer, **rest)

    step.taken, step.masked_step = noted, noted_step
    try:
        callbacks = [watch] if stop_at is None else [watch, StopAt(stop_at)]
        watch.result = whet.train(config, callbacks) if again is None else whet.resume(again, callbacks)
    finally:
        step.taken, step.masked_step = taken, masked_step
    return watch


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return whet.training.callbacks.StopRun("enough", unfinished=True) if step == self.step else None


def train_and_tell(world, out, configs):
    """Runs one after the other in one world: what happened on this rank, and what it holds in memory.

    The last gradient is in a file.
    """
    found = {}
    for name, config in configs.items():
        watch = watched_train(config)
        if world.is_main:
            torch.save(watch.gradient, out / f"{name}.gradient")
        found[name] = watch.found()
    return found


def train_on(world, out, config=None, again=None, stop_at=None):
    """A run, or the next part of one: what happened on this rank."""
    return watched_train(config, again=again, stop_at=stop_at).found()


class FillWithRank(ModelCallback):
    """After the last step, what a rank holds of each trained weight becomes the rank's number."""

    def on_step_end(self, step, metrics):
        if step == self.trainer.total_steps:
            with torch.no_grad():
                for p in self.trainer.trained:
                    p.to_local().fill_(self.trainer.world.rank)


def train_and_fill(world, out, config):
    whet.train(config, [FillWithRank()])


def nonfinite_on_one(world, out, config):
    """The last rank's loss is not a number in step 2: what all of them made of it."""
    found = {}
    for what in ("skip", "stop"):
        run = {**config["run"], "on_nonfinite": what, "name": what}
        weighted_loss, calls = step.weighted_loss, []

        def broken(*arguments, calls=calls, weighted_loss=weighted_loss, **rest):
            share, metrics = weighted_loss(*arguments, **rest)
            calls.append(1)
            return share * (float("nan") if world.rank == 1 and len(calls) == 2 else 1.0), metrics

        step.weighted_loss = broken
        try:
            found[what] = watched_train({**config, "run": run}).hashes
        except whet.errors.RunError as error:
            found[what] = str(error)
        finally:
            step.weighted_loss = weighted_loss
    return found


def small_buckets(world, out, config):
    """A run whose gradients are sent in many pieces: how many were on their way before the backward ended."""
    from whet.parallel import gradient_sync

    finish, early = gradient_sync.GradientSum.finish, []

    def noted(self):
        early.append((self._next, len(self.buckets)))
        finish(self)

    gradient_sync._BUCKET_NUMBERS, gradient_sync.GradientSum.finish = 2000, noted
    return watched_train(config).found() | {"early": early}


def leg(world, out, config, directory, stop_at):
    """Begin a run, or go on with one, up to a step or to its end."""
    again = None if config is not None else f"{directory}/runs/test"
    # one rank alone wants to stop: all do
    return watched_train(config, again=again, stop_at=stop_at if world.rank == 1 else None).losses


class _Odd(Exception):
    def __init__(self, one, two):
        super().__init__("here")


def tell(world, out):
    """Everything a world can do, with what differs by rank."""
    import time

    from whet.config.load_config import make_config
    from whet.errors import DataError, WhetError
    from whet.parallel.preflight import agreed, seed_rank

    def fail_on(rank, error):
        def compute(mine):
            if world.rank == rank:
                raise error
            return mine

        try:
            world.each(range(5), compute)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"

    config = {"model": "m", "data": {"train": "t"}, "run": {"steps": 1, "batch_size": 1}}
    config |= {"parallel": {"kind": "ddp"}, "optim": {"lr": 0.5 if world.rank == 2 else 1e-4}}
    try:
        agreed(world, make_config(config))
    except WhetError as error:
        differs = str(error)
    numbers = {"loss": world.rank + 1.0, "layers": [[1.0, 2.0]]} | ({"only": 5.0} if world.rank == 1 else {})
    seed_rank(world, 0)
    with world.first_alone():
        turn = time.monotonic()
    return {
        "gathered": world.gather(world.rank),
        "from main": world.from_main(["zero", "one", "two"][world.rank]),
        "squares": world.each(range(7), lambda mine: [number**2 for number in mine]),
        "of none": world.each([], list),
        "sums": world.sums(numbers),
        "added": world.add_up(torch.tensor([world.rank + 1.0, 3.0])).tolist(),
        "raised": fail_on(1, DataError("rank 1 cannot read", hint="mend it")),
        "odd": fail_on(2, _Odd(1, 2)),
        "config": differs,
        "turn": turn,
        "drawn": torch.rand(()).item(),
        "exact": _exchange_exactly(world),
        "stopped": fail_on(0, EvaluationStoppedError()),
    }


def _exchange_exactly(world):
    """Whether values that JSON does not have, or rounds elsewhere, arrive as they were."""
    values = {
        "float": [0.1 + world.rank, math.inf, -0.0, 5e-324],
        "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) / 7 + world.rank,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1 / 3, dtype=torch.float64),
        "array": np.arange(4, dtype=np.float32).reshape(2, 2).T / 3,
        "text": "\x1b[31m é 😀" * world.rank,
    }
    received = world.gather(values)[world.rank]
    return all(
        same.dtype == value.dtype and same.shape == value.shape and bool((same == value).all())
        if hasattr(value, "dtype")
        else repr(same) == repr(value)
        for value, same in ((values[name], received[name]) for name in values)
    )


def forbid_pickle(world, out, config):
    """Train with every collective of torch that pickles taken away."""

    def refuse(*_, **__):
        raise AssertionError("a pickling collective")

    for module in (torch.distributed, distributed_c10d):
        for name in [name for name in dir(module) if "_object" in name]:
            setattr(module, name, refuse)
    return str(whet.train(config).directory)


def train_logged(world, out, configs):
    """Train each config, and tell where it landed and what the last weights hash to."""
    found = {}
    for name, config in configs.items():
        watch = Watch()
        result = whet.train(config, [watch])
        found[name] = {"directory": str(result.directory), "hash": watch.hashes[-1]}
    return found
