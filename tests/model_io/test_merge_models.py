"""Merging models and adapters on disk: correct values, little memory, clear errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import whet
from tiny import write_tiny_model
from tiny_adapters import adapter_tensors
from whet.adapters.adapter import named_adapters
from whet.adapters.nf4 import NF4Linear
from whet.errors import CheckpointError, ConfigError, ModelError
from whet.model_io.load import load_base, load_quantized
from whet.model_io.merging import merge_methods
from whet.model_io.merging.merge_models import merge_models
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec


def write_variant(source, target, *, seed, dtype=torch.float32):
    """Copy a model directory with different weights."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor + 0.05 * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    (target / "model.safetensors").unlink()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def models(tiny_directory, tmp_path_factory):
    """Two variants of the tiny model."""
    directory = tmp_path_factory.mktemp("variants")
    return [write_variant(tiny_directory, directory / f"v{seed}", seed=seed) for seed in (1, 2)]


@pytest.fixture
def adapters(tiny_directory, tmp_path):
    """Two adapters of the tiny model."""
    return [write_adapter(tiny_directory, tmp_path / f"adapter{seed}", seed=seed) for seed in (1, 2)]


def write_adapter(base, directory, *, seed):
    model, _ = load_base(base, dtype=torch.float32, device="cpu")
    model.name = str(base)
    return write_lora(model, directory, seed=seed, size=0.2)


def write_lora(model, directory, *, seed, size):
    whet.attach_lora(model, rank=3, targets=["q_proj", "down_proj"])
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter_tensors(model).values():
        tensor.data = size * torch.randn(tensor.shape, generator=generator)
    whet.save_adapter(model, directory)
    return directory


def weights_of(directory):
    return load_file(directory / "model.safetensors")


EXPECTED = {
    "average": lambda base, a, b, name: merge_methods.average([a, b], [0.5, 0.5]),
    "slerp": lambda base, a, b, name: merge_methods.slerp(a, b, 0.5),
    "task": lambda base, a, b, name: base + (a - base) + (b - base),
    "ties": lambda base, a, b, name: merge_methods.ties(base, [a, b], [1, 1], density=0.2),
    "dare": lambda base, a, b, name: merge_methods.dare(
        base,
        [a, b],
        [1, 1],
        density=0.5,
        generators=[merge_methods.tensor_generator(0, i, name) for i in (0, 1)],
    ),
    "dare-ties": lambda base, a, b, name: merge_methods.dare_ties(
        base,
        [a, b],
        [1, 1],
        density=0.5,
        generators=[merge_methods.tensor_generator(0, i, name) for i in (0, 1)],
    ),
}


@pytest.mark.parametrize("method", EXPECTED)
def test_every_tensor_follows_the_method_and_transformers_loads_it(tiny_directory, models, tmp_path, method):
    base = None if method in ("average", "slerp") else tiny_directory
    merge_models(models, tmp_path / "out", method=method, base=base)
    merged = weights_of(tmp_path / "out")
    base_weights, first, second = (weights_of(path) for path in (tiny_directory, *models))
    assert merged.keys() == base_weights.keys()
    for name, tensor in merged.items():
        expected = EXPECTED[method](base_weights[name], first[name], second[name], name)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_weights_density_and_seed_are_used(tiny_directory, models, tmp_path):
    merge_models(models, tmp_path / "average", method="average", weights=[0.25, 0.75])
    name = "model.embed_tokens.weight"
    first, second = (weights_of(path)[name] for path in models)
    torch.testing.assert_close(weights_of(tmp_path / "average")[name], 0.25 * first + 0.75 * second)
    results = []
    for index, settings in enumerate([{}, {}, {"seed": 5}, {"density": 0.9}]):
        merge_models(models, tmp_path / str(index), method="dare", base=tiny_directory, **settings)
        results.append(weights_of(tmp_path / str(index))[name])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])


