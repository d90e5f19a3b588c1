"""Every architecture whet has no family for: a transformers causal language model behind whet's contract."""

import contextlib
import copy
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any  # everywhere below: transformers ships no types, and configs are JSON

import torch
from torch import nn

from whet.errors import ModelError
from whet.models.families import gemma3
from whet.models.families.config_fields import older_rope_keys
from whet.models.language_model import LanguageModel
from whet.ops.attention import Layout
from whet.ops.dispatch import is_plan
from whet.ops.lm_head import Head

_ORIGIN = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}  # not architecture


class BridgeCache:
    """A transformers cache, and how many tokens it has seen (a recurrent one does not say)."""

    def __init__(self, past: Any) -> None:
        self.past = past
        self.length = 0
        self.long = False  # with longrope: whether its keys are turned by the long factors
        self.seen: list[torch.Tensor] = []  # with longrope: tokens and positions, to be read again

    def keep(self, rows: torch.Tensor) -> None:
        """Drop every row that is not listed."""
        self.seen = [each[rows] for each in self.seen]
        self.past.reorder_cache(rows)  # recurrent layers do not have batch_select_indices

    def truncate(self, length: int) -> None:
        """Forget the tokens after the first `length`."""
        if length == self.length:
            return
        if not all(type(layer).__name__ == "DynamicLayer" for layer in self.past.layers):
            raise ModelError("a cache of windows or of recurrent states cannot forget its last tokens")
        self.past.crop(length - self.length)  # a negative number: how many to remove
        self.length = length
        self.seen = [each[:, :length] for each in self.seen]


