"""Plans of runs: memory parts, very large models, clusters, and invalid input."""

import json
import time
from typing import get_args

import pytest
import torch

import whet
from tiny import run_config, write_tiny_model
from whet.config.load_config import validate_config
from whet.config.optim import Optim
from whet.errors import ConfigError, ModelError
from whet.models.from_scratch.presets import PRESETS, Shape, build_spec, preset_spec
from whet.planning.plan import plan_run
from whet.planning.step_sizes import batch_shape
from whet.recipes.recipe import StepShape
from whet.recipes.registry import recipe_for

FSDP = {"kind": "fsdp"}
SHAPES = {  # the published sizes of Llama 3
    "8b": (32, 4096, 32, 14336, 8_030_261_248),
    "70b": (80, 8192, 64, 28672, 70_553_706_496),
    "405b": (126, 16384, 128, 53248, 405_853_388_800),
}


def llama(size):
    layers, d_model, heads, width, _ = SHAPES[size]
    shape = Shape(
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=8,
        width=width,
        vocab_size=128256,
        max_positions=8192,
    )
    return build_spec(Shape(**{**vars(shape), "tied_head": False}))


def config(**sections):
    return validate_config(
        {
            "model": "described by the test",
            "method": {"kind": "full"},
            "data": {"train": "none", "max_length": 513},
            "run": {"steps": 10, "batch_tokens": 4096, "micro_batch_tokens": 2048, "device": "cpu"},
            **sections,
        }
    )


@pytest.mark.parametrize(("size", "kind"), [("70b", "lora"), ("70b", "qlora"), ("405b", "full")])
def test_very_large_models_are_planned_in_seconds(size, kind):
    run_config = config(
        method={"kind": kind}, parallel=FSDP, run={"steps": 9, "batch_tokens": 8192, "grad_checkpoint": True}
    )
    before, times = torch.get_rng_state(), []
    for _ in range(2):  # the first one also imports
        started = time.process_time()
        plan = plan_run(run_config, device="h100", gpus=512, spec=llama(size))
        times.append(time.process_time() - started)
    assert min(times) < 5
    assert torch.equal(before, torch.get_rng_state())
    assert plan.total == SHAPES[size][-1]
    # two FLOPs a weight and token forward; as many for the gradients of inputs; and of trained weights
    passes = 6 if kind == "full" else 4
    assert plan.flops.model == pytest.approx(passes * plan.total, rel=0.06)
    assert plan.traffic.total > 0
    assert 0 < plan.efficiency <= 1


def test_nothing_is_allocated():
    import psutil

    plan_run(config(), device="h100", spec=preset_spec("nano"))  # what a first plan imports stays
    before = psutil.Process().memory_info().rss
    plan_run(config(), device="h100", spec=llama("405b"), suggest=False)
    assert psutil.Process().memory_info().rss - before < 500 * 2**20  # of 1.5 TiB


def test_memory_parts_match_their_formulas():
    spec = preset_spec("llama-135m")
    full = plan_run(config(), device="a100", spec=spec, suggest=False)
    assert full.memory.weights == full.memory.gradients == 4 * full.total
    assert full.memory.optimizer == 8 * full.total
    lora = plan_run(config(method={"kind": "lora"}), device="a100", spec=spec, suggest=False)
    assert lora.memory.weights == 2 * lora.total  # bf16
    assert lora.memory.adapters == lora.memory.gradients == 4 * lora.trained
    qlora = plan_run(config(method={"kind": "qlora"}), device="a100", spec=spec, suggest=False)
    packed = qlora.parameters["attention"] + qlora.parameters["feedforward"]
    assert qlora.memory.weights == pytest.approx(2 * (qlora.total - packed) + 0.516 * packed, rel=0.01)
    muon = 4 + 4 * full.parameters["embedding"] / full.total  # one moment of matrices, two of the others
    # in 8 bits: two codes per weight, and two scales per 256 of them
    names = {
        "adamw": 8,
        "adam": 8,
        "muon": muon,
        "lion": 4,
        "sgd": 4,
        "adamw8bit": 2 + 8 / 256,
        "adafactor": 0,
    }
    assert names.keys() == set(get_args(Optim.model_fields["name"].annotation))
    for name, bytes_a_weight in names.items():
        actual = plan_run(
            config(optim={"name": name}), device="a100", spec=spec, suggest=False
        ).memory.optimizer
        assert actual == pytest.approx(bytes_a_weight * full.total, rel=0.01, abs=4e6)


def test_gradient_checkpointing_trades_memory_for_flops():
    spec = preset_spec("micro")
    plain = plan_run(config(), device="t4", spec=spec)
    checkpointed = plan_run(
        config(
            run={
                "steps": 1,
                "device": "cpu",
                "batch_tokens": 4096,
                "micro_batch_tokens": 2048,
                "grad_checkpoint": True,
            }
        ),
        device="t4",
        spec=spec,
    )
    assert checkpointed.memory.activations == pytest.approx(plain.other_activations, rel=1e-5)
    assert checkpointed.memory.activations < plain.memory.activations / 5
    assert checkpointed.other_activations == pytest.approx(plain.memory.activations, rel=1e-5)
    assert checkpointed.flops.computed > 1.2 * plain.flops.computed
    assert checkpointed.max_micro_batch_tokens > 2 * plain.max_micro_batch_tokens