def test_result_has_the_dtype_of_the_base(tiny_directory, models, tmp_path):
    base = write_variant(tiny_directory, tmp_path / "bf16", seed=3, dtype=torch.bfloat16)
    merge_models(models, tmp_path / "out", method="task", base=base, weights=[0.5, 0.5])
    for name, tensor in weights_of(tmp_path / "out").items():
        first, second = (weights_of(path)[name] for path in models)
        assert torch.equal(tensor, merge_methods.average([first, second], [0.5, 0.5]).bfloat16()) or (
            (tensor.float() - (first + second) / 2).abs().max() < 0.01
        )
        assert tensor.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_one_base_are_merged_as_updates(tiny_directory, tmp_path, dtype):
    base = write_variant(tiny_directory, tmp_path / "base", seed=0, dtype=dtype)
    adapters = [write_adapter(base, tmp_path / f"a{seed}", seed=seed) for seed in (1, 2)]
    merge_models(adapters, tmp_path / "out", method="task", weights=[0.7, -0.3])
    base_weights, merged = weights_of(base), weights_of(tmp_path / "out")
    updates = [adapter_updates(base, adapter) for adapter in adapters]
    assert len(updates[0]) == 4
    for name, tensor in base_weights.items():
        expected = tensor.double()
        if name in updates[0]:
            expected = expected + 0.7 * updates[0][name] - 0.3 * updates[1][name]
            assert not torch.equal(merged[name], tensor)
        torch.testing.assert_close(merged[name], expected.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)  # fmt: skip
        if (
            name in updates[0] and dtype == torch.bfloat16
        ):  # rounded once, so off by at most a unit in the last index
            exact = expected.float().bfloat16()
            assert (merged[name] == exact).float().mean() > 0.99
    assert whet.load(tmp_path / "out")[0] is not None


def write_quantized_adapter(base, directory, *, seed):
    model = load_quantized(base, dtype=torch.bfloat16, device=torch.device("cpu"))
    return write_lora(model, directory, seed=seed, size=0.02)


def dequantized_tensors(base):
    """Return the dequantized tensors of a 4-bit base, by their names in its files."""
    model = load_quantized(base, dtype=torch.float32, device=torch.device("cpu"))
    plain = dict(model.named_parameters())
    plain |= {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, NF4Linear)}
    return {model.hf_name(name): tensor for name, tensor in plain.items()}


@pytest.mark.parametrize(
    ("method", "weights"), [("task", [1, 1]), ("task", [0.7, -0.3]), ("average", [0.5, 0.5])]
)
def test_adapters_of_a_4_bit_base_are_updates_of_the_dequantized_base(tmp_path, method, weights):
    """Otherwise the quantization error would be added once per adapter."""
    write_tiny_model(tmp_path / "base", hidden_size=64, intermediate_size=128)
    adapters = [
        write_quantized_adapter(tmp_path / "base", tmp_path / f"a{seed}", seed=seed) for seed in (1, 2)
    ]
    merge_models(adapters, tmp_path / "out", method=method, weights=weights)
    base_weights, merged = dequantized_tensors(tmp_path / "base"), weights_of(tmp_path / "out")
    updates = [adapter_updates(tmp_path / "base", adapter) for adapter in adapters]
    assert len(updates[0]) == 4
    for name, tensor in merged.items():
        expected = base_weights[name].double()
        if name in updates[0]:
            expected = expected + weights[0] * updates[0][name] + weights[1] * updates[1][name]
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)


def test_quantized_and_unquantized_adapters_have_no_common_base(tmp_path):
    write_tiny_model(tmp_path / "base", hidden_size=64, intermediate_size=128)
    packed = write_quantized_adapter(tmp_path / "base", tmp_path / "packed", seed=1)
    plain = write_adapter(tmp_path / "base", tmp_path / "plain", seed=2)
    with pytest.raises(ModelError, match="packed was trained on a 4-bit base, but .*plain was not"):
        merge_models([plain, packed], tmp_path / "out", method="task")


