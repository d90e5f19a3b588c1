"""Shared fixtures: a tiny model with a tokenizer, and SmolLM2 from the cache."""

import os

os.environ.setdefault("WHET_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import atexit
import importlib.util
import shutil
import signal
import tempfile

import pytest
import torch
from hypothesis import settings

from tiny import write_tiny_model

# no deadline: examples are slow on a busy machine
settings.register_profile("whet", deadline=None)
settings.load_profile("whet")

if "WHET_TOKENS" not in os.environ:  # for the tests and their subprocesses
    os.environ["WHET_TOKENS"] = tempfile.mkdtemp(prefix="whet-tokens-")
    atexit.register(shutil.rmtree, os.environ["WHET_TOKENS"], ignore_errors=True)

# nohup and background jobs ignore these signals, which subprocesses inherit, but tests send them
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # several threads per worker would compete for cores


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """A random two-layer llama with a small byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory)
    return directory


@pytest.fixture
def tiny(tiny_directory):
    """A new instance of the tiny model, and its tokenizer."""
    import whet

    return whet.load(tiny_directory, dtype=torch.float32, device="cpu")


@pytest.fixture
def static_steps(monkeypatch):
    """Generate with the fixed-shape steps of CUDA graphs, without recording a graph."""
    from whet.generation import engine
    from whet.generation.cuda_graph import StaticDecodeBatch
    from whet.generation.decode_batch import DecodeBatch

    def start(model, prompts, picker, *, max_tokens):
        rows = DecodeBatch(model, prompts, new_tokens=max_tokens)
        return StaticDecodeBatch(rows, picker, max_tokens=max_tokens, graph=False)

    monkeypatch.setattr(engine, "start_decoding", start)


@pytest.fixture(scope="session")
def smollm2_directory():
    """SmolLM2-135M-Instruct from whet's cache, which `make test` fills before the tests."""
    from whet.model_io.resolve_model import resolve_model

    return resolve_model("smollm2-135m-instruct")


def pytest_collection_modifyitems(items):
    """Skip the tests of 8-bit AdamW if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        skip = pytest.mark.skip(reason="bitsandbytes is not installed")
        for item in items:
            if (
                "adamw8bit" in item.name or "8_bit_adamw" in item.name
            ) and "names_the_extra" not in item.name:
                item.add_marker(skip)
