"""The bridge to transformers, for every architecture that has no native family."""

import contextlib
import copy
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any  # throughout this module: transformers ships no types, and configs are JSON

import torch
from torch import nn

from whet.errors import ModelError
from whet.models.families import gemma3
from whet.models.families.config_fields import older_rope_keys
from whet.models.language_model import LanguageModel
from whet.ops.attention import Layout
from whet.ops.dispatch import is_planning
from whet.ops.lm_head import Head

# config fields that do not describe the architecture
_ORIGIN = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


class BridgeCache:
    """A transformers cache with its token count, which recurrent caches do not store."""

    def __init__(self, past: Any) -> None:
        self.past = past
        self.length = 0
        self.long = False  # with longrope: whether the keys were rotated with the long factors
        self.seen: list[torch.Tensor] = []  # with longrope: all tokens and positions, for recomputation

    def select_rows(self, rows: torch.Tensor) -> None:
        """Select and reorder rows by index. Other rows are dropped."""
        self.seen = [each[rows] for each in self.seen]
        self.past.reorder_cache(rows)  # recurrent layers do not have batch_select_indices

    def truncate(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        if length == self.length:
            return
        if not all(type(layer).__name__ == "DynamicLayer" for layer in self.past.layers):
            raise ModelError("a cache with sliding windows or recurrent states cannot be truncated")
        self.past.crop(length - self.length)  # a negative count is the number of tokens to remove
        self.length = length
        self.seen = [each[:, :length] for each in self.seen]


class Bridge(LanguageModel):
    """A transformers model as a whet LanguageModel. Parameters keep their names, prefixed by `model.`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._stored_config = copy.deepcopy(model.config)  # saved with the model, including its dropout rates
        _disable_dropout(model)
        self.cache_problem: str | None = None  # why the model cannot generate, if it cannot
        self._inputs = frozenset(inspect.signature(self._decoder.forward).parameters)
        self._cache_name = "cache_params" if "cache_params" in self._inputs else "past_key_values"
        self._short_length = _longrope_length(model.config)
        self._recompute = self._recomputing = False  # requested; current state of the layers

    @property
    def _decoder(self) -> Any:
        """The decoder without its head. Not an attribute, which would register its parameters twice."""
        decoder = self.model.get_decoder()
        if decoder is self.model.get_output_embeddings():
            decoder = self.model.base_model  # modernbert names its head decoder
        return decoder.model if hasattr(decoder, "lm_head") else decoder  # llama4 returns the complete model

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: BridgeCache | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [B, T, D] after the final norm. Packed documents start at position 0."""
        self._set_recomputing(self._recompute and cache is None)  # checkpointed layers drop the cache
        if cache is not None:
            return self._cached(tokens, cache, positions, layout.visible if layout else None)
        if layout is not None and layout.documents is not None:
            return self._by_document(tokens, layout.documents)
        if positions is None:
            return self._run(tokens)
        if self._short_length is not None and not is_planning() and bool((positions[:, 1:] == 0).any()):
            # exclude padding, whose positions restart at 0, from the length that selects the longrope factors
            texts = ((positions[:, 1:] == 0).cumsum(1) == 0).sum(1) + 1
            return self._by_document(tokens, tuple((n, tokens.shape[1] - n) for n in texts.tolist()))
        # without a mask, transformers treats a jump in the positions as the start of a new document
        return self._run(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens))

    def _run(self, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the decoder on rows of tokens, with the inputs that this architecture accepts."""
        inputs = {"use_cache": False} | inputs
        accepted = {name: inputs[name] for name in inputs.keys() & self._inputs}
        with _fixed_rotations(self._decoder) if is_planning() else contextlib.nullcontext():
            hidden: torch.Tensor = self._decoder(input_ids=tokens, **accepted).last_hidden_state
        return hidden.to(self.head().weight.dtype)  # mamba returns float32 in any precision

    def _cached(self, tokens: torch.Tensor, cache: BridgeCache, positions: Any, visible: Any) -> torch.Tensor:
        if positions is None:  # bamba would restart from 0
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) + cache.length
        new_tokens = tokens.shape[1]
        if self._short_length is not None:
            tokens, positions = self._replay_if_factors_change(tokens, positions, cache, self._short_length)
        recurrent = any(hasattr(layer, "recurrent_states") for layer in cache.past.layers)
        # with more than one token at once, mamba and jamba discard their state
        step = 1 if recurrent and cache.length else tokens.shape[1]
        outputs = []
        for new_ids, new_positions in zip(tokens.split(step, 1), positions.split(step, 1), strict=True):
            start, cache.length = cache.length, cache.length + new_ids.shape[1]
            # state-space models have no cached keys
            first_visible = start if self._cache_name == "cache_params" else 0
            mask = None if visible is None else visible[:, first_visible : cache.length]
            inputs = {"position_ids": new_positions, "attention_mask": mask, self._cache_name: cache.past}
            outputs.append(self._run(new_ids, use_cache=True, **inputs))
        return torch.cat(outputs, 1)[:, -new_tokens:]

    def _replay_if_factors_change(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: BridgeCache, short_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and positions to compute: all of them, if longrope switches its factors.

        In that case the cache is emptied, because its keys were rotated with the other factors.
        """
        new = [tokens, positions]
        cache.seen = [torch.cat(pair, 1) for pair in zip(cache.seen, new, strict=True)] if cache.seen else new
        long = positions.amax(1) >= short_length
        if long.any() and not long.all():
            raise ModelError(
                f"longrope cannot decode rows of up to {short_length} tokens together with longer ones",
                hint="generate for one prompt at a time",
            )
        before, cache.long = cache.long, bool(long.all())
        if cache.length and cache.long != before:
            empty = self.new_cache()
            cache.past, cache.length = empty.past, empty.length
            tokens, positions = cache.seen
        return tokens, positions

    def _by_document(self, tokens: torch.Tensor, documents: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        """Run each document in a separate row, which is correct even for recurrent architectures."""
        lengths = [length for row in documents for length in row if length]
        texts = torch.split(tokens.reshape(-1), lengths)
        positions_per_document = torch.split(torch.arange(tokens.numel()), lengths)
        # FSDP gathers parameters in each forward pass, so every rank must run the same number: one
        sharded = any(hasattr(parameter, "device_mesh") for parameter in self.parameters())
        length_classes = _split_by_rope_length(lengths, self._short_length)
        if sharded and len(length_classes) > 1:
            raise ModelError(
                f"longrope cannot train on texts of up to {self._short_length} tokens together with longer "
                "ones if weights are sharded",
                hint=f"set data.max_length to at most {self._short_length}",
            )
        results, positions = [], []
        for group in length_classes if sharded else self._batches(lengths, length_classes):
            rows = nn.utils.rnn.pad_sequence([texts[document] for document in group], batch_first=True)
            ends = torch.tensor([lengths[document] for document in group])[:, None]
            real_indices = (torch.arange(rows.shape[1]) < ends).flatten().nonzero()[:, 0].to(rows.device)
            results.append(self._run(rows).flatten(0, 1).index_select(0, real_indices))
            positions += [positions_per_document[document] for document in group]
        inverse = torch.cat(positions).argsort().to(tokens.device)
        return torch.cat(results).index_select(0, inverse).view(*tokens.shape, -1)

    def _batches(
        self, lengths: Sequence[int], length_classes: Sequence[Sequence[int]]
    ) -> Iterator[Sequence[int]]:
        """Yield the documents of each forward pass: several, or one without the attention fast path."""
        for length_class in length_classes:
            yield from (
                _groups(lengths, length_class)
                if self.paths.attention
                else ([document] for document in length_class)
            )

    def attentions(self, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the attention weights [B, heads, T, T] on tokens [B, T], by layer with attention."""
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")  # other implementations do not return the weights
            output = self._decoder(input_ids=tokens, use_cache=False, output_attentions=True)
        finally:
            self.model.set_attn_implementation(before)
        layer_weights = getattr(output, "attentions", None) or ()
        weights = {
            layer: layer_weight
            for layer, layer_weight in enumerate(layer_weights)
            if layer_weight is not None
        }
        if not weights:
            raise ModelError(f"{type(self.model).__name__} does not return attention weights")
        return weights

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, without a factor that the model's forward may apply."""
        rows: torch.Tensor = self.model.get_input_embeddings()(tokens)
        return rows

    def head(self) -> Head:
        """Return the output head, with the logit scale and softcap of the config (verified on loading)."""
        output, config = self.model.get_output_embeddings(), self.model.config
        multiplier = config_field(config, "logit_scale", "lm_head_multiplier", default=1.0)
        softcap = config_field(config, "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        scale = multiplier / config_field(config, "logits_scaling", default=1.0)
        return Head(output.weight, getattr(output, "bias", None), scale, softcap, self.paths)

    def new_cache(self, capacity: int = 0) -> BridgeCache:
        """Return an empty cache of the types that the layers need."""
        from transformers import DynamicCache

        if self.cache_problem:
            raise ModelError(f"whet cannot generate with {type(self.model).__name__}: {self.cache_problem}")
        return BridgeCache(DynamicCache(config=self.model.config))

    @property
    def grad_checkpoint(self) -> bool:
        """Whether activations are recomputed in the backward pass, in training mode."""
        return self._recompute

    @grad_checkpoint.setter
    def grad_checkpoint(self, enabled: bool) -> None:
        if enabled and not self.model.supports_gradient_checkpointing:
            raise ModelError(
                f"transformers does not support gradient checkpointing for {type(self.model).__name__}"
            )
        self._recompute = enabled
        self._set_recomputing(enabled)

    def _set_recomputing(self, on: bool) -> None:
        if on and not self._recomputing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.disable_input_require_grads()  # only reentrant checkpointing needs it
        elif self._recomputing and not on:
            self.model.gradient_checkpointing_disable()
        self._recomputing = on

    def blocks(self) -> Iterable[nn.Module]:
        """Return the layers in order."""
        lists = [module for module in self._decoder.modules() if isinstance(module, nn.ModuleList)]
        # by parameters, not by length: a layer may have more experts than the model has layers
        return max(
            lists, key=lambda module_list: sum(parameter.numel() for parameter in module_list.parameters())
        )

    def hf_name(self, name: str) -> str:
        """Return the name in the transformers class."""
        return name.removeprefix("model.")

    def hf_config(self) -> dict[str, Any]:
        """Return the config.json of this model."""
        config = json.loads(self._stored_config.to_json_string(use_diff=False))
        older = _older_keys(config)
        if older and not _has_same_rope(self._stored_config, {**config, **older}):
            older = {}
        return {**config, **older, "architectures": [type(self.model).__name__]}

    def to_hf_state_dict(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors under the names of the hub's files. transformers 5 fuses and renames some."""
        from transformers.core_model_loading import revert_weight_conversion

        ours = super().to_hf_state_dict(state)
        theirs: dict[str, torch.Tensor] = revert_weight_conversion(self.model, ours)
        # keep the order: of two tied names only the first is written, and it must be the embedding
        return {name: theirs[name] for name in ours if name in theirs} | theirs

    @property
    def vocab_size(self) -> int:
        """Number of rows of the token embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int:
        """The maximum sequence length, or a very large number if the config does not state it."""
        return int(
            config_field(self.model.config, "max_position_embeddings", "max_seq_len", default=2**31 - 1)
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return the architecture as a JSON value: the config without its fields about the origin."""
        text = self._stored_config.to_json_string(use_diff=True)
        return dict(json.loads(text, object_hook=lambda d: {k: d[k] for k in d if k not in _ORIGIN}))


def _older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE keys of transformers 4 for a config written by transformers 5."""
    rope, kind = config.get("rope_parameters"), config.get("model_type")
    if not isinstance(rope, dict):
        return {}
    if kind in ("gemma3_text", "gemma3n_text"):
        return gemma3.older_rope_keys(rope)
    if kind == "olmo3":  # both versions scale only the layers without a window
        return older_rope_keys(rope["full_attention"])
    # settings per layer type, which transformers 4 does not support
    if any(isinstance(value, dict) for value in rope.values()):
        return {}
    older = older_rope_keys(rope)
    if kind in ("gpt_neox", "gpt_neox_japanese"):
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        return {names.get(key, key): value for key, value in older.items()}
    if kind == "phi3" and older.get("partial_rotary_factor") == 1.0:  # the default of transformers 4
        del older["partial_rotary_factor"]
    if kind in ("phi3", "phi4_multimodal") and rope.get("rope_type") == "longrope":
        factors = {key: rope.get(key) for key in ("short_factor", "long_factor")}
        older["rope_scaling"] = {"type": "longrope", **factors}  # their config classes reject any other key
    return older


def _has_same_rope(config: Any, written: dict[str, Any]) -> bool:
    """Whether transformers 5, which prefers the older keys, reads the same RoPE from `written`."""
    try:
        reloaded = type(config).from_dict(copy.deepcopy(written))
    except Exception:  # every config class raises different errors
        return False
    # "type" is an older name of "rope_type"
    before, after = ({**(each.rope_parameters or {}), "type": None} for each in (config, reloaded))
    return before == after


def _disable_dropout(model: Any) -> None:
    """Set every dropout rate to 0: in dropout layers, module attributes and configs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


@contextlib.contextmanager
def _fixed_rotations(decoder: nn.Module) -> Iterator[None]:
    """Use the default RoPE for planning with fake tensors, where length-dependent RoPE types cannot run."""
    before: dict[Any, Any] = {m: m.rope_type for m in decoder.modules() if hasattr(m, "rope_type")}
    for module, kind in before.items():
        module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
    try:
        yield
    finally:
        for module, kind in before.items():
            module.rope_type = kind


def _longrope_length(config: Any) -> int | None:
    """Return the length up to which longrope uses its short factors, or None without longrope."""
    parameters = config_field(config, "rope_parameters", default={})
    # one RoPE, or one per layer type
    ropes = [rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict)]
    longropes = [rope for rope in ropes if rope.get("rope_type") == "longrope"]
    return min((int(rope["original_max_position_embeddings"]) for rope in longropes), default=None)


def _split_by_rope_length(lengths: Sequence[int], short_length: int | None) -> list[list[int]]:
    """Return the documents that may share a forward pass: all, or short and long ones separately."""
    short = [n for n, length in enumerate(lengths) if short_length is None or length <= short_length]
    long = [n for n, length in enumerate(lengths) if short_length is not None and length > short_length]
    return [length_class for length_class in (short, long) if length_class]


def _groups(lengths: Sequence[int], documents: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield groups of documents to run together, such that padding is at most half of the tokens."""
    group: list[int] = []
    tokens = 0
    for document in sorted(documents, key=lengths.__getitem__, reverse=True):
        tokens += lengths[document]
        if group and lengths[group[0]] * (len(group) + 1) > 2 * tokens:
            yield group
            group, tokens = [], lengths[document]
        group.append(document)
    yield group


def config_field(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these fields of the text config that is set and not None, or the default."""
    config = config.get_text_config(decoder=True)
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)
