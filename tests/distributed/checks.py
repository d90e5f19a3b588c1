"""What runs on every rank of a test's world; each returns something JSON can hold."""

import hashlib

import torch

import whet
from whet.training import trainer as trainer_module
from whet.training.callbacks import Callback


def _hash(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Watch(Callback):
    """Remembers, of each step, the loss, a hash of the weights, and the records this rank computed."""

    def __init__(self):
        self.losses, self.norms, self.hashes, self.records, self.evaluations = [], [], [], [], []
        self.gradient = None
        self._now = []

    def on_train_begin(self, run):
        self.run = run

    def on_step_end(self, step, metrics):
        self.losses.append(metrics["loss"])
        self.norms.append(metrics["grad_norm"])
        self.hashes.append(_hash(whole(p) for p in self.run.learner.parameters()))
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
        }


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def watched_train(config, again=None, stop_at=None):
    """Train, and tell what was computed where."""
    watch = Watch()
    weighted_loss, masked_step = trainer_module.weighted_loss, trainer_module.masked_step

    def noted_loss(model, objective, batch, **rest):
        share, metrics = weighted_loss(model, objective, batch, **rest)
        watch._now.append(list(batch.origins))
        return share, metrics

    def noted_step(optimizer, **rest):
        found = [p.grad for p in watch.run.trained if p.grad is not None]
        watch.gradient = torch.cat([whole(g).detach().double().flatten() for g in found])
        masked_step(optimizer, **rest)

    trainer_module.weighted_loss, trainer_module.masked_step = noted_loss, noted_step
    try:
        callbacks = [watch] if stop_at is None else [watch, StopAt(stop_at)]
        watch.result = whet.train(config, callbacks) if again is None else whet.resume(again, callbacks)
    finally:
        trainer_module.weighted_loss, trainer_module.masked_step = weighted_loss, masked_step
    return watch


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return whet.training.callbacks.StopRun("enough", unfinished=True) if step == self.step else None


def train_and_tell(world, out, configs):
    """Runs one after the other in one world: what happened on this rank, and the last gradient in a file."""
    found = {}
    for name, config in configs.items():
        watch = watched_train(config)
        if world.is_main:
            torch.save(watch.gradient, out / f"{name}.gradient")
        found[name] = watch.found()
    return found


def train_quietly(world, out, configs):
    """Runs one after the other: the losses and evaluations, and what this rank holds in memory."""
    from whet.parallel.shard import local_bytes_of

    found = {}
    for name, config in configs.items():
        watch = watched_train(config)
        run = watch.run
        moments = [value for state in run.optimizer.state.values() for value in state.values()]
        found[name] = watch.found() | {
            "weights_bytes": local_bytes_of(run.learner.parameters()),
            "moments_bytes": local_bytes_of(moments),
        }
    return found


def train_on(world, out, config=None, again=None, stop_at=None):
    """A run, or the next part of one: what happened on this rank."""
    return watched_train(config, again=again, stop_at=stop_at).found()


class FillWithRank(Callback):
    """After the last step, what a rank holds of each trained weight becomes the rank's number."""

    def on_train_begin(self, run):
        self.run = run

    def on_step_end(self, step, metrics):
        if step == self.run.total_steps:
            with torch.no_grad():
                for p in self.run.trained:
                    p.to_local().fill_(self.run.world.rank)


def train_and_fill(world, out, config):
    whet.train(config, [FillWithRank()])
