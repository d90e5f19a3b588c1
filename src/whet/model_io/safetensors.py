"""Weights on disk: safetensors directories in and out, strict about every name and shape."""

import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from whet.error_boundary import wrong_input
from whet.errors import ModelError
from whet.model_io.file_checks import check_links, check_weight
from whet.model_io.tokenizer_files import save_tokenizer
from whet.models.families.moe import split_parts
from whet.storage import (
    SAFETENSORS_DTYPES,
    clear_leftovers,
    new_directory,
    read_json,
    write_json,
    write_safetensors,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9
_DTYPES = {name: getattr(torch, dtype.removeprefix("torch.")) for dtype, name in SAFETENSORS_DTYPES.items()}

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


class TensorFiles:
    """The tensors of a model directory, by name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Path] = {}
        check_links(directory)
        for file in self._shards():
            with _open(file) as shard:
                for name in shard.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                    if name in self._files:
                        raise ModelError(f"tensor {name} is in {self._files[name].name} and in {file.name}")
                    self._files[name] = file

    def _shards(self) -> list[Path]:
        index = self.directory / INDEX
        if not index.is_file():
            single = self.directory / SINGLE
            if not single.is_file():
                raise ModelError(
                    f"{self.directory} holds neither {SINGLE} nor {INDEX}",
                    hint="whet reads safetensors and GGUF; pickled weights (.bin, .pt) are never opened",
                )
            return [single]
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ModelError(f"{index} has no weight_map from tensors to files")
        names, there = sorted(set(listed.values())), {path.name for path in self.directory.iterdir()}
        for name in names:
            if name not in there or not (self.directory / name).is_file():
                raise ModelError(f"{index} names {name[:200]!r}, which is not a file of this directory")
        return [self.directory / name for name in names]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        with _open(self._files[name]) as shard:
            return tuple(shard.get_slice(name).get_shape())

    def described(self, name: str) -> torch.Tensor:
        """A tensor's shape and dtype, as a tensor on the meta device."""
        with _open(self._files[name]) as shard:
            found = shard.get_slice(name)
            dtype = _DTYPES.get(found.get_dtype())
            if dtype is None:
                raise ModelError(f"{self._files[name]}: tensor {name} is of the type {found.get_dtype()}")
            return torch.empty(found.get_shape(), dtype=dtype, device="meta")

    def get(self, name: str) -> torch.Tensor:
        """One tensor."""
        with _open(self._files[name]) as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
            return tensor

    def read(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, one at a time, each from a mapping of its own.

        Files are mapped, not read: pages stay in memory as long as their mapping, so one for a whole file
        would keep all of it beside the converted copy.
        """
        for name, file in self._files.items():
            if name in names:
                with _open(file) as shard:
                    yield name, shard.get_tensor(name)


def _open(path: Path) -> Any:  # Any: safetensors ships no types
    with wrong_input(f"{path} is not a readable safetensors file"):
        return safe_open(str(path), framework="pt", device="cpu")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file, all of which must be usable as weights."""
    with wrong_input(f"{path} cannot be read"):
        tensors: dict[str, torch.Tensor] = load_file(path)
    for name, tensor in tensors.items():
        check_weight(tensor, name, path)
    return tensors


def load_parameters(
    model: torch.nn.Module,
    files: TensorFiles,
    *,
    names: Mapping[str, str],
    transposed: Container[str],
    ignored: Container[str],
    dtype: torch.dtype,
    device: torch.device,
    parts: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> None:
    """Fill a model built on the meta device; `names` maps its parameters and buffers to their tensors.

    Every one must be there in its shape (`transposed` ones turned), and every tensor must be wanted or in
    `ignored`. Those in `parts` are read from several tensors, which `split_parts` names.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    cut = parts or {}
    shapes = {
        names[name]: tuple(p.shape[::-1] if name in transposed else p.shape)
        for name, p in own.items()
        if name not in cut
    }
    wanted = {names[name]: name for name in own if name not in cut}
    for name, each in cut.items():
        pieces = split_parts(own[name], each)
        shapes |= {theirs: tuple(piece.shape) for theirs, piece in pieces.items()}
        wanted |= dict.fromkeys(pieces, name)
    missing = [name for name in wanted if name not in files]
    unexpected = [name for name in files if name not in wanted and name not in ignored]
    misshapen = [
        f"{name} is {list(files.shape(name))}, expected {list(shapes[name])}"
        for name in wanted
        if name in files and files.shape(name) != shapes[name]
    ]
    problems = [
        f"{label} {_first_few(found)}"
        for label, found in (("missing:", missing), ("unexpected:", unexpected), ("wrong shape:", misshapen))
        if found
    ]
    if problems:
        raise ModelError(
            f"the tensors in {files.directory} do not fit its config.json: " + "; ".join(problems)
        )
    filled: dict[str, torch.Tensor] = {}
    for name, tensor in files.read(set(wanted)):
        target = wanted[name]
        if target not in cut:
            turned = tensor.T.contiguous() if target in transposed else tensor
            # buffers are biases of experts, small and close to each other: they stay as exact as they are
            kept = dtype if isinstance(own[target], torch.nn.Parameter) else tensor.dtype
            used = turned.to(device=device, dtype=kept)
            check_weight(tensor, name, files.file_of(name), used=used)
            _put(model, target, used)
            continue
        if target not in filled:
            filled[target] = torch.empty(own[target].shape, dtype=dtype, device=device)
            _put(model, target, filled[target])
        used = split_parts(filled[target], cut[target])[name].copy_(tensor)
        check_weight(tensor, name, files.file_of(name), used=used)


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, leaf, tensor if leaf in module._buffers else torch.nn.Parameter(tensor))


def _first_few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def write_model_directory(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    config: Mapping[str, Any],  # Any: JSON values
    source: Path | None = None,
    tokenizer: Any = None,  # Any: a transformers tokenizer
    max_shard_bytes: int = MAX_SHARD_BYTES,
    make: Callable[[str], torch.Tensor] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face model directory: config, tokenizer, weights in one file or in shards.

    `make` is as in `write_safetensors`: tensors that are made when their turn comes. `beside` adds files.
    """
    clear_leftovers(directory.parent, of=directory.name)
    with new_directory(directory) as staging:
        if tokenizer is not None:
            save_tokenizer(tokenizer, staging)
        if source is not None and (source / "generation_config.json").is_file():
            shutil.copy(source / "generation_config.json", staging)
        # transformers before 4.56 and vLLM know `dtype` by its old name
        older = {"torch_dtype": config["dtype"]} if "dtype" in config else {}
        write_json(staging / "config.json", {**config, **older})
        if beside is not None:
            beside(staging)
        shards = _shards(tensors, max_shard_bytes)
        if len(shards) == 1:
            write_safetensors(staging / SINGLE, shards[0], make=make)
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_safetensors(staging / name, shard, make=make)
            weight_map |= dict.fromkeys(shard, name)
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        write_json(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards
