"""whet trains, fine-tunes, evaluates and runs language models.

Public names are imported on first use, which keeps `import whet` and `whet --help` fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet import analysis as analysis
    from whet import callbacks as callbacks
    from whet import data as data
    from whet import errors as errors
    from whet import merging as merging
    from whet import objectives as objectives
    from whet import ops as ops
    from whet import optim as optim
    from whet import parallel as parallel
    from whet import rl as rl
    from whet.adapters.adapter import adapters_off as adapters_off
    from whet.adapters.attach import attach_lora as attach_lora
    from whet.adapters.merge import merge as merge
    from whet.api.evaluate import benchmark as benchmark
    from whet.api.evaluate import compare_models as compare_models
    from whet.api.evaluate import evaluate as evaluate
    from whet.api.evaluate import evaluate_code as evaluate_code
    from whet.api.export import export as export
    from whet.api.export import push as push
    from whet.api.train import resume as resume
    from whet.api.train import train as train
    from whet.config.run_config import RunConfig as RunConfig
    from whet.data.clean.clean_data import clean_data as clean_data
    from whet.data.clean.clean_report import CleanReport as CleanReport
    from whet.errors import WhetError as WhetError
    from whet.generation.beam_search import beam_search as beam_search
    from whet.generation.best_of_n import best_of_n as best_of_n
    from whet.generation.best_of_n import majority_vote as majority_vote
    from whet.generation.engine import Completion as Completion
    from whet.generation.engine import complete as complete
    from whet.generation.generate import generate as generate
    from whet.generation.sampling import Sampling as Sampling
    from whet.hardware import detect_peak_tflops as detect_peak_tflops
    from whet.model_io.formats.adapter_files import load_adapter as load_adapter
    from whet.model_io.formats.adapter_files import save_adapter as save_adapter
    from whet.model_io.load import load as load
    from whet.model_io.merging.adapter_set import AdapterSet as AdapterSet
    from whet.model_io.merging.merge_models import merge_models as merge_models
    from whet.model_io.save import save as save
    from whet.objectives.objective import Loss as Loss
    from whet.objectives.objective import Objective as Objective
    from whet.ops.dispatch import reference as reference
    from whet.planning.plan import plan as plan
    from whet.recipes.classify.classifier import Classifier as Classifier
    from whet.training.callbacks import Callback as Callback
    from whet.training.callbacks import Injector as Injector
    from whet.training.callbacks import ModelCallback as ModelCallback
    from whet.training.callbacks import StopRun as StopRun
    from whet.training.checkpoint import load_checkpoint as load_checkpoint
    from whet.training.checkpoint import save_checkpoint as save_checkpoint
    from whet.training.early_stopping import EarlyStopping as EarlyStopping
    from whet.training.limits import Budget as Budget
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
    from whet.training.optim.lr_schedules import create_schedule as create_schedule
    from whet.training.optim.optimizers import create_optimizer as create_optimizer
    from whet.training.state import RunResult as RunResult
    from whet.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "adapters.adapter": ("adapters_off",),
    "adapters.attach": ("attach_lora",),
    "adapters.merge": ("merge",),
    "api.evaluate": ("benchmark", "compare_models", "evaluate", "evaluate_code"),
    "api.export": ("export", "push"),
    "api.train": ("resume", "train"),
    "config.run_config": ("RunConfig",),
    "data.clean.clean_data": ("clean_data",),
    "data.clean.clean_report": ("CleanReport",),
    "errors": ("WhetError",),
    "generation.beam_search": ("beam_search",),
    "generation.best_of_n": ("best_of_n", "majority_vote"),
    "generation.engine": ("Completion", "complete"),
    "generation.generate": ("generate",),
    "generation.sampling": ("Sampling",),
    "hardware": ("detect_peak_tflops",),
    "model_io.formats.adapter_files": ("load_adapter", "save_adapter"),
    "model_io.load": ("load",),
    "model_io.merging.adapter_set": ("AdapterSet",),
    "model_io.merging.merge_models": ("merge_models",),
    "model_io.save": ("save",),
    "objectives.objective": ("Loss", "Objective"),
    "ops.dispatch": ("reference",),
    "planning.plan": ("plan",),
    "recipes.classify.classifier": ("Classifier",),
    "training.callbacks": ("Callback", "Injector", "ModelCallback", "StopRun"),
    "training.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "training.early_stopping": ("EarlyStopping",),
    "training.limits": ("Budget",),
    "training.observe.metrics_logger": ("MetricsLogger",),
    "training.observe.probes": (
        "ActivationStats",
        "AttentionEntropy",
        "EffectiveRank",
        "GradientNoise",
        "GradientStats",
        "LossCurvature",
        "WeightStats",
    ),
    "training.observe.samples": ("SampleGenerations",),
    "training.observe.throughput": ("ThroughputMonitor",),
    "training.optim.lr_schedules": ("create_schedule",),
    "training.optim.optimizers": ("create_optimizer",),
    "training.state": ("RunResult",),
    "training.trainer": ("Trainer",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_MODULES = (
    "analysis",
    "callbacks",
    "data",
    "errors",
    "merging",
    "objectives",
    "ops",
    "optim",
    "parallel",
    "rl",
)
__all__ = list(_MODULE_OF)
_load_name = lazy_getattr(__name__, _MODULE_OF)


def __getattr__(name: str) -> Any:  # Any: the object of that name
    return importlib.import_module(f"whet.{name}") if name in _MODULES else _load_name(name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_MODULE_OF, *_MODULES])
