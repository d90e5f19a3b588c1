"""Probes: what goes on inside the model during a run, measured on fixed batches, without changing the run."""

import abc
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from whet.data.batches import Batch
from whet.errors import ConfigError, StorageError, check_positive
from whet.models.language_model import LanguageModel
from whet.storage import new_file, write_safetensors
from whet.training.callbacks import Injector, Metrics, ModelCallback, RunView
from whet.training.loss import in_precision, total_weights, weighted_loss
from whet.training.observe.activation_capture import ActivationCapture
from whet.training.observe.attention_maps import visit_attention
from whet.training.observe.layer_stats import (
    Layers,
    attention_entropy,
    effective_rank,
    gradient_noise,
    mean,
    spread,
)
from whet.training.observe.preserve_state import preserve_state
from whet.training.observe.probe_batches import texts_of, units
from whet.training.prefetch import Reading

if TYPE_CHECKING:
    pass

log = logging.getLogger("whet")

START = "start.safetensors"
_SMALLEST_NORM = 1e-10  # a mean of gradient norms below it has no meaningful ratio
_SMALLEST_SIDE = 4  # of a matrix whose rank says anything


class Probe(ModelCallback, Injector, abc.ABC):
    """Measures every `every` steps and writes what it found into the step's row.

    The run goes on exactly as it would without: gradients, random streams and modes are left as they are. A
    probe that fails says so once and is not asked again.
    """

    main_only = True  # ranks with whole weights have the same ones
    failed = False

    def __init__(self, every: int) -> None:
        check_positive(every=every)
        self.every = every

    def on_train_begin(self, run: RunView) -> None:
        """Remember what to look at."""
        self.layers = Layers(self.trainer.model)

    def touches_model(self, step: int) -> bool:
        """Where it is time to measure."""
        return not self.failed and step % self.every == 0

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Measure, where it is time to."""
        if not self.touches_model(step):
            return
        started = time.perf_counter()
        try:
            with preserve_state(self.trainer.learner, self.trainer.model):
                metrics |= self.measure()
        except Exception as error:  # whatever goes wrong in looking at a run is no reason to end it
            self.failed = True
            reason = (str(error).strip().splitlines() or [""])[0]
            log.warning(
                "step %d: %s is off from here on: %s: %s",
                *(step, type(self).__name__, type(error).__name__, reason),
            )
        metrics["probe_s"] = metrics.get("probe_s", 0.0) + time.perf_counter() - started

    @abc.abstractmethod
    def measure(self) -> Metrics:
        """The numbers of this moment."""

    def gradients(self, batches: Sequence[Batch]) -> list[torch.Tensor | None]:
        """The gradients of the trained parameters on some micro-batches; `.grad` is not touched."""
        run, scale = self.trainer, self.trainer.state.loss_scale.value
        weights = total_weights(run.objective, batches)
        totals: list[torch.Tensor | None] = [None] * len(run.trained)
        for batch in batches:
            share, _ = weighted_loss(
                run.model, run.objective, batch.to(run.device), weights=weights, precision=run.precision
            )
            found = torch.autograd.grad(share * scale, run.trained, allow_unused=True)
            for place, gradient in enumerate(found):
                if gradient is not None:
                    before = totals[place]
                    totals[place] = gradient if before is None else before + gradient
        return totals if scale == 1.0 else [None if total is None else total / scale for total in totals]


class GradientStats(Probe):
    """Norms of the gradient on some micro-batches, by tensor and by layer, and where it is largest."""

    def __init__(self, batches: Sequence[Batch], every: int = 200) -> None:
        super().__init__(every)
        self.batches = batches

    def measure(self) -> Metrics:
        """exp_grad_norm_mean and _std over tensors, _layer (each), _rest (outside them), _largest_layer."""
        norms = _norms(self.gradients(self.batches))
        by_layer, rest = self.layers.root_sums(self.trainer.trained, norms)
        of_tensors = [norm for norm in norms if norm is not None]
        known = [norm for norm in by_layer if norm is not None]
        found: Metrics = {"exp_grad_norm_layer": by_layer, "exp_grad_norm_rest": rest}
        if of_tensors:
            found |= {"exp_grad_norm_mean": mean(of_tensors), "exp_grad_norm_std": spread(of_tensors)}
        if known:
            found["exp_grad_norm_largest_layer"] = by_layer.index(max(known))
        return found


class GradientNoise(Probe):
    """The gradient noise scale: how large a batch may grow before more of it stops helping.

    `pieces` are lists of micro-batches, at least two: each is a small batch, all together are the large one.
    """

    def __init__(self, pieces: Sequence[Sequence[Batch]], every: int = 2000) -> None:
        super().__init__(every)
        self.pieces = pieces

    def measure(self) -> Metrics:
        """exp_simple_noise_scale, in tokens (or pairs, or texts), and what it is the quotient of."""
        sizes = [units(self.trainer.objective, piece) for piece in self.pieces]
        total = sum(sizes)
        squares: list[float] = []
        of_all: list[torch.Tensor | None] = [None] * len(self.trainer.trained)
        for size, piece in zip(sizes, self.pieces, strict=True):
            gradients = self.gradients(piece)
            squares.append(sum(norm**2 for norm in _norms(gradients) if norm is not None))
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    before, share = of_all[place], gradient * (size / total)
                    of_all[place] = share if before is None else before + share
        found = gradient_noise(sizes, squares, sum(norm**2 for norm in _norms(of_all) if norm is not None))
        metrics: Metrics = {"exp_grad_signal": found.signal, "exp_grad_noise": found.noise}
        return metrics if found.scale is None else metrics | {"exp_simple_noise_scale": found.scale}


class LossCurvature(Injector):
    """How much the gradient norm varies: std / mean over the last `window` steps, in every row.

    It reads the norms that each step has anyway, and costs nothing.
    """

    main_only = True

    state_key = "loss-curvature"

    def __init__(self, window: int = 50) -> None:
        check_positive(window=window)
        self.norms: deque[float] = deque(maxlen=window)

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """exp_grad_noise_scale, from the second step on; skipped steps are left out."""
        if math.isfinite(metrics["grad_norm"]):
            self.norms.append(metrics["grad_norm"])
        if len(self.norms) > 1 and (middle := mean(self.norms)) > _SMALLEST_NORM:
            metrics["exp_grad_noise_scale"] = spread(self.norms) / middle

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """The norms."""
        return {"norms": list(self.norms)}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Continue with the norms that `state` returned; a shorter window keeps the last ones."""
        self.norms.extend(state["norms"])