@pytest.mark.parametrize("method", ["average", "task"])
def test_unadapted_tensors_are_not_rounded(tiny_directory, tmp_path, method):
    base = write_variant(tiny_directory, tmp_path / "base", seed=0)
    tensors = {n: t if "norm" in n else t.bfloat16() for n, t in weights_of(base).items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapters = [write_adapter(base, tmp_path / f"a{seed}", seed=seed) for seed in (1, 2)]
    merge_models(adapters, tmp_path / "out", method=method)
    for name, tensor in weights_of(tmp_path / "out").items():
        assert tensor.dtype == tensors[name].dtype
        if not name.endswith(("q_proj.weight", "down_proj.weight")):
            assert torch.equal(tensor, tensors[name])


def test_adapters_of_experts_and_routers_are_merged_per_expert(tmp_path, tiny_directory):
    base = new_decoder(preset_spec("nano-moe", layers=1, vocab_size=260), seed=0)
    whet.save(base, AutoTokenizer.from_pretrained(tiny_directory), tmp_path / "base")
    states = []
    for seed in (1, 2):
        model, _ = whet.load(tmp_path / "base", dtype=torch.float32, device="cpu")
        whet.attach_lora(model, rank=2, targets=["experts", "routers"])
        generator = torch.Generator().manual_seed(seed)
        for tensor in adapter_tensors(model).values():
            tensor.data = 0.2 * torch.randn(tensor.shape, generator=generator)
        whet.save_adapter(model, tmp_path / f"a{seed}")
        states.append(whet.merge(model).state_dict())
    merge_models([tmp_path / "a1", tmp_path / "a2"], tmp_path / "out", method="average")
    merged, _ = whet.load(tmp_path / "out", dtype=torch.float32, device="cpu")
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, (states[0][name] + states[1][name]) / 2, rtol=1e-5, atol=1e-6)
    assert not torch.equal(merged.layers[0].mlp.experts.down_proj, base.layers[0].mlp.experts.down_proj)
    assert not torch.equal(merged.layers[0].mlp.gate.weight, base.layers[0].mlp.gate.weight)


def adapter_updates(base, adapter):
    model, _ = whet.load(adapter, dtype=torch.float32, device="cpu")
    return {
        model.hf_name(f"{name}.weight"): (
            module.lora_B.double() @ module.lora_A.double() * module.scale
        ).detach()
        for name, module in named_adapters(model)
    }


def test_run_adapter_and_model_can_be_merged(tiny_directory, models, adapters, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copytree(adapters[0], tmp_path / "run" / "final")
    merge_models([tmp_path / "run", models[0]], tmp_path / "out", method="average")
    model, _ = whet.load(tmp_path / "run", dtype=torch.float32, device="cpu")
    name = "model.layers.0.mlp.down_proj.weight"
    merged = dict(named_adapters(model))["layers.0.mlp.down_proj"].merged_weight()
    expected = (merged + weights_of(models[0])[name]) / 2
    torch.testing.assert_close(weights_of(tmp_path / "out")[name], expected.detach())


def test_adapter_on_an_adapter_is_merged_with_both_updates(tiny_directory, adapters, tmp_path):
    second = write_adapter(adapters[0], tmp_path / "second", seed=9)
    merge_models([second], tmp_path / "out", method="task")
    model, _ = whet.load(second, dtype=torch.float32, device="cpu")
    tokens = torch.arange(24).reshape(2, 12)
    reloaded, _ = whet.load(tmp_path / "out", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens), model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "tie"}, "unknown merge method 'tie'"),
        ({"method": "average", "weights": [0.5, 0.6]}, "must sum to 1, but 0.5, 0.6 sum to 1.1"),
        ({"method": "slerp", "weights": [0.5, 0.6]}, "must sum to 1"),
        ({"method": "average", "weights": [1.0]}, r"there are 2 models, but 1 weights \(1\)"),
        ({"method": "ties", "weights": [1.0, 0.0]}, "must be greater than 0: 1, 0"),
        ({"method": "task", "weights": [1.0, float("nan")]}, "must be finite: 1, nan"),
        ({"method": "average", "density": 0.5}, "average has no density"),
        ({"method": "ties", "density": 0.0}, r"density 0.0 is not in \(0, 1\]"),
        ({"method": "ties", "seed": 1}, "ties is deterministic"),
        ({"method": "task"}, "task needs the common base model of all models"),
        ({"method": "average", "base": "x"}, "average has no base"),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected_and_nothing_is_written(models, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        merge_models(models, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []


def test_slerp_needs_two_models(models, tmp_path):
    with pytest.raises(ConfigError, match="slerp merges exactly two models, but 3 were given"):
        merge_models([*models, models[0]], tmp_path / "out", method="slerp")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "d_model is 32 and 48"),
        ({"num_hidden_layers": 3}, "the number of blocks is 2 and 3"),
        ({"rope_theta": 5000.0}, r"blocks\[0\].attention.rope.theta is 10000.0 and 5000.0"),
    ],
)
def test_models_of_different_shapes_are_rejected_with_the_first_differences(
    tiny_directory, tmp_path, changes, message
):
    write_tiny_model(tmp_path / "other", **changes)
    with pytest.raises(ModelError, match=message):
        merge_models([tiny_directory, tmp_path / "other"], tmp_path / "out", method="average")


