"""Probes: measurements of the model during a run, on fixed batches and without changing the run."""

import abc
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from whet.data.batches import Batch
from whet.errors import ConfigError, StorageError, check_positive
from whet.models.language_model import LanguageModel
from whet.storage import create_file_atomically, write_safetensors
from whet.training.callbacks import Injector, Metrics, ModelCallback, RunView
from whet.training.loss import autocast_context, total_weights, weighted_loss
from whet.training.observe.activation_capture import ActivationCapture
from whet.training.observe.attention_maps import visit_attention
from whet.training.observe.layer_stats import (
    Layers,
    attention_entropy,
    effective_rank,
    gradient_noise,
    mean,
    standard_deviation,
)
from whet.training.observe.preserve_state import preserve_state
from whet.training.observe.probe_batches import documents_of, loss_units
from whet.training.prefetch import HostCopy

log = logging.getLogger("whet")

START = "start.safetensors"
_MIN_NORM = 1e-10  # the relative spread of smaller gradient norms is meaningless
_MIN_SIDE = 4  # the rank of smaller matrices is not informative


class Probe(ModelCallback, Injector, abc.ABC):
    """Base class of probes: measures every `every` steps and adds the results to the metrics of the step.

    A probe does not change the run: gradients, random states and modes stay the same. A probe that fails logs
    a warning and is disabled.
    """

    main_only = True  # all ranks have the same weights
    failed = False

    def __init__(self, every: int) -> None:
        check_positive(every=every)
        self.every = every

    def on_train_begin(self, run: RunView) -> None:
        """Store the layers of the model."""
        self.layers = Layers(self.trainer.model)

    def touches_model(self, step: int) -> bool:
        """Return whether a measurement is due after this step."""
        return not self.failed and step % self.every == 0

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Measure, if a measurement is due."""
        if not self.touches_model(step):
            return
        start = time.perf_counter()
        try:
            with preserve_state(self.trainer.learner, self.trainer.model):
                metrics |= self.measure()
        except Exception as error:  # a failing probe must not stop the run
            self.failed = True
            reason = (str(error).strip().splitlines() or [""])[0]
            log.warning(
                "step %d: %s is disabled, because it failed: %s: %s",
                *(step, type(self).__name__, type(error).__name__, reason),
            )
        metrics["probe_s"] = metrics.get("probe_s", 0.0) + time.perf_counter() - start

    @abc.abstractmethod
    def measure(self) -> Metrics:
        """Return the metrics of the current state."""

    def gradients(self, batches: Sequence[Batch]) -> list[torch.Tensor | None]:
        """Return the gradients of the trained parameters on micro-batches, without changing `.grad`."""
        run, scale = self.trainer, self.trainer.state.loss_scale.value
        weights = total_weights(run.objective, batches)
        totals: list[torch.Tensor | None] = [None] * len(run.trained)
        for batch in batches:
            loss, _ = weighted_loss(
                run.model, run.objective, batch.to(run.device), weights=weights, precision=run.precision
            )
            gradients = torch.autograd.grad(loss * scale, run.trained, allow_unused=True)
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    total = totals[index]
                    totals[index] = gradient if total is None else total + gradient
        return totals if scale == 1.0 else [None if total is None else total / scale for total in totals]


class GradientStats(Probe):
    """Gradient norms on fixed micro-batches, by tensor and by layer.

    Args:
        batches: The micro-batches.
        every: The number of steps between two measurements.
    """

    def __init__(self, batches: Sequence[Batch], every: int = 200) -> None:
        super().__init__(every)
        self.batches = batches

    def measure(self) -> Metrics:
        """Return exp_grad_norm_mean and _std over tensors, _layer, _rest (not in layers), _largest_layer."""
        norms = _norms(self.gradients(self.batches))
        by_layer, rest = self.layers.root_sums(self.trainer.trained, norms)
        tensor_norms = [norm for norm in norms if norm is not None]
        layer_norms = [norm for norm in by_layer if norm is not None]
        metrics: Metrics = {"exp_grad_norm_layer": by_layer, "exp_grad_norm_rest": rest}
        if tensor_norms:
            metrics |= {
                "exp_grad_norm_mean": mean(tensor_norms),
                "exp_grad_norm_std": standard_deviation(tensor_norms),
            }
        if layer_norms:
            metrics["exp_grad_norm_largest_layer"] = by_layer.index(max(layer_norms))
        return metrics


class GradientNoise(Probe):
    """The gradient noise scale: the batch size beyond which larger batches help little (arXiv 1812.06162).

    Args:
        pieces: At least two lists of micro-batches. Each is a small batch, and all together the large one.
        every: The number of steps between two measurements.
    """

    def __init__(self, pieces: Sequence[Sequence[Batch]], every: int = 2000) -> None:
        super().__init__(every)
        self.pieces = pieces

    def measure(self) -> Metrics:
        """Return exp_simple_noise_scale (in tokens, pairs or texts), exp_grad_noise, exp_grad_signal."""
        sizes = [loss_units(self.trainer.objective, piece) for piece in self.pieces]
        total = sum(sizes)
        squares: list[float] = []
        mean_gradients: list[torch.Tensor | None] = [None] * len(self.trainer.trained)
        for size, piece in zip(sizes, self.pieces, strict=True):
            gradients = self.gradients(piece)
            squares.append(sum(norm**2 for norm in _norms(gradients) if norm is not None))
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    previous, share = mean_gradients[index], gradient * (size / total)
                    mean_gradients[index] = share if previous is None else previous + share
        square_of_mean = sum(norm**2 for norm in _norms(mean_gradients) if norm is not None)
        estimate = gradient_noise(sizes, squares, square_of_mean)
        metrics: Metrics = {"exp_grad_signal": estimate.signal, "exp_grad_noise": estimate.noise}
        return metrics if estimate.scale is None else metrics | {"exp_simple_noise_scale": estimate.scale}


class LossCurvature(Injector):
    """Relative spread of the gradient norm: standard deviation / mean over the last `window` steps.

    It uses the gradient norms of the training steps, so it needs no extra computation.
    """

    main_only = True

    state_key = "loss-curvature"

    def __init__(self, window: int = 50) -> None:
        check_positive(window=window)
        self.norms: deque[float] = deque(maxlen=window)

    def on_step_end(self, step: int, metrics: Metrics) -> None:
        """Add exp_grad_noise_scale, from the second step on; skipped steps do not count."""
        if math.isfinite(metrics["grad_norm"]):
            self.norms.append(metrics["grad_norm"])
        if len(self.norms) > 1 and (average := mean(self.norms)) > _MIN_NORM:
            metrics["exp_grad_noise_scale"] = standard_deviation(self.norms) / average

    def state(self) -> dict[str, Any]:  # Any: JSON values
        """Return the gradient norms in the window."""
        return {"norms": list(self.norms)}

    def restore(self, state: dict[str, Any]) -> None:  # Any: JSON values
        """Restore the norms that `state` returned; a shorter window keeps the last ones."""
        self.norms.extend(state["norms"])


class WeightStats(Probe):
    """The norm of the trained weights, and their distance from the initial weights of the run.

    The initial weights are stored in the run directory, so that a resumed run uses the same ones.
    """

    def __init__(self, every: int = 200) -> None:
        super().__init__(every)
        self.start: dict[str, torch.Tensor] | Path | None = None

    def on_train_begin(self, run: RunView) -> None:
        """Store the initial weights, or open the stored ones of a resumed run."""
        super().on_train_begin(run)
        self.named = {name: p for name, p in self.trainer.learner.named_parameters() if p.requires_grad}
        if run.directory is None:
            self.start = {name: p.detach().clone() for name, p in self.named.items()}
            return
        path = run.directory / START
        try:
            if run.step == 0:
                path.unlink(missing_ok=True)  # left by an earlier attempt to start the run
                with create_file_atomically(path) as staging:
                    write_safetensors(staging, dict(self.named))
            self.start = path if path.is_file() else None
        except (StorageError, OSError) as error:
            log.warning("%s", error)
        if self.start is None:
            log.warning(
                "exp_weight_distance is not measured: %s does not contain the weights of step 0", path
            )

    def measure(self) -> Metrics:
        """Return exp_weight_norm and exp_weight_distance, also as _layer and _rest, and exp_weight_delta.

        The distance is the norm of the difference, the delta the absolute difference of the norms.
        """
        parameters = list(self.named.values())
        metrics = self._by_layer("exp_weight_norm", parameters, _norms(parameters))
        if self.start is not None:
            distances, start_norms = self._compare_with_start(self.start)
            metrics |= self._by_layer("exp_weight_distance", parameters, distances)
            metrics["exp_weight_delta"] = abs(metrics["exp_weight_norm"] - math.hypot(*start_norms))
        return metrics

    def _by_layer(
        self, key: str, parameters: list[Any], norms: list[float | None]
    ) -> Metrics:  # Any: tensors
        by_layer, rest = self.layers.root_sums(parameters, norms)
        total = sum(norm**2 for norm in norms if norm is not None) ** 0.5
        return {key: total, f"{key}_layer": by_layer, f"{key}_rest": rest}

    def _compare_with_start(
        self, start: dict[str, torch.Tensor] | Path
    ) -> tuple[list[float | None], list[float]]:
        """Return the distance of each tensor from its initial value, and the norm of the initial value.

        Tensors are read one at a time, so that memory never holds all initial weights.
        """
        if isinstance(start, Path):
            try:
                with safe_open(start, framework="pt") as file:
                    return self._distances(file.get_tensor)
            except (OSError, SafetensorError) as error:
                raise StorageError(f"{start} cannot be read: {error}") from error
        return self._distances(start.__getitem__)

    def _distances(self, initial: Any) -> tuple[list[float | None], list[float]]:
        # Any: a function from names to tensors
        distances, start_norms = [], []
        with torch.no_grad():
            for name, p in self.named.items():
                first = initial(name).to(p.device).float()
                distances.append((p.float() - first).norm())
                start_norms.append(first.norm())
        return list(HostCopy(*distances).values()), list(HostCopy(*start_norms).values())


class _DocumentProbe(Probe):
    """Base class of probes that run a language model on the documents of batches."""

    def __init__(self, batches: Sequence[Batch], every: int = 500) -> None:
        super().__init__(every)
        self.documents = documents_of(batches)


class ActivationStats(_DocumentProbe):
    """Root mean square of the layers' outputs, and the share of entries smaller than `eps`.

    Args:
        batches: The micro-batches whose documents are used.
        every: The number of steps between two measurements.
        eps: The absolute value below which an entry counts as zero.
    """

    def __init__(self, batches: Sequence[Batch], every: int = 500, *, eps: float = 1e-3) -> None:
        super().__init__(batches, every)
        if not eps > 0:
            raise ConfigError(f"eps must be > 0, not {eps:g}")
        self.eps = eps

    def measure(self) -> Metrics:
        """Return exp_act_norm_ratio (last to first layer), exp_act_sparsity_mean and the values by layer."""
        model = self.trainer.model
        assert isinstance(model, LanguageModel)
        sums: dict[str, torch.Tensor] = {}
        keep = functools.partial(_activation_sums, eps=self.eps)
        for document in self.documents:
            with (
                torch.no_grad(),
                autocast_context(self.trainer.precision, self.trainer.device),
                ActivationCapture(model, keep=keep) as captured,
            ):
                model.hidden(document.to(self.trainer.device))
            for name, output in captured.outputs.items():
                sums[name] = sums[name] + output if name in sums else output
        totals = HostCopy(*sums.values()).values()
        sizes = [(squares / count) ** 0.5 for squares, _, count in totals]
        sparse = [near / count for _, near, count in totals]
        return {
            "exp_act_norm_ratio": sizes[-1] / sizes[0] if sizes[0] else float("nan"),
            "exp_act_sparsity_mean": mean(sparse),
            "exp_act_norm_layer": sizes,
            "exp_act_sparsity_layer": sparse,
        }


class AttentionEntropy(_DocumentProbe):
    """Entropy of the attention weights in nats, averaged over heads and positions.

    Args:
        batches: The micro-batches whose documents are used.
        every: The number of steps between two measurements.
    """

    def measure(self) -> Metrics:
        """Return exp_attn_entropy_mean and _std over layers, and _layer, which is null without attention."""
        model = self.trainer.model
        assert isinstance(model, LanguageModel)
        sums: dict[int, torch.Tensor] = {}

        def visit(layer: int, weights: torch.Tensor) -> None:
            entropies = attention_entropy(weights).mean(1)  # over heads
            sums[layer] = sums.get(layer, torch.zeros((), device=weights.device)) + entropies.sum()

        for document in self.documents:
            with autocast_context(self.trainer.precision, self.trainer.device):
                visit_attention(model, document.to(self.trainer.device), visit)
        positions = sum(document.numel() for document in self.documents)
        totals = dict(zip(sums, HostCopy(*sums.values()).values(), strict=True))
        by_layer = [totals[n] / positions if n in totals else None for n in range(len(self.layers))]
        entropies = [entropy for entropy in by_layer if entropy is not None]
        return {
            "exp_attn_entropy_mean": mean(entropies),
            "exp_attn_entropy_std": standard_deviation(entropies),
            "exp_attn_entropy_layer": by_layer,
        }


class EffectiveRank(Probe):
    """Effective rank of the trained matrices: exp(entropy of the normalized singular values).

    Each expert counts as its own matrix.
    """

    def __init__(self, every: int = 2000) -> None:
        super().__init__(every)

    def measure(self) -> Metrics:
        """Return exp_effective_rank_mean over matrices, and _layer, the mean of each layer."""
        matrices = [p for p in self.trainer.trained if p.ndim >= 2 and min(p.shape[-2:]) >= _MIN_SIDE]
        ranks = [effective_rank(p).reshape(-1) for p in matrices]
        # a zero matrix, such as a new lora_B, has no effective rank
        lists = [[rank for rank in values.tolist() if not math.isnan(rank)] for values in ranks]
        all_ranks = [rank for values in lists for rank in values]
        if not all_ranks:
            return {}
        by_layer = self.layers.collect(matrices, lists)
        return {
            "exp_effective_rank_mean": mean(all_ranks),
            "exp_effective_rank_layer": [mean(values) if values else None for values in by_layer],
        }


def _norms(tensors: Sequence[torch.Tensor | None]) -> list[float | None]:
    """Return the norm of each tensor, copied from the device at once."""
    present = [tensor.detach() for tensor in tensors if tensor is not None]
    values = iter(HostCopy(*torch._foreach_norm(present, dtype=torch.float32)).values() if present else ())
    return [None if tensor is None else next(values) for tensor in tensors]


def _activation_sums(x: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Return the sum of squares of a layer's output, the entries near zero, and all entries."""
    wide = x.double() if x.device.type != "mps" else x.float()
    near = (wide.abs() < eps).sum()
    return torch.stack(
        [wide.square().sum(), near.to(wide.dtype), torch.full_like(wide[..., 0].sum(), x.numel())]
    )
