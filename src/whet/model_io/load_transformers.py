"""Load a model through transformers, and check the assumptions of the bridge."""

import contextlib
import logging
import re
import textwrap
from collections.abc import Container
from pathlib import Path
from typing import Any  # everywhere below: transformers ships no types, and configs are JSON

import torch

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.config_json import QUANTIZATION, read_config
from whet.model_io.file_checks import check_weight, weight_problem
from whet.model_io.safetensors import TensorFiles, open_tensor_files
from whet.models.transformers_bridge import Bridge, config_field
from whet.ops.attention import Layout

log = logging.getLogger("whet")


def load_bridge(
    directory: Path, *, dtype: torch.dtype, device: torch.device, extra_tensors: Container[str] = ()
) -> Bridge:
    """Load a Hugging Face directory with its transformers class, and check the assumptions of the bridge.

    `extra_tensors` of the files are ignored.
    """
    from transformers.utils import logging

    # given the directory, transformers would also load adapters, torch checkpoints and names in config.json
    files = open_tensor_files(directory, read_config(directory))
    with (
        contextlib.ExitStack() as stack
    ):  # no progress bars and reports, because whet reports problems itself
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()
        with invalid_input_errors(f"transformers cannot load {directory}"):
            tensors = dict(files.read({name for name in files if name not in extra_tensors}))
            model = _load_causal_lm(directory, tensors, dtype=dtype)
            _check_weights(model, tensors, files)
            del tensors
            bridge = Bridge(model.to(device))
        with invalid_input_errors(
            f"transformers loads {directory}, but its {type(model).__name__} fails on a few tokens"
        ):
            _check_behavior(bridge)
    return bridge


def _check_weights(model: Any, tensors: dict[str, torch.Tensor], files: TensorFiles) -> None:
    """Raise ModelError for tensors that are not valid weights, except those that are not parameters."""
    buffers = {name for name, _ in model.named_buffers()}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    for name, tensor in tensors.items():
        if weight_problem(tensor) is None or any(pattern.search(name) for pattern in ignored):
            continue
        if not any(
            name == buffer or name.endswith(f".{buffer}") or buffer.endswith(f".{name}") for buffer in buffers
        ):
            check_weight(tensor, name, files.file_of(name))
    for name, parameter in model.named_parameters():
        if weight_problem(parameter) is not None:  # in the model's dtype, which may be narrower
            raise ModelError(
                f"{files.directory}: {name} overflows in {parameter.dtype}", hint="choose another precision"
            )


def _choose_experts_implementation(bridge: Bridge, tokens: torch.Tensor) -> None:
    """Switch to the eager implementation of experts if torch's grouped kernel rejects their width."""
    if not bridge.paths.grouped_experts and bridge.model._can_set_experts_implementation():
        bridge.model.set_experts_implementation("eager")
    try:
        bridge.hidden(tokens)
    except RuntimeError as error:
        if "multiple of 16 bytes" not in str(error) or not bridge.model._can_set_experts_implementation():
            raise
        log.info("model: torch's grouped_mm does not support experts of this width, computing one at a time")
        bridge.model.set_experts_implementation("eager")


def _load_causal_lm(directory: Path, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(f"{directory}: {config.model_type!r} is not a causal language model in transformers")
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)  # the tensors are dequantized
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(tensors):
        raise ModelError(
            f"{directory}: config.json has {layers} layers, but there are only {len(tensors)} tensors"
        )
    model, report = model_class.from_pretrained(
        None,
        config=text if model_class.config_class is type(text) else config,
        state_dict=tensors,
        dtype=dtype,
        # None selects SDPA if the class supports it, else eager; SDPA has no softcap of attention logits
        attn_implementation="eager" if config_field(config, "attn_logit_softcapping") else None,
        ignore_mismatched_sizes=True,  # so that they are reported with their names
        output_loading_info=True,
    )
    shapes = [
        f"{name} is {[*stored]}, expected {[*expected]}"
        for name, stored, expected in report["mismatched_keys"]
    ]
    mismatches = {
        "missing": report["missing_keys"],
        "unexpected": report["unexpected_keys"],
        "wrong shape": shapes,
    }
    problems = [
        f"{label}: {', '.join(sorted(names)[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for label, names in mismatches.items()
        if names
    ]
    if problems:
        raise ModelError(f"the tensors in {directory} do not match its config.json: {'; '.join(problems)}")
    return model


@torch.no_grad()
def _check_behavior(bridge: Bridge) -> None:
    """Check the bridge's assumptions about a transformers class on a few tokens.

    The class must be causal and its head must be reproducible. Whether its cache can decode left-padded rows
    is recorded in `bridge.cache_problem`.
    """
    name = type(bridge.model).__name__
    if bridge.model.get_output_embeddings() is None:
        raise ModelError(f"{name} has no output embeddings: it is not a language model")
    tokens = torch.randint(bridge.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens[1, :6] = tokens[0, :6]
    tokens = tokens.to(bridge.device)
    _choose_experts_implementation(bridge, tokens)
    hidden = bridge.hidden(tokens)
    if not hidden.isfinite().all():
        raise ModelError(f"{name} overflows in {hidden.dtype}", hint="choose another precision")
    rounding = torch.finfo(hidden.dtype).eps
    loose, tight = max(1e-3, 16 * rounding), max(1e-5, 4 * rounding)
    if not _is_close(hidden[1, :6], hidden[0, :6], tolerance=loose):
        raise ModelError(f"{name} is not causal: positions attend to later tokens")
    logits = bridge.model(input_ids=tokens, use_cache=False).logits
    if not _is_close(bridge.logits(hidden), logits, tolerance=tight):
        raise ModelError(f"the head of {name} transforms the logits in a way that whet does not support")
    try:
        same = _is_close(_decode_ragged(bridge, tokens), hidden[[1, 0], [7, 11], None], tolerance=loose)
        bridge.cache_problem = None if same else "left-padded rows decoded from its cache differ"
    except Exception as error:  # some classes accept only their own type of cache
        bridge.cache_problem = textwrap.shorten(str(error), 200)


def _decode_ragged(bridge: Bridge, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states of row 1 without its last 4 tokens and of row 0, decoded in one batch."""
    rows = torch.stack([tokens[0], tokens[1].roll(4), tokens[0]])
    visible = torch.ones_like(rows, dtype=torch.bool)
    visible[1, :4] = False
    positions = (visible.cumsum(1) - 1).clamp(min=0)
    cache = bridge.new_cache()
    bridge.hidden(rows[:, :11], positions[:, :11], Layout(visible=visible[:, :11]), cache)
    cache.select_rows(torch.tensor([1, 0], device=tokens.device))
    return bridge.hidden(rows[[1, 0], 11:], positions[[1, 0], 11:], Layout(visible=visible[[1, 0]]), cache)


def _is_close(actual: torch.Tensor, expected: torch.Tensor, *, tolerance: float) -> bool:
    """Return whether two tensors have the same shape and a relative L2 distance within the tolerance."""
    norm, expected = torch.linalg.vector_norm, expected.float()
    if actual.shape != expected.shape:
        return False
    return bool(norm(actual.float() - expected) <= tolerance * norm(expected))