def test_models_of_different_families_are_rejected(tiny_directory, tmp_path):
    shutil.copytree(tiny_directory, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    with pytest.raises(ModelError, match="model_type is llama and mistral"):
        merge_models([tiny_directory, tmp_path / "other"], tmp_path / "out", method="average")


def test_models_with_different_tokens_are_rejected(tiny_directory, tmp_path):
    shutil.copytree(tiny_directory, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace("<|user|>", "<|human|>"))
    with pytest.raises(ModelError, match=r"differ in 2 tokens: .*'<\|user\|>'"):
        merge_models([tiny_directory, tmp_path / "other"], tmp_path / "out", method="average")


def test_adapter_of_a_different_base_is_rejected(models, adapters, tmp_path):
    with pytest.raises(ModelError, match=f"adapter1 is an adapter of .*, not of {models[0]}"):
        merge_models(adapters, tmp_path / "out", method="ties", base=models[0])
    other = write_adapter(models[0], tmp_path / "other", seed=3)
    with pytest.raises(ModelError, match=f"other is an adapter of {models[0]}, not of"):
        merge_models([adapters[0], other], tmp_path / "out", method="ties")
    assert not (tmp_path / "out").exists()


def test_overflow_in_the_dtype_is_rejected_with_the_tensor_name(tiny_directory, models, tmp_path):
    base = write_variant(tiny_directory, tmp_path / "fp16", seed=0, dtype=torch.float16)
    with pytest.raises(
        ModelError, match=r"embed_tokens.weight: the result of task is not finite in torch.float16"
    ):
        merge_models(models, tmp_path / "out", method="task", base=base, weights=[1e6, 1e6])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp16"]


def test_invalid_config_is_named(tiny_directory, tmp_path):
    shutil.copytree(tiny_directory, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "tiny"}))
    with pytest.raises(ModelError, match="other/config.json is invalid"):
        merge_models([tiny_directory, tmp_path / "other"], tmp_path / "out", method="average")


def test_existing_directory_is_not_overwritten(models, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="never overwrites existing files"):
        merge_models(models, tmp_path / "out", method="average")


TENSORS, MEGABYTES = 12, 4  # a model of 48 MiB


def write_big_model(directory, seed):
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer.{index}": torch.randn(MEGABYTES * 256, 1024, generator=generator) for index in range(TENSORS)
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "made-up"}')
    return str(directory)


# upper bounds of the peak, in copies of one float32 tensor; docs/merging.md has the measurements
COPIES = {"average": 2.5, "slerp": 3.5, "task": 4.5, "ties": 8, "dare": 5.5, "dare-ties": 9}
MEASURE = """
import json, sys
from pathlib import Path
from whet.model_io.merging.merge_models import BASE_METHODS, merge_models

def kilobytes(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0])

small, out, base, *models = sys.argv[1:]
peaks = {}
for method in json.loads(sys.stdin.read()):
    has_base = method in BASE_METHODS
    merge_models([small, small], f"{out}/{method}-warm", method=method, base=small if has_base else None)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = kilobytes("VmRSS")
    inputs = models[:2] if method == "slerp" else models
    merge_models(inputs, f"{out}/{method}", method=method, base=base if has_base else None)
    peaks[method] = (kilobytes("VmHWM") - before) / 1024
print(json.dumps(peaks))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_peak_memory_is_a_few_tensors_for_any_model_size(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    save_file({"layer.0": torch.ones(8, 8)}, small / "model.safetensors")
    (small / "config.json").write_text('{"model_type": "made-up"}')
    models = [write_big_model(tmp_path / f"m{seed}", seed) for seed in range(4)]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(tmp_path), *models],
        input=json.dumps(list(COPIES)), capture_output=True, text=True, check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"},  # freed tensors are returned to the system at once
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    peaks = {method: size / MEGABYTES for method, size in json.loads(result.stdout).items()}
    print(peaks)
    assert all(peaks[method] < COPIES[method] for method in COPIES), peaks
