"""Training callbacks: base classes, limits, early stopping, probes, samples and metrics."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.training.callbacks import Callback as Callback
    from whet.training.callbacks import Injector as Injector
    from whet.training.callbacks import ModelCallback as ModelCallback
    from whet.training.callbacks import StopRun as StopRun
    from whet.training.early_stopping import EarlyStopping as EarlyStopping
    from whet.training.limits import Budget as Budget
    from whet.training.limits import MemoryLimit as MemoryLimit
    from whet.training.limits import TimeLimit as TimeLimit
    from whet.training.observe.metrics_logger import MetricsLogger as MetricsLogger
    from whet.training.observe.probes import ActivationStats as ActivationStats
    from whet.training.observe.probes import AttentionEntropy as AttentionEntropy
    from whet.training.observe.probes import EffectiveRank as EffectiveRank
    from whet.training.observe.probes import GradientNoise as GradientNoise
    from whet.training.observe.probes import GradientStats as GradientStats
    from whet.training.observe.probes import LossCurvature as LossCurvature
    from whet.training.observe.probes import WeightStats as WeightStats
    from whet.training.observe.samples import SampleGenerations as SampleGenerations
    from whet.training.observe.throughput import ThroughputMonitor as ThroughputMonitor

_MODULE_OF = {
    "Callback": "training.callbacks",
    "Injector": "training.callbacks",
    "ModelCallback": "training.callbacks",
    "StopRun": "training.callbacks",
    "EarlyStopping": "training.early_stopping",
    "Budget": "training.limits",
    "MemoryLimit": "training.limits",
    "TimeLimit": "training.limits",
    "MetricsLogger": "training.observe.metrics_logger",
    "ActivationStats": "training.observe.probes",
    "AttentionEntropy": "training.observe.probes",
    "EffectiveRank": "training.observe.probes",
    "GradientNoise": "training.observe.probes",
    "GradientStats": "training.observe.probes",
    "LossCurvature": "training.observe.probes",
    "WeightStats": "training.observe.probes",
    "SampleGenerations": "training.observe.samples",
    "ThroughputMonitor": "training.observe.throughput",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