class WeightStats(Probe):
    """The norm of the trained weights, and how far they are from where the run began.

    The start is kept in the run's directory, so that a resumed run measures from the same one.
    """

    def __init__(self, every: int = 200) -> None:
        super().__init__(every)
        self.start: dict[str, torch.Tensor] | Path | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Keep the start, or find the one that was kept."""
        super().on_train_begin(run)
        self.named = {name: p for name, p in self.trainer.learner.named_parameters() if p.requires_grad}
        if run.directory is None:
            self.start = {name: p.detach().clone() for name, p in self.named.items()}
            return
        path = run.directory / START
        try:
            if run.step == 0:
                path.unlink(missing_ok=True)  # of a beginning that came to nothing
                with new_file(path) as staging:
                    write_safetensors(staging, dict(self.named))
            self.start = path if path.is_file() else None
        except (StorageError, OSError) as error:
            log.warning("%s", error)
        if self.start is None:
            log.warning("exp_weight_distance is not measured: %s does not hold the weights of step 0", path)

    def measure(self) -> Metrics:
        """exp_weight_norm and exp_weight_distance, each also as _layer and _rest, and exp_weight_delta.

        The distance is the norm of the difference; the delta the difference of the norms, without its sign.
        """
        parameters = list(self.named.values())
        found = self._by_layer("exp_weight_norm", parameters, _norms(parameters))
        if self.start is not None:
            distances, start_norms = self._from_start(self.start)
            found |= self._by_layer("exp_weight_distance", parameters, distances)
            found["exp_weight_delta"] = abs(found["exp_weight_norm"] - math.hypot(*start_norms))
        return found

    def _by_layer(
        self, key: str, parameters: list[Any], norms: list[float | None]
    ) -> Metrics:  # Any: tensors
        by_layer, rest = self.layers.root_sums(parameters, norms)
        total = sum(norm**2 for norm in norms if norm is not None) ** 0.5
        return {key: total, f"{key}_layer": by_layer, f"{key}_rest": rest}

    def _from_start(self, start: dict[str, torch.Tensor] | Path) -> tuple[list[float | None], list[float]]:
        """How far each tensor is from the start, and the norm it had there.

        One tensor at a time: the start is never in memory as a whole.
        """
        if isinstance(start, Path):
            try:
                with safe_open(start, framework="pt") as file:
                    return self._distances(file.get_tensor)
            except (OSError, SafetensorError) as error:
                raise StorageError(f"{start} cannot be read: {error}") from error
        return self._distances(start.__getitem__)

    def _distances(self, begin: Any) -> tuple[list[float | None], list[float]]:
        # Any: a function from names to tensors
        distances, start_norms = [], []
        with torch.no_grad():
            for name, p in self.named.items():
                first = begin(name).to(p.device).float()
                distances.append((p.float() - first).norm())
                start_norms.append(first.norm())
        return list(Reading(*distances).values()), list(Reading(*start_norms).values())


class _OnTexts(Probe):
    """One that runs a language model on the texts of some batches."""

    def __init__(self, batches: Sequence[Batch], every: int = 500) -> None:
        super().__init__(every)
        self.texts = texts_of(batches)


class ActivationStats(_OnTexts):
    """How large the layers' outputs are, and how many of their entries are nearer to zero than `eps`."""

    def __init__(self, batches: Sequence[Batch], every: int = 500, *, eps: float = 1e-3) -> None:
        super().__init__(batches, every)
        if not eps > 0:
            raise ConfigError(f"eps must be above 0, and is {eps:g}")
        self.eps = eps

    def measure(self) -> Metrics:
        """exp_act_norm_ratio (last to first layer), exp_act_sparsity_mean, and both of each layer."""
        model = self.trainer.model
        assert isinstance(model, LanguageModel)
        sums: dict[str, torch.Tensor] = {}
        keep = functools.partial(_summed, eps=self.eps)
        for text in self.texts:
            with (
                torch.no_grad(),
                in_precision(self.trainer.precision, self.trainer.device),
                ActivationCapture(model, keep=keep) as captured,
            ):
                model.hidden(text.to(self.trainer.device))
            for name, found in captured.outputs.items():
                sums[name] = sums[name] + found if name in sums else found
        measured = Reading(*sums.values()).values()
        sizes = [(squares / count) ** 0.5 for squares, _, count in measured]
        sparse = [near / count for _, near, count in measured]
        return {
            "exp_act_norm_ratio": sizes[-1] / sizes[0] if sizes[0] else float("nan"),
            "exp_act_sparsity_mean": mean(sparse),
            "exp_act_norm_layer": sizes,
            "exp_act_sparsity_layer": sparse,
        }