def test_largest_micro_batch_fits_and_twice_as_much_does_not():
    spec = preset_spec("llama-360m", layers=6)
    suggested = plan_run(config(), device="rtx4090", spec=spec)
    for times, fits in ((1, True), (2, False)):
        run = {
            "steps": 1,
            "batch_tokens": 2**22,
            "micro_batch_tokens": times * suggested.max_micro_batch_tokens,
            "device": "cpu",
        }
        plan = plan_run(config(run=run), device="rtx4090", spec=spec, suggest=False)
        assert (plan.memory.peak < 1.02 * plan.target.usable_memory) == fits


def test_reference_and_teacher_memory_is_counted(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    tiny = str(tmp_path / "tiny")
    base = {"model": tiny, "method": {"kind": "full"}}
    base["run"] = {"steps": 1, "batch_tokens": 512, "device": "cpu", "precision": "fp32"}
    plain = plan_run(config(**base), suggest=False)
    online = {"kind": "dpo", "reference": "online"}
    reference = plan_run(config(**base, objective=online), suggest=False)
    assert reference.memory.other_models == plain.memory.weights
    assert reference.flops.others > 0
    stored = plan_run(config(**base, objective={"kind": "dpo"}), suggest=False)
    assert stored.memory.other_models == stored.flops.others == 0
    adapters = plan_run(config(model=tiny, method={"kind": "lora"}, objective=online), suggest=False)
    assert adapters.memory.other_models == 0 < adapters.flops.others
    teacher = plan_run(config(**base, objective={"kind": "distill", "teacher": tiny}), suggest=False)
    assert teacher.memory.other_models == plain.memory.weights


def test_transformers_models_are_planned_from_their_config(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    given = {"model_type": "gpt_neox", "vocab_size": 300, "max_position_embeddings": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**given, "architectures": ["GPTNeoXForCausalLM"]}))
    for kind in ("full", "lora"):
        plan = plan_run(config(model=str(tmp_path), method={"kind": kind}), suggest=False)
        matrices = 2 * 300 * 64 + 4 * (4 * 64 * 64 + 2 * 64 * 128)
        assert plan.total == pytest.approx(matrices, rel=0.05)  # and biases and norms
        assert plan.memory.peak > 4 * plan.total
        assert plan.memory.activations > 0


def test_fsdp_shards_weights():
    spec = llama("8b")
    one = plan_run(config(), device="h100", spec=spec, suggest=False)
    eight = plan_run(config(parallel=FSDP), device="h100", gpus=8, spec=spec, suggest=False)
    assert eight.memory.weights == pytest.approx(one.memory.weights / 8, rel=1e-6)
    assert eight.memory.optimizer == pytest.approx(one.memory.optimizer / 8, rel=1e-6)
    assert eight.memory.peak < one.memory.peak / 2
    # each device gathers seven eighths of the others' weights, twice, and sends as many gradients in fp32
    assert eight.traffic.gathered == pytest.approx(2 * 7 / 8 * 2 * one.total)
    assert eight.traffic.added_up == pytest.approx(7 / 8 * 4 * one.total)
    assert eight.compute_s == pytest.approx(one.compute_s / 8)


def test_network_between_machines_is_slower():
    spec = llama("8b")
    fsdp_config = config(parallel=FSDP)
    near = plan_run(fsdp_config, device="h100", gpus=8, spec=spec, suggest=False)
    far = plan_run(fsdp_config, device="h100", gpus=64, network_gb_s=5, spec=spec, suggest=False)
    assert near.traffic.bandwidth_gb_s == 450
    assert far.traffic.bandwidth_gb_s == 40
    assert far.efficiency < near.efficiency


def mix(**sections):
    parts = [
        {"objective": {"kind": kind}, "data": {"train": "none", "max_length": 513}, "batch_tokens": tokens}
        for kind, tokens in (("sft", 2**19), ("dpo", 2**20))
    ]
    return config(data=None, objective={"kind": "mix", "parts": parts}, **sections)


def test_network_bandwidth_applies_to_a_mix():
    arguments = {"device": "h100", "gpus": 64, "spec": llama("8b"), "suggest": False}
    near, far = (plan_run(mix(parallel=FSDP), network_gb_s=rate, **arguments) for rate in (50, 5))
    assert (near.traffic.bandwidth_gb_s, far.traffic.bandwidth_gb_s) == (400, 40)
    assert far.efficiency < near.efficiency


