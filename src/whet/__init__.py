"""whet sharpens language models: train, fine-tune, evaluate and use them, exactly.

Everything below is imported when it is first used, so that `import whet` and `whet --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.adapters.adapter import adapters_off as adapters_off
    from whet.adapters.files import load_adapter as load_adapter
    from whet.adapters.files import save_adapter as save_adapter
    from whet.adapters.load import load as load
    from whet.adapters.load import save as save
    from whet.adapters.lora import attach_lora as attach_lora
    from whet.adapters.lora import merge as merge
    from whet.adapters.merging import AdapterSet as AdapterSet
    from whet.adapters.model_merging import merge_models as merge_models
    from whet.chips import detect_peak_tflops as detect_peak_tflops
    from whet.errors import WhetError as WhetError
    from whet.generation.beam import beam_search as beam_search
    from whet.generation.engine import Completion as Completion
    from whet.generation.engine import complete as complete
    from whet.generation.sampling import Sampling as Sampling
    from whet.generation.selection import best_of_n as best_of_n
    from whet.generation.selection import majority_vote as majority_vote
    from whet.generation.text import generate as generate
    from whet.training.callbacks import Callback as Callback
    from whet.training.callbacks import EarlyStopping as EarlyStopping
    from whet.training.callbacks import Injector as Injector
    from whet.training.callbacks import MetricsLogger as MetricsLogger
    from whet.training.callbacks import StopRun as StopRun
    from whet.training.checkpoint import load_checkpoint as load_checkpoint
    from whet.training.checkpoint import save_checkpoint as save_checkpoint
    from whet.training.classifier import Classifier as Classifier
    from whet.training.optimizers import create_optimizer as create_optimizer
    from whet.training.probes import ActivationStats as ActivationStats
    from whet.training.probes import AttentionEntropy as AttentionEntropy
    from whet.training.probes import EffectiveRank as EffectiveRank
    from whet.training.probes import GradientNoise as GradientNoise
    from whet.training.probes import GradientStats as GradientStats
    from whet.training.probes import LossCurvature as LossCurvature
    from whet.training.probes import WeightStats as WeightStats
    from whet.training.run import resume as resume
    from whet.training.run import train as train
    from whet.training.samples import SampleGenerations as SampleGenerations
    from whet.training.schedules import create_schedule as create_schedule
    from whet.training.state import RunResult as RunResult
    from whet.training.throughput import Budget as Budget
    from whet.training.throughput import ThroughputMonitor as ThroughputMonitor
    from whet.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "adapters.adapter": ("adapters_off",),
    "adapters.files": ("load_adapter", "save_adapter"),
    "adapters.load": ("load", "save"),
    "adapters.lora": ("attach_lora", "merge"),
    "adapters.merging": ("AdapterSet",),
    "adapters.model_merging": ("merge_models",),
    "chips": ("detect_peak_tflops",),
    "errors": ("WhetError",),
    "generation.beam": ("beam_search",),
    "generation.engine": ("Completion", "complete"),
    "generation.sampling": ("Sampling",),
    "generation.selection": ("best_of_n", "majority_vote"),
    "generation.text": ("generate",),
    "training.callbacks": ("Callback", "EarlyStopping", "Injector", "MetricsLogger", "StopRun"),
    "training.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "training.classifier": ("Classifier",),
    "training.optimizers": ("create_optimizer",),
    "training.probes": (
        "ActivationStats",
        "AttentionEntropy",
        "EffectiveRank",
        "GradientNoise",
        "GradientStats",
        "LossCurvature",
        "WeightStats",
    ),
    "training.run": ("resume", "train"),
    "training.samples": ("SampleGenerations",),
    "training.schedules": ("create_schedule",),
    "training.state": ("RunResult",),
    "training.throughput": ("Budget", "ThroughputMonitor"),
    "training.trainer": ("Trainer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:  # Any: whatever the name is
    if name not in _HOME_OF:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    return getattr(importlib.import_module(f"whet.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOME_OF])
