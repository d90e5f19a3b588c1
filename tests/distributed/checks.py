"""Functions that run on every rank of a test's world; each returns a JSON value."""

import hashlib
import math

import numpy as np
import torch
from torch.distributed import distributed_c10d

import whet
import whet.errors
from whet.parallel.fsdp import local_nbytes
from whet.training import step
from whet.training.callbacks import Callback, EvaluationStoppedError, ModelCallback


def _hash(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Recorder(ModelCallback):
    """Records the loss, a hash of the weights and the records of this rank for each step."""

    def __init__(self):
        self.losses, self.norms, self.hashes, self.records, self.evaluations = [], [], [], [], []
        self.gradient = None
        self._current_records = []

    def on_step_end(self, step, metrics):
        self.losses.append(metrics["loss"])
        self.norms.append(metrics["grad_norm"])
        self.hashes.append(_hash(full_tensor(p) for p in self.trainer.learner.parameters()))
        self.records.append(self._current_records)
        self._current_records = []

    def on_eval_end(self, step, metrics):
        self.evaluations.append({name: value for name, value in metrics.items() if not name.endswith("_s")})

    def results(self):
        return {
            "losses": self.losses,
            "norms": self.norms,
            "hashes": self.hashes,
            "records": self.records,
            "evaluations": self.evaluations,
            "bytes": self._bytes(),
        }

    def _bytes(self):
        """Return the bytes of weights and moments that this rank stores."""
        moments = [value for state in self.trainer.optimizer.state.values() for value in state.values()]
        return local_nbytes([*self.trainer.learner.parameters(), *moments])


def full_tensor(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def recorded_train(config, resume_from=None, stop_at=None):
    """Train or resume a run, and return a recorder with the results of this rank."""
    recorder = Recorder()
    original, masked_step = step.share_batches, step.masked_step

    def recorded_batches(world, batches, **rest):
        for index, batch, counts in original(world, batches, **rest):
            recorder._current_records += [list(batch.origins)] if counts else []
            yield index, batch, counts

    def recorded_step(optimizer, **rest):
        gradients = [p.grad for p in recorder.trainer.trained if p.grad is not None]
        recorder.gradient = torch.cat([full_tensor(g).detach().double().flatten() for g in gradients])
        if (divisor := rest.get("divisor")) is not None:  # the optimizer divides them itself
            recorder.gradient /= divisor.double()
        masked_step(optimizer, **rest)

    step.share_batches, step.masked_step = recorded_batches, recorded_step
    try:
        callbacks = [recorder] if stop_at is None else [recorder, StopAt(stop_at)]
        recorder.result = (
            whet.train(config, callbacks) if resume_from is None else whet.resume(resume_from, callbacks)
        )
    finally:
        step.share_batches, step.masked_step = original, masked_step
    return recorder


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return whet.training.callbacks.StopRun("enough", unfinished=True) if step == self.step else None


def train_and_record(world, out, configs):
    """Run the configs one after the other in one world, and return the results of this rank by name.

    The main rank writes the last gradient to a file.
    """
    results = {}
    for name, config in configs.items():
        recorder = recorded_train(config)
        if world.is_main:
            torch.save(recorder.gradient, out / f"{name}.gradient")
        results[name] = recorder.results()
    return results


def train_or_resume(world, out, config=None, resume_from=None, stop_at=None):
    """Train or resume a run, and return the results of this rank."""
    return recorded_train(config, resume_from=resume_from, stop_at=stop_at).results()


class FillWithRank(ModelCallback):
    """After the last step, fills this rank's shard of each trained weight with the rank."""

    def on_step_end(self, step, metrics):
        if step == self.trainer.total_steps:
            with torch.no_grad():
                for p in self.trainer.trained:
                    p.to_local().fill_(self.trainer.world.rank)


def train_and_fill(world, out, config):
    whet.train(config, [FillWithRank()])


def train_with_nonfinite_loss(world, out, config):
    """Make the loss of the last rank NaN in step 2, and return what this rank does for each policy."""
    results = {}
    for policy in ("skip", "stop"):
        run = {**config["run"], "on_nonfinite": policy, "name": policy}
        weighted_loss, calls = step.weighted_loss, []

        def broken_loss(*arguments, calls=calls, weighted_loss=weighted_loss, **rest):
            share, metrics = weighted_loss(*arguments, **rest)
            calls.append(1)
            return share * (float("nan") if world.rank == 1 and len(calls) == 2 else 1.0), metrics

        step.weighted_loss = broken_loss
        try:
            results[policy] = recorded_train({**config, "run": run}).hashes
        except whet.errors.RunError as error:
            results[policy] = str(error)
        finally:
            step.weighted_loss = weighted_loss
    return results


def train_with_small_buckets(world, out, config):
    """Train with many gradient buckets, and record how many were sent before the backward pass ended."""
    from whet.parallel import gradient_sync

    finish, sent_early = gradient_sync.GradientReducer.finish, []

    def recorded_finish(self):
        sent_early.append((self._next, len(self.buckets)))
        finish(self)

    gradient_sync._BUCKET_ELEMENTS, gradient_sync.GradientReducer.finish = 2000, recorded_finish
    return recorded_train(config).results() | {"sent_early": sent_early}


def run_part(world, out, config, directory, stop_at):
    """Train or resume a run up to a step, or to its end."""
    resume_from = None if config is not None else f"{directory}/runs/test"
    # one rank stops, and then all do
    return recorded_train(
        config, resume_from=resume_from, stop_at=stop_at if world.rank == 1 else None
    ).losses


class _UnusualError(Exception):
    def __init__(self, one, two):
        super().__init__("here")


def exercise_world(world, out):
    """Call every collective of a world with values that depend on the rank."""
    import time

    from whet.config.load_config import validate_config
    from whet.errors import DataError, WhetError
    from whet.parallel.preflight import apply_parallel_config, seed_rank

    def fail_on(rank, error):
        def compute(items):
            if world.rank == rank:
                raise error
            return items

        try:
            world.map_items(range(5), compute)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"

    config = {"model": "m", "data": {"train": "t"}, "run": {"steps": 1, "batch_size": 1}}
    config |= {"parallel": {"kind": "ddp"}, "optim": {"lr": 0.5 if world.rank == 2 else 1e-4}}
    try:
        apply_parallel_config(world, validate_config(config))
    except WhetError as error:
        differs = str(error)
    values = {"loss": world.rank + 1.0, "layers": [[1.0, 2.0]]} | ({"only": 5.0} if world.rank == 1 else {})
    seed_rank(world, 0)
    with world.main_process_first():
        turn = time.monotonic()
    return {
        "gathered": world.gather(world.rank),
        "from main": world.broadcast(["zero", "one", "two"][world.rank]),
        "squares": world.map_items(range(7), lambda items: [number**2 for number in items]),
        "of none": world.map_items([], list),
        "sums": world.sum_values(values),
        "added": world.all_reduce_sum(torch.tensor([world.rank + 1.0, 3.0])).tolist(),
        "raised": fail_on(1, DataError("rank 1 cannot read", hint="fix it")),
        "odd": fail_on(2, _UnusualError(1, 2)),
        "config": differs,
        "turn": turn,
        "drawn": torch.rand(()).item(),
        "exact": _exchange_exactly(world),
        "stopped": fail_on(0, EvaluationStoppedError()),
    }


def _exchange_exactly(world):
    """Return whether values that plain JSON cannot represent exactly arrive unchanged."""
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
    """Train while all pickling collectives of torch raise an error."""

    def forbidden(*_, **__):
        raise AssertionError("a pickling collective")

    for module in (torch.distributed, distributed_c10d):
        for name in [name for name in dir(module) if "_object" in name]:
            setattr(module, name, forbidden)
    return str(whet.train(config).directory)


def train_logged(world, out, configs):
    """Train each config, and return its directory and the hash of the last weights."""
    results = {}
    for name, config in configs.items():
        recorder = Recorder()
        result = whet.train(config, [recorder])
        results[name] = {"directory": str(result.directory), "hash": recorder.hashes[-1]}
    return results