@pytest.mark.parametrize("tensor", [1, 8])
def test_traffic_of_a_mix_is_the_sum_of_its_parts(tensor):
    arguments = {"device": "h100", "gpus": 64, "spec": llama("8b"), "suggest": False}
    mix_config = mix(parallel={"kind": "fsdp", "tensor": tensor})
    actual = plan_run(mix_config, **arguments)
    parts = [plan_run(part, **arguments) for part in mix_config.parts().values()]
    assert actual.micro_batches == sum(part.micro_batches for part in parts) > 2
    for name in ("gathered", "added_up", "layers", "hidden_s", "exposed_s"):
        assert getattr(actual.traffic, name) == sum(getattr(part.traffic, name) for part in parts)
    copies = plan_run(mix(parallel={"kind": "ddp"}), **arguments)
    assert copies.traffic.added_up == 2 * 63 / 64 * 4 * copies.total  # once a step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h1000"}, "unknown device 'h1000'"),
        ({"gpus": 0}, "--gpus 0: it must be at least 1"),
        ({"gpus": 8}, "parallel.kind is none"),
        ({"gpus": 8, "network_gb_s": 0}, "must be positive"),
        ({"gpus": 9, "parallel": {"kind": "fsdp", "tensor": 2}}, "=2 does not divide the 9"),
        ({"gpus": 16, "parallel": {"kind": "fsdp", "tensor": 8}}, "does not divide the model's heads"),
        ({"gpus": 8, "parallel": FSDP, "optim": {"name": "muon"}}, "needs full matrices"),
    ],
)
def test_invalid_input_raises_one_message(arguments, message):
    sections = {name: arguments.pop(name) for name in ("parallel", "optim") if name in arguments}
    with pytest.raises(ConfigError, match=message):
        plan_run(config(**sections), spec=preset_spec("nano"), **arguments)


def test_ddp_all_reduces_gradients():
    spec = llama("8b")
    one = plan_run(config(), device="h100", spec=spec, suggest=False)
    eight = plan_run(config(parallel={"kind": "ddp"}), device="h100", gpus=8, spec=spec, suggest=False)
    assert eight.memory.weights == one.memory.weights
    assert eight.traffic.added_up == pytest.approx(2 * 7 / 8 * 4 * one.total)
    assert eight.traffic.gathered == 0


def test_tensor_parallelism_splits_activations():
    spec = llama("8b")
    fsdp = plan_run(config(parallel=FSDP), device="h100", gpus=16, spec=spec, suggest=False)
    tensor_config = config(parallel={"kind": "fsdp", "tensor": 8})
    tensor = plan_run(tensor_config, device="h100", gpus=16, spec=spec, suggest=False)
    assert tensor.memory.weights == fsdp.memory.weights
    assert tensor.memory.activations < 0.7 * fsdp.memory.activations
    assert tensor.traffic.layers > 0 == fsdp.traffic.layers
    assert tensor.traffic.exposed_s > 0


def test_missing_model_is_not_downloaded():
    with pytest.raises(ModelError, match=r"no config.json of 'nobody/nothing'"):
        plan_run(config(model="nobody/nothing"))


def test_micro_batch_is_filled_with_the_longest_documents():
    shape, tokens = batch_shape(config(), StepShape())
    assert (shape.documents, shape.length, tokens) == (4, 512, 4096)
    run = {"steps": 1, "batch_size": 3, "device": "cpu"}
    shape, tokens = batch_shape(
        made := config(run=run, objective={"kind": "dpo"}), recipe_for(made).step_shape()
    )
    assert (shape.documents, tokens) == (6, 3 * 2 * 512)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_planned(preset):
    plan = plan_run(config(model={"preset": preset}), suggest=False)
    assert plan.memory.peak > 12 * plan.total


def test_kv_cache_size_matches_generation(tmp_path):
    from whet.model_io.load import load

    write_tiny_model(tmp_path / "tiny")
    values = run_config(tmp_path / "tiny", tmp_path)
    model, _ = load(str(tmp_path / "tiny"), device="cpu", dtype=torch.float32)
    cache = model.new_cache()
    with torch.no_grad():
        model.hidden(torch.zeros(1, 32, dtype=torch.long), cache=cache)
    cached_bytes = sum(t[:, :, :32].nbytes for t in (*cache._keys, *cache._values))
    assert plan_run(validate_config(values), suggest=False).cache_bytes * 32 == cached_bytes


def test_plan_accepts_the_same_configs_as_train(tiny_directory, tmp_path):
    values = run_config(tiny_directory, tmp_path, data={"valid": None})
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    plans = [whet.plan(given, device="h200") for given in (values, path, str(path), whet.RunConfig(**values))]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].steps == 4
    assert plans[0].length < 256  # as counted in the records, not as data.max_length allows
    with pytest.raises(ConfigError, match="utilisation 2: it must be above 0 and at most 1"):
        whet.plan(values, utilisation=2)
    with pytest.raises(ConfigError, match="none.yaml does not exist"):
        whet.plan("none.yaml")