class Bridge(LanguageModel):
    """A transformers model under whet's contract. Its parameters keep their names, after `model.`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._stored_config = copy.deepcopy(model.config)  # as it is saved, with the dropout it asks for
        _switch_dropout_off(model)
        self.cache_problem: str | None = None  # why it cannot generate
        self._inputs = frozenset(inspect.signature(self._decoder.forward).parameters)
        self._cache_name = "cache_params" if "cache_params" in self._inputs else "past_key_values"
        self._short_length = _longrope_length(model.config)
        self._recompute = self._recomputing = False  # what was asked for; what the layers are set to

    @property
    def _decoder(self) -> Any:
        """The stack under the head; not an attribute, which would register its parameters twice."""
        decoder = self.model.get_decoder()
        if decoder is self.model.get_output_embeddings():
            decoder = self.model.base_model  # modernbert calls its head the decoder
        return decoder.model if hasattr(decoder, "lm_head") else decoder  # llama4 gives the whole model

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: BridgeCache | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, T, D] after the final norm; packed documents each start at position 0."""
        self._set_recomputing(self._recompute and cache is None)  # layers that recompute drop the cache
        if cache is not None:
            return self._cached(tokens, cache, positions, layout.visible if layout else None)
        if layout is not None and layout.documents is not None:
            return self._by_document(tokens, layout.documents)
        if positions is None:
            return self._run(tokens)
        if self._short_length is not None and not is_plan() and bool((positions[:, 1:] == 0).any()):
            # padding, whose positions start again, must not make a short text a long one
            texts = ((positions[:, 1:] == 0).cumsum(1) == 0).sum(1) + 1
            return self._by_document(tokens, tuple((n, tokens.shape[1] - n) for n in texts.tolist()))
        # without a mask transformers reads a jump in the positions as the start of another document
        return self._run(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens))

    def _run(self, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The decoder on rows of tokens, with those of the inputs that this architecture knows."""
        inputs = {"use_cache": False} | inputs
        known = {name: inputs[name] for name in inputs.keys() & self._inputs}
        with _fixed_rotations(self._decoder) if is_plan() else contextlib.nullcontext():
            hidden: torch.Tensor = self._decoder(input_ids=tokens, **known).last_hidden_state
        return hidden.to(self.head().weight.dtype)  # mamba's are float32, whatever the weights are

    def _cached(self, tokens: torch.Tensor, cache: BridgeCache, positions: Any, visible: Any) -> torch.Tensor:
        if positions is None:  # bamba would start again from 0
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) + cache.length
        asked = tokens.shape[1]
        if self._short_length is not None:
            tokens, positions = self._read_again(tokens, positions, cache, self._short_length)
        recurrent = any(hasattr(layer, "recurrent_states") for layer in cache.past.layers)
        # more than one token at once makes mamba and jamba forget the state they have
        step = 1 if recurrent and cache.length else tokens.shape[1]
        outputs = []
        for new, places in zip(tokens.split(step, 1), positions.split(step, 1), strict=True):
            start, cache.length = cache.length, cache.length + new.shape[1]
            oldest = start if self._cache_name == "cache_params" else 0  # a state space has no old keys
            mask = None if visible is None else visible[:, oldest : cache.length]
            inputs = {"position_ids": places, "attention_mask": mask, self._cache_name: cache.past}
            outputs.append(self._run(new, use_cache=True, **inputs))
        return torch.cat(outputs, 1)[:, -asked:]

    def _read_again(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: BridgeCache, short_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to be read: all of it, from an empty cache, where longrope changes its factors."""
        new = [tokens, positions]
        cache.seen = [torch.cat(pair, 1) for pair in zip(cache.seen, new, strict=True)] if cache.seen else new
        long = positions.amax(1) >= short_length
        if long.any() and not long.all():
            raise ModelError(
                f"longrope cannot decode rows of up to {short_length} tokens beside longer ones",
                hint="generate for one prompt at a time",
            )
        before, cache.long = cache.long, bool(long.all())
        if cache.length and cache.long != before:
            empty = self.new_cache()
            cache.past, cache.length = empty.past, empty.length
            tokens, positions = cache.seen
        return tokens, positions

    def _by_document(self, tokens: torch.Tensor, documents: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        """Each document in a row of its own: right for every architecture, recurrent ones too."""
        lengths = [length for row in documents for length in row if length]
        texts = torch.split(tokens.reshape(-1), lengths)
        places = torch.split(torch.arange(tokens.numel()), lengths)
        # FSDP gathers parameters once a forward, so every rank has to make as many of them: one
        sharded = any(hasattr(parameter, "device_mesh") for parameter in self.parameters())
        sides = _sides(lengths, self._short_length)
        if sharded and len(sides) > 1:
            raise ModelError(
                f"longrope cannot train on texts of up to {self._short_length} tokens beside longer ones "
                "where weights are sharded",
                hint=f"set data.max_length to {self._short_length} at most",
            )
        results, order = [], []
        for group in sides if sharded else self._rows_of(lengths, sides):
            rows = nn.utils.rnn.pad_sequence([texts[document] for document in group], batch_first=True)
            ends = torch.tensor([lengths[document] for document in group])[:, None]
            real = (torch.arange(rows.shape[1]) < ends).flatten().nonzero()[:, 0].to(rows.device)
            results.append(self._run(rows).flatten(0, 1).index_select(0, real))
            order += [places[document] for document in group]
        back = torch.cat(order).argsort().to(tokens.device)
        return torch.cat(results).index_select(0, back).view(*tokens.shape, -1)

    def _rows_of(self, lengths: Sequence[int], sides: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Documents that run together, each in a row of its own: several, or without the fast path one."""
        for side in sides:
            yield from _groups(lengths, side) if self.paths.attention else ([each] for each in side)

    def attentions(self, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
        """The attention weights [B, heads, T, T] on tokens [B, T] of those layers that have any."""
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")  # the others never have the weights
            output = self._decoder(input_ids=tokens, use_cache=False, output_attentions=True)
        finally:
            self.model.set_attn_implementation(before)
        found = getattr(output, "attentions", None) or ()
        weights = {layer: each for layer, each in enumerate(found) if each is not None}
        if not weights:
            raise ModelError(f"{type(self.model).__name__} gives no attention weights")
        return weights

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of its embedding; a factor that its forward puts on them is not in them."""
        rows: torch.Tensor = self.model.get_input_embeddings()(tokens)
        return rows

    def head(self) -> Head:
        """The output projection, with what the config says is done to the logits (checked at load)."""
        output, config = self.model.get_output_embeddings(), self.model.config
        times = field_of(config, "logit_scale", "lm_head_multiplier", default=1.0)
        softcap = field_of(config, "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        scale = times / field_of(config, "logits_scaling", default=1.0)
        return Head(output.weight, getattr(output, "bias", None), scale, softcap, self.paths)

    def new_cache(self, capacity: int = 0) -> BridgeCache:
        """An empty cache of the kinds this architecture's layers need."""
        from transformers import DynamicCache

        if self.cache_problem:
            raise ModelError(f"whet cannot generate with {type(self.model).__name__}: {self.cache_problem}")
        return BridgeCache(DynamicCache(config=self.model.config))

    @property
    def grad_checkpoint(self) -> bool:
        """Whether activations are recomputed in the backward pass (of a model in training mode)."""
        return self._recompute

    @grad_checkpoint.setter
    def grad_checkpoint(self, wanted: bool) -> None:
        if wanted and not self.model.supports_gradient_checkpointing:
            raise ModelError(f"transformers cannot checkpoint the gradients of {type(self.model).__name__}")
        self._recompute = wanted
        self._set_recomputing(wanted)

    def _set_recomputing(self, on: bool) -> None:
        if on and not self._recomputing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.disable_input_require_grads()  # for reentrant checkpointing; here it is wasted work
        elif self._recomputing and not on:
            self.model.gradient_checkpointing_disable()
        self._recomputing = on

    def blocks(self) -> Iterable[nn.Module]:
        """The layers, in order."""
        lists = [module for module in self._decoder.modules() if isinstance(module, nn.ModuleList)]
        # by parameters, not by length: a layer may hold more experts than there are layers
        return max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters()))

    def hf_name(self, name: str) -> str:
        """The name in the transformers class."""
        return name.removeprefix("model.")

    def hf_config(self) -> dict[str, Any]:
        """The config.json that describes this model."""
        config = json.loads(self._stored_config.to_json_string(use_diff=False))
        older = _older_keys(config)
        if older and not _has_same_rope(self._stored_config, {**config, **older}):
            older = {}
        return {**config, **older, "architectures": [type(self.model).__name__]}

    def state_in_files(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters under the names that the hub's files have: transformers 5 fuses and renames some."""
        from transformers.core_model_loading import revert_weight_conversion

        ours = super().state_in_files(state)
        theirs: dict[str, torch.Tensor] = revert_weight_conversion(self.model, ours)
        # in the order they had: of two tied names the first is written, and that must be the embedding
        return {name: theirs[name] for name in ours if name in theirs} | theirs

    @property
    def vocab_size(self) -> int:
        """Number of token ids the embedding knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int:
        """The longest sequence the model was made for, as far as its config says."""
        return int(field_of(self.model.config, "max_position_embeddings", "max_seq_len", default=2**31 - 1))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the architecture."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The architecture as plain JSON: the config, at every level less where it came from."""
        text = self._stored_config.to_json_string(use_diff=True)
        return dict(json.loads(text, object_hook=lambda d: {k: d[k] for k in d if k not in _ORIGIN}))


def _older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 4 calls the rotations of a config that transformers 5 has written."""
    rope, kind = config.get("rope_parameters"), config.get("model_type")
    if not isinstance(rope, dict):
        return {}
    if kind in ("gemma3_text", "gemma3n_text"):
        return gemma3.older_rope_keys(rope)
    if kind == "olmo3":  # only its layers without a window are scaled, in either version
        return older_rope_keys(rope["full_attention"])
    if any(isinstance(value, dict) for value in rope.values()):  # of kinds that transformers 4 does not have
        return {}
    older = older_rope_keys(rope)
    if kind in ("gpt_neox", "gpt_neox_japanese"):
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        return {names.get(key, key): value for key, value in older.items()}
    if kind == "phi3" and older.get("partial_rotary_factor") == 1.0:  # the default of transformers 4
        del older["partial_rotary_factor"]
    if kind in ("phi3", "phi4_multimodal") and rope.get("rope_type") == "longrope":
        known = {key: rope.get(key) for key in ("short_factor", "long_factor")}
        older["rope_scaling"] = {"type": "longrope", **known}  # their classes refuse any other key
    return older


def _has_same_rope(config: Any, written: dict[str, Any]) -> bool:
    """Whether transformers 5, which prefers the keys of transformers 4, reads the rotations of `config`."""
    try:
        again = type(config).from_dict(copy.deepcopy(written))
    except Exception:  # each class has checks and errors of its own
        return False
    # "type" is an older name of "rope_type"
    before, after = ({**(each.rope_parameters or {}), "type": None} for each in (config, again))
    return before == after


def _switch_dropout_off(model: Any) -> None:
    """Set every rate to zero, wherever classes read theirs: a layer, a number in a module, the config."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


@contextlib.contextmanager
def _fixed_rotations(decoder: nn.Module) -> Iterator[None]:
    """Rotations that do not ask how long the texts are, where no tensor has numbers; shapes are the same."""
    before: dict[Any, Any] = {m: m.rope_type for m in decoder.modules() if hasattr(m, "rope_type")}
    for module, kind in before.items():
        module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
    try:
        yield
    finally:
        for module, kind in before.items():
            module.rope_type = kind


def _longrope_length(config: Any) -> int | None:
    """The length up to which longrope takes its short factors, or None where there is no longrope."""
    given = field_of(config, "rope_parameters", default={})
    ropes = [rope for rope in (given, *given.values()) if isinstance(rope, dict)]  # one, or one for each kind
    found = [rope for rope in ropes if rope.get("rope_type") == "longrope"]
    return min((int(rope["original_max_position_embeddings"]) for rope in found), default=None)


def _sides(lengths: Sequence[int], short_length: int | None) -> list[list[int]]:
    """Documents that may run together: all of them, or the short ones and the long ones."""
    short = [n for n, length in enumerate(lengths) if short_length is None or length <= short_length]
    long = [n for n, length in enumerate(lengths) if short_length is not None and length > short_length]
    return [side for side in (short, long) if side]


def _groups(lengths: Sequence[int], documents: Sequence[int]) -> Iterator[Sequence[int]]:
    """Documents to run together: padding is never more than the text, whatever their lengths."""
    group: list[int] = []
    real = 0
    for document in sorted(documents, key=lengths.__getitem__, reverse=True):
        real += lengths[document]
        if group and lengths[group[0]] * (len(group) + 1) > 2 * real:
            yield group
            group, real = [], lengths[document]
        group.append(document)
    yield group


def field_of(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the config of the language part has and that is not None."""
    config = config.get_text_config(decoder=True)
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)
