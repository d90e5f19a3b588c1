"""Shared fixtures: a tiny model directory with a tokenizer, and the real model from the cache."""

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

# a busy machine makes every example slow: no test compares timings
settings.register_profile("whet", deadline=None)
settings.load_profile("whet")

if "WHET_TOKENS" not in os.environ:  # token stores of the tests, and of the processes they start
    os.environ["WHET_TOKENS"] = tempfile.mkdtemp(prefix="whet-tokens-")
    atexit.register(shutil.rmtree, os.environ["WHET_TOKENS"], ignore_errors=True)

# started by nohup or in the background, these are ignored, also in the processes that tests start and signal
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # several workers with several threads each wait for one another


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """A random two-layer llama with a small byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory)
    return directory


@pytest.fixture
def tiny(tiny_directory):
    """The tiny model and its tokenizer, fresh."""
    import whet

    return whet.load(tiny_directory, dtype=torch.float32, device="cpu")


@pytest.fixture
def static_steps(monkeypatch):
    """Generation by the fixed-shape steps that CUDA graphs record, here run as they are."""
    from whet.generation import engine
    from whet.generation.cuda_graph import StaticDecodeBatch
    from whet.generation.decode_batch import DecodeBatch

    def start(model, prompts, picker, *, max_tokens):
        rows = DecodeBatch(model, prompts, new_tokens=max_tokens)
        return StaticDecodeBatch(rows, picker, max_tokens=max_tokens, graph=False)

    monkeypatch.setattr(engine, "start_decoding", start)


@pytest.fixture(scope="session")
def smollm2_directory():
    """SmolLM2-135M-Instruct from whet's cache, where `make test` puts it before the tests start."""
    from whet.model_io.hub import resolve

    return resolve("smollm2-135m-instruct")


def pytest_collection_modifyitems(items):
    """8-bit AdamW is an extra: where bitsandbytes is not installed, what needs it is skipped."""
    if importlib.util.find_spec("bitsandbytes") is None:
        skip = pytest.mark.skip(reason="bitsandbytes is not installed")
        for item in items:
            if (
                "adamw8bit" in item.name or "8_bit_adamw" in item.name
            ) and "names_the_extra" not in item.name:
                item.add_marker(skip)
