"""Open a model by name or path, and write one back."""

import logging
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch

from whet.boundary import panics_hidden, wrong_input
from whet.errors import ModelError
from whet.hardware import choose_device, choose_precision
from whet.models import families
from whet.models.bridge import load_bridge
from whet.models.checks import check_links
from whet.models.config_file import read_config, read_spec
from whet.models.decoder import Decoder
from whet.models.hub import resolve
from whet.models.language_model import LanguageModel
from whet.models.weights import (
    MAX_SHARD_BYTES,
    TOKENIZER_FILES,
    TensorFiles,
    load_parameters,
    read_json,
    write_model_directory,
)

log = logging.getLogger("whet")

_TOKENIZER_HINT = "tokenizer.json, tokenizer_config.json or config.json is damaged: copy them again"


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    besides: Container[str] = (),
) -> LanguageModel:
    """A model in evaluation mode: natively where whet has the family, else on transformers' class.

    Its files may hold the tensors named in `besides`, which are not the model's.
    """
    directory = resolve(str(name_or_path))
    where = choose_device(str(device or "auto"))
    dtype = dtype or choose_precision("auto", where).frozen
    config = read_config(directory)
    choice = families.choose(config)
    if choice.family is None:
        log.info("model: through transformers (%s)", choice.reason)
        try:
            model: LanguageModel = load_bridge(directory, dtype=dtype, device=where, besides=besides)
        except ModelError as error:  # what whet does not know is often what transformers stumbles over
            raise ModelError(f"{error.message} ({choice.reason})", hint=error.hint) from error
    else:
        log.info("model: %s", choice.reason)
        model = _load_native(directory, config, dtype=dtype, device=where, besides=besides)
    model.source = directory
    path = Path(name_or_path)
    model.name = str(path.absolute()) if path.exists() else str(name_or_path)
    return model.eval()


def _load_native(
    directory: Path,
    config: dict[str, Any],  # Any: JSON values
    *,
    dtype: torch.dtype,
    device: torch.device,
    besides: Container[str],
) -> Decoder:
    family = families.FAMILIES[config["model_type"]]
    spec = read_spec(family, config, directory)
    files = TensorFiles(directory)
    if len(spec.blocks) > (stored := sum(1 for _ in files)):
        raise ModelError(
            f"{directory}: config.json has {len(spec.blocks)} layers, and there are {stored} tensors"
        )
    experts = max((each.experts for each in spec.mixtures), default=0)
    with wrong_input(f"{directory / 'config.json'} cannot be understood"), torch.device("meta"):
        model = Decoder(spec, source_config=config)
    names = {name: family.hf_name(name) for name in model.state_dict()}
    # whole tensors of experts are what older versions of whet wrote
    apart = [name for name in names if names[name] not in files] if experts <= stored else []
    parts = {name: each for name in apart if (each := families.stored_parts(spec, name)) is not None}
    prefix = getattr(family, "PREFIX", "")
    if prefix and not any(name.startswith(prefix) for name in files):
        # old checkpoints of the bare model, without its head, leave the prefix out
        names = {name: theirs.removeprefix(prefix) for name, theirs in names.items()}
    ignored = {name for name in files if families.is_buffer(family, name) or name in besides}
    if spec.tied_head and (head := family.hf_name("lm_head.weight")) in files:
        embedding = names["embed_tokens.weight"]
        pair = dict(files.read({head, embedding}))
        if embedding in pair and not torch.equal(pair[head], pair[embedding]):
            raise ModelError(
                f"{directory}: config.json says the head is tied to the embedding, but {head} differs from it"
            )
        ignored.add(head)
    transposed = {name for name in names if families.is_transposed(family, name)}
    load_parameters(
        model,
        files,
        names=names,
        transposed=transposed,
        ignored=ignored,
        dtype=dtype,
        device=device,
        parts=parts,
    )
    return model


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds tokenizer files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(name_or_path: str | Path) -> Any:  # Any: a transformers tokenizer
    """The tokenizer of a model or adapter directory, by transformers, never with remote code."""
    from transformers import AutoTokenizer

    path = Path(name_or_path)
    directory = path if has_tokenizer(path) else resolve(str(name_or_path))
    check_links(directory)
    with panics_hidden(), wrong_input(f"the tokenizer in {directory} cannot be read", hint=_TOKENIZER_HINT):
        found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        found("a")  # some settings are first looked at here
    for way in ("is_local", "local_files_only"):  # how it was read says nothing of what it is
        found.init_kwargs.pop(way, None)
    return found


def end_tokens(model: LanguageModel) -> set[int]:
    """Ids that end an answer, as the model's two configs list them."""
    found: list[Any] = []  # Any: JSON values
    configs = [model.hf_config()]
    if model.source is not None and (path := model.source / "generation_config.json").is_file():
        configs.append(read_json(path))
    for config in configs:
        listed = config.get("eos_token_id")
        found += listed if isinstance(listed, list) else [listed]
    return {token for token in found if isinstance(token, int)}


def save_model(
    model: LanguageModel,
    tokenizer: Any,  # Any: a transformers tokenizer
    directory: str | Path,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    more: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,  # Any: JSON values
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face directory that transformers loads with equal logits.

    `more` tensors, other keys of the `config`, and files that are written `beside` belong to what is more
    than a language model.
    """
    tensors = model.state_in_files(model.state_dict() if state is None else state) | dict(more or {})
    # two names on one storage are one tensor: the config says that they are tied
    seen: dict[tuple[int, torch.Size], str] = {}
    unique = {
        name: tensor
        for name, tensor in tensors.items()
        if seen.setdefault((tensor.data_ptr(), tensor.shape), name) == name
    }
    dtype = str(next(iter(unique.values())).dtype).removeprefix("torch.")
    write_model_directory(
        Path(directory),
        unique,
        config={**model.hf_config(), "dtype": dtype, **(config or {})},
        source=model.source,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        beside=beside,
    )
