"""Read and write safetensors directories, with strict checks of every tensor name and shape."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from whet.error_boundary import invalid_input_errors
from whet.errors import ModelError
from whet.model_io.config_json import QUANTIZATION, write_generation_config
from whet.model_io.file_checks import check_links, check_weight
from whet.model_io.tokenizer_files import save_tokenizer
from whet.models.families.moe import split_parts
from whet.storage import (
    SAFETENSORS_DTYPES,
    create_directory_atomically,
    read_json,
    remove_temporary_files,
    write_json,
    write_safetensors,
)

INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
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
    """The tensors of a model directory by name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Path] = {}
        check_links(directory)
        for file in self._shards():
            with _open(file) as shard:
                for name in shard.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                    if name in self._files:
                        raise ModelError(f"tensor {name} is in both {self._files[name].name} and {file.name}")
                    self._files[name] = file

    def _shards(self) -> list[Path]:
        index = self.directory / INDEX
        if not index.is_file():
            single = self.directory / WEIGHTS_FILE
            if not single.is_file():
                raise ModelError(
                    f"{self.directory} contains neither {WEIGHTS_FILE} nor {INDEX}",
                    hint="whet reads safetensors and GGUF; pickled weights (.bin, .pt) are never loaded",
                )
            return [single]
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no weight_map from tensors to files")
        names, existing = sorted(set(weight_map.values())), {path.name for path in self.directory.iterdir()}
        for name in names:
            if name not in existing or not (self.directory / name).is_file():
                raise ModelError(f"{index} lists {name[:200]!r}, which is not a file in this directory")
        return [self.directory / name for name in names]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its values."""
        with _open(self._files[name]) as shard:
            return tuple(shard.get_slice(name).get_shape())

    def meta_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the meta device with the stored shape and dtype."""
        with _open(self._files[name]) as shard:
            header = shard.get_slice(name)
            dtype = _DTYPES.get(header.get_dtype())
            if dtype is None:
                raise ModelError(
                    f"{self._files[name]}: tensor {name} has the unsupported dtype {header.get_dtype()}"
                )
            return torch.empty(header.get_shape(), dtype=dtype, device="meta")

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        with _open(self._files[name]) as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
            return tensor

    def read(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the given names, each from a separate memory mapping.

        Pages stay in memory as long as their mapping, so one mapping for the entire file would keep all of
        it in memory next to the converted copy.
        """
        for name, file in self._files.items():
            if name in names:
                with _open(file) as shard:
                    yield name, shard.get_tensor(name)


def open_tensor_files(
    directory: Path, config: Mapping[str, Any]
) -> TensorFiles:  # Any: the values of its config.json
    """Open the tensors of a model directory by their names in the model, dequantized if they are quantized.

    Raises:
        ModelError: If whet cannot dequantize them.
    """
    if not config.get(QUANTIZATION):
        return TensorFiles(directory)
    from whet.model_io.formats.quantized_files import open_quantized

    return open_quantized(directory, config[QUANTIZATION])


def _open(path: Path) -> Any:  # Any: safetensors ships no types
    with invalid_input_errors(f"{path} is not a readable safetensors file"):
        return safe_open(str(path), framework="pt", device="cpu")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file, and raise ModelError if one is not a valid weight."""
    with invalid_input_errors(f"{path} cannot be read"):
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
    """Load the tensors of a directory into a model built on the meta device.

    Args:
        model: The model, with parameters and buffers on the meta device.
        files: The tensors.
        names: For each parameter and buffer, the name of its tensor.
        transposed: Parameters whose tensors are stored transposed.
        ignored: Tensors that do not belong to the model.
        dtype: The dtype of the parameters. Buffers keep the dtype of the file.
        device: The device of the parameters and buffers.
        parts: Parameters that are stored as several tensors, with the names of these for `split_parts`.

    Raises:
        ModelError: If a tensor is missing, has a wrong shape, is neither used nor ignored, or has invalid
            values.
    """
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts = parts or {}
    shapes = {
        names[name]: tuple(p.shape[::-1] if name in transposed else p.shape)
        for name, p in targets.items()
        if name not in parts
    }
    target_of = {names[name]: name for name in targets if name not in parts}  # by tensor name
    for name, part_names in parts.items():
        pieces = split_parts(targets[name], part_names)
        shapes |= {tensor_name: tuple(piece.shape) for tensor_name, piece in pieces.items()}
        target_of |= dict.fromkeys(pieces, name)
    missing = [name for name in target_of if name not in files]
    unexpected = [name for name in files if name not in target_of and name not in ignored]
    wrong_shape = [
        f"{name} is {list(files.shape(name))}, expected {list(shapes[name])}"
        for name in target_of
        if name in files and files.shape(name) != shapes[name]
    ]
    labeled = (("missing:", missing), ("unexpected:", unexpected), ("wrong shape:", wrong_shape))
    problems = [f"{label} {_first_few(tensor_names)}" for label, tensor_names in labeled if tensor_names]
    if problems:
        raise ModelError(
            f"the tensors in {files.directory} do not match its config.json: " + "; ".join(problems)
        )
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in files.read(set(target_of)):
        target = target_of[name]
        if target not in parts:
            oriented = tensor.T.contiguous() if target in transposed else tensor
            # buffers are biases of experts, small and close to each other, so they are never rounded
            target_dtype = dtype if isinstance(targets[target], torch.nn.Parameter) else tensor.dtype
            used = oriented.to(device=device, dtype=target_dtype)
            check_weight(tensor, name, files.file_of(name), used=used)
            _set_tensor(model, target, used)
            continue
        if target not in fused:
            fused[target] = torch.empty(targets[target].shape, dtype=dtype, device=device)
            _set_tensor(model, target, fused[target])
        used = split_parts(fused[target], parts[target])[name].copy_(tensor)
        check_weight(tensor, name, files.file_of(name), used=used)


def _set_tensor(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
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
    compute_tensor: Callable[[str], torch.Tensor] | None = None,
    write_extra_files: Callable[[Path], None] | None = None,
    verify: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face model directory: config, tokenizer, and weights in one file or in shards.

    With `compute_tensor`, `tensors` only has shapes and dtypes, and each tensor is computed when it is
    written. `write_extra_files` is called with the directory before the weights are written. `verify` is
    called when it is complete, under its temporary name; if it raises an error, the directory is removed.
    """
    remove_temporary_files(directory.parent, only_name=directory.name)
    with create_directory_atomically(directory) as staging:
        if tokenizer is not None:
            save_tokenizer(tokenizer, staging)
        write_generation_config(staging, config, source=source, tokenizer=tokenizer)
        # transformers before 4.56 and vLLM read `dtype` under its old name
        legacy = {"torch_dtype": config["dtype"]} if "dtype" in config else {}
        write_json(staging / "config.json", {**config, **legacy})
        if write_extra_files is not None:
            write_extra_files(staging)
        _write_weights(staging, tensors, max_shard_bytes, compute_tensor)
        if verify is not None:
            verify(staging)


def _write_weights(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    max_shard_bytes: int,
    compute_tensor: Callable[[str], torch.Tensor] | None,
) -> None:
    shards = _split_into_shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / WEIGHTS_FILE, shards[0], create_tensor=compute_tensor)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / name, shard, create_tensor=compute_tensor)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split_into_shards(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and shard_bytes + size > max_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += size
    return shards