class AttentionEntropy(_OnTexts):
    """How widely the heads look: the entropy of their attention weights, in nats, over all positions."""

    def measure(self) -> Metrics:
        """exp_attn_entropy_mean and _std over layers, and _layer: each; null: it has no attention."""
        model = self.trainer.model
        assert isinstance(model, LanguageModel)
        sums: dict[int, torch.Tensor] = {}

        def visit(layer: int, weights: torch.Tensor) -> None:
            entropies = attention_entropy(weights).mean(1)  # over heads
            sums[layer] = sums.get(layer, torch.zeros((), device=weights.device)) + entropies.sum()

        for text in self.texts:
            with in_precision(self.trainer.precision, self.trainer.device):
                visit_attention(model, text.to(self.trainer.device), visit)
        positions = sum(text.numel() for text in self.texts)
        totals = dict(zip(sums, Reading(*sums.values()).values(), strict=True))
        by_layer = [totals[n] / positions if n in totals else None for n in range(len(self.layers))]
        known = [entropy for entropy in by_layer if entropy is not None]
        return {
            "exp_attn_entropy_mean": mean(known),
            "exp_attn_entropy_std": spread(known),
            "exp_attn_entropy_layer": by_layer,
        }


class EffectiveRank(Probe):
    """exp(entropy of the normalised singular values) of the trained matrices; each expert's is its own."""

    def __init__(self, every: int = 2000) -> None:
        super().__init__(every)

    def measure(self) -> Metrics:
        """exp_effective_rank_mean over matrices, and _layer: the mean of each layer's."""
        chosen = [p for p in self.trainer.trained if p.ndim >= 2 and min(p.shape[-2:]) >= _SMALLEST_SIDE]
        ranks = [effective_rank(p).reshape(-1) for p in chosen]
        # a matrix of zeros (a fresh lora_B) has none
        lists = [[rank for rank in found.tolist() if not math.isnan(rank)] for found in ranks]
        every = [rank for found in lists for rank in found]
        if not every:
            return {}
        by_layer = self.layers.gathered(chosen, lists)
        return {
            "exp_effective_rank_mean": mean(every),
            "exp_effective_rank_layer": [mean(found) if found else None for found in by_layer],
        }


def _norms(tensors: Sequence[torch.Tensor | None]) -> list[float | None]:
    """The norm of each tensor, read from the device at once."""
    present = [tensor.detach() for tensor in tensors if tensor is not None]
    values = iter(Reading(*torch._foreach_norm(present, dtype=torch.float32)).values() if present else ())
    return [None if tensor is None else next(values) for tensor in tensors]


def _summed(x: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Of a layer's output: the sum of squares, the entries near zero, and the number of entries."""
    wide = x.double() if x.device.type != "mps" else x.float()
    near = (wide.abs() < eps).sum()
    return torch.stack(
        [wide.square().sum(), near.to(wide.dtype), torch.full_like(wide[..., 0].sum(), x.numel())]
    )
