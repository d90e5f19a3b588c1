"""Every fast path compared with plain torch, `whet.reference()`: losses, gradients, decoding and runs.

A new objective, adapter or layer adds a row to one of the tables. `make test-gpu` runs the same rows on a GPU.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import sys

import pytest
import torch
from tools.golden import config_of, write_inputs
from transformers import AutoModelForCausalLM

import whet
from models.test_decoder import MODELS
from models.test_decoder import model as make_model
from tiny import run_config
from tiny_adapters import shake, tokens
from whet.adapters.fused_lora import PreparedLayers
from whet.adapters.layers.lora_linear import LoRALinear
from whet.config.load_config import validate_config
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.errors import ConfigError
from whet.generation import engine
from whet.models import decoder, moe
from whet.objectives.sft import SFT
from whet.ops import attention, dispatch, linear
from whet.ops.cross_entropy import linear_cross_entropy
from whet.ops.dispatch import FAST, REFERENCE, Paths, current_paths, use_paths
from whet.ops.kernels import fused_decode, lora_swiglu
from whet.ops.kl_divergence import linear_kl, linear_topk_kl, top_logprobs
from whet.ops.lm_head import Head
from whet.ops.logprobs import token_logprobs
from whet.runs.assemble import open_assembly
from whet.training.callbacks import Callback, StopRun
from whet.training.loss import total_weights, weighted_loss
from whet.training.optim.plain_adam import PlainAdam
from whet.training.trainer import Trainer

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# device and precision: what two orders of sums may differ by, relative to the gradient
PLACES = {("cpu", "fp32"): 2e-5, ("cuda", "fp32"): 1e-4, ("cuda", "bf16"): 0.1}
on_each_place = pytest.mark.parametrize(
    "place",
    [pytest.param(place, id="-".join(place), marks=GPU if "cuda" in place else ()) for place in PLACES],
)

LORA = {"kind": "lora", "rank": 4}
BATCHED = {"batch_size": 6, "micro_batch_tokens": 2048}
PLAIN_ROWS = [
    *("sft-full", "sft-unpacked-recomputed", "sft-lora", "dora", "pissa", "rslora-embedding", "qlora"),
    *("moe", "moe-lora", "mup", "bridge", "bridge-full", "dpo-online", "dpo-named", "ipo", "orpo", "simpo"),
    *("distill", "distrust", "mix", "mtp", "mtp-moe", "classify", "classify-full", "classify-multi"),
    *("grpo", "grpo-moe"),
]
# row: keys over those of a golden run of that name (tools/golden.py), whose model, objective and data it has
ROWS = {
    **{name: {} for name in PLAIN_ROWS},
    "sft-packed": {"run": {"batch_size": None, "batch_tokens": 1024, "micro_batch_tokens": 1024}},
    "sft-packed lora": {"method": LORA},
    "sft-lora dropout": {"method": {**LORA, "dropout": 0.2}, "run": {"grad_checkpoint": True}},
    "dora dropout": {"method": {**LORA, "variant": "dora", "dropout": 0.2}},
    "qlora dora": {"method": {"kind": "qlora", "rank": 4, "variant": "dora"}},
    "dpo-online lora": {"method": LORA},
    "distill reverse": {"objective": {"divergence": "reverse", "temperature": 2.0}},
    "distill jsd": {"objective": {"divergence": "jsd", "alpha": 0.3}},
    "bridge experts": {"model": "bridged-moe", "method": LORA},
    "bridge experts-full": {"model": "bridged-moe", "method": {"kind": "full"}},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return the models and records of the golden runs, and an MoE model that runs through the bridge."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    from tiny import write_tokenizer

    directory = tmp_path_factory.mktemp("inputs")
    write_inputs(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = GraniteMoeConfig(
        vocab_size=260, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, **sizes
    )
    GraniteMoeForCausalLM(config).save_pretrained(directory / "bridged-moe")
    write_tokenizer(directory / "bridged-moe")
    return directory


def config_for(row, device, precision):
    config = config_of(row.split()[0])
    for section, keys in {"run": {}, **ROWS[row]}.items():
        merged = isinstance(keys, dict) and section != "method"
        config[section] = {**config.get(section, {}), **keys} if merged else keys
    config["run"] |= {"device": device, "precision": precision}
    return validate_config(config)


def compute(config, paths, batches=None):
    """Return loss, metrics and gradients of a run's first step, or of given batches, with the given paths."""
    with contextlib.ExitStack() as held:
        with use_paths(paths):
            work = held.enter_context(open_assembly(config))
        model, objective = shake(work.model), work.objective
        batches = batches or next(work.stream)
        learned = {f"model.{name}": p for name, p in model.named_parameters() if p.requires_grad}
        if objective.heads is not None:
            learned |= {f"heads.{name}": p for name, p in objective.heads.named_parameters()}
        model.train()
        torch.manual_seed(1)  # dropout
        weights, sums = total_weights(objective, batches), {}
        for batch in batches:
            loss, metrics = weighted_loss(
                model, objective, batch.to(model.device), weights=weights, precision=work.precision
            )
            loss.backward()
            for name, value in {"loss": loss.detach(), **metrics}.items():
                sums[name] = sums.get(name, 0.0) + value.double()
        return sums, {name: p.grad for name, p in learned.items() if p.grad is not None}, batches


def assert_same(actual, wanted, tolerance):
    """Compare each tensor by relative L2 error, unless it is a negligible part of the total."""
    assert actual.keys() == wanted.keys()
    total = sum(tensor.double().square().sum() for tensor in wanted.values()).sqrt()
    assert 0 < total < float("inf")
    for name, tensor in wanted.items():
        apart = (actual[name].double() - tensor.double()).norm()
        assert apart <= tolerance * max(tensor.double().norm(), 1e-2 * total), name


@on_each_place
@pytest.mark.parametrize("row", ROWS)
def test_objectives_and_methods_match_the_reference(row, place, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    config = config_for(row, *place)
    metrics, gradients, batches = compute(config, FAST)
    plain_metrics, plain_gradients, _ = compute(config, REFERENCE, batches)
    assert metrics.keys() == plain_metrics.keys()
    for name, value in plain_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=10 * PLACES[place], atol=PLACES[place])
    assert_same(gradients, plain_gradients, PLACES[place])


def sharing(vocab, *, shared=20):
    """Return two packed rows of documents, some with a shared prefix, and padding at the end of one row."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda count: torch.randint(0, vocab, (count,), generator=generator).tolist()  # noqa: E731
    start = draw(shared)
    texts = [[*start, *draw(length)] for length in (3, 9, 1, 5)] + [draw(7), draw(12)]
    return [
        Example(text, [place % 3 > 0 for place in range(len(text))], str(n)) for n, text in enumerate(texts)
    ]


LAYOUTS = {
    "one packed row": lambda examples: make_batch([examples]),
    "packed rows": lambda examples: make_batch([examples[:3], examples[3:]]),
    "padded": lambda examples: make_batch([[example] for example in examples]),
}


def decoder_gradients(name, layout, paths, *, dtype, adapted, device="cpu"):
    blocks, settings = MODELS[name]
    with use_paths(paths):
        model = make_model(blocks, **settings).to(device, dtype).train()
    if adapted:
        torch.manual_seed(0)
        shake(whet.attach_lora(model, rank=3).to(dtype))
    batch = LAYOUTS[layout](sharing(50)).to(torch.device(device))
    loss = SFT().loss(model, batch).sums["loss"] / batch.supervised
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_decoder_features_in_float64(name, layout, adapted):
    kind = {"dtype": torch.float64, "adapted": adapted}
    fast, plain = (decoder_gradients(name, layout, paths, **kind) for paths in (FAST, REFERENCE))
    assert_same(fast, plain, 1e-9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("name", MODELS)
def test_decoder_features_in_float32(name, device):
    kind = {"dtype": torch.float32, "adapted": True, "device": device}
    fast, plain = (decoder_gradients(name, "one packed row", paths, **kind) for paths in (FAST, REFERENCE))
    assert_same(fast, plain, 10 * PLACES[device, "fp32"])  # large weights: small differences grow


@pytest.mark.parametrize("path", [field.name for field in dataclasses.fields(Paths)])
@pytest.mark.parametrize("name", ["all-grouped", "experts", "mixed"])
def test_each_fast_path_separately(name, path):
    """If a run differs from the reference, changing single fields in this way shows the responsible path."""
    one = dataclasses.replace(REFERENCE, **{path: True})
    kind = {"dtype": torch.float64, "adapted": True}
    alone, plain = (decoder_gradients(name, "one packed row", paths, **kind) for paths in (one, REFERENCE))
    assert_same(alone, plain, 1e-9)


HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled and capped": {"scale": 0.4, "softcap": 3.0, "bias": True},
}
LOSSES = {
    "cross-entropy": lambda x: linear_cross_entropy(x.hidden, x.head, x.targets),
    "weighted": lambda x: linear_cross_entropy(x.hidden, x.head, x.targets, weights=x.weights),
    "log-probabilities": lambda x: (token_logprobs(x.hidden, x.head, x.targets) * x.weights).tanh().sum(),
    **{
        f"{kind} kl": lambda x, kind=kind: linear_kl(
            x.hidden, x.head, x.other, x.teacher, temperature=1.7, divergence=kind
        )
        for kind in ("forward", "reverse", "jsd")
    },
    **{
        f"{kind} kl of the top {k}": lambda x, kind=kind, k=k: linear_topk_kl(
            x.hidden, x.head, *top_logprobs(x.other, x.teacher, top_k=k), temperature=1.7, divergence=kind
        )
        for kind, k in itertools.product(("forward", "reverse", "jsd"), (5, 37))
    },
}  # fmt: skip


@dataclasses.dataclass
class Operands:
    """The inputs of the losses in the table."""

    hidden: torch.Tensor
    head: Head
    targets: torch.Tensor
    weights: torch.Tensor
    other: torch.Tensor
    teacher: Head


def operands(head, paths, *, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    settings = dict(HEADS[head])

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    weight, bias = draw(37, 8).requires_grad_(), draw(37).requires_grad_()
    bias = bias if settings.pop("bias", False) else None
    return Operands(
        draw(11, 8).requires_grad_(),
        Head(weight, bias, **settings, paths=paths),
        torch.randint(0, 37, (11,), generator=generator).to(device),
        draw(11).float(),
        draw(11, 8),
        Head(draw(37, 8)),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_match_full_logits(name, head, device):
    actual = []
    for paths in (FAST, REFERENCE):
        given = operands(head, paths, device=device)
        loss = LOSSES[name](given)
        inputs = {"hidden": given.hidden, "weight": given.head.weight, "bias": given.head.bias}
        inputs = {key: value for key, value in inputs.items() if value is not None}
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        actual.append({"loss": loss.detach(), **dict(zip(inputs, gradients, strict=True))})
    # the kernel of a GPU sums in float32
    assert_same(*actual, 1e-9 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(
    "sampling", [whet.Sampling(), whet.Sampling(temperature=1.0, top_p=0.9)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", ["dense", "dora", "experts", "mixed"])
def test_decoding_matches_the_reference(name, sampling, device):
    blocks, settings = MODELS["all-grouped" if name in ("dense", "dora") else name]
    start = list(range(12))
    prompts = [[*start, 3, 4], [*start, 9], [*start, 3, 4], [7, 7, 7]]
    actual = []
    for paths in (FAST, REFERENCE):
        with use_paths(paths):
            model = make_model(blocks, **settings).to(device)
        torch.manual_seed(0)
        shake(whet.attach_lora(model, rank=3, variant="dora" if name == "dora" else "lora"))
        actual += [
            whet.complete(
                model, rows, max_tokens=12, stop_tokens=(), sampling=sampling, seeds=range(len(rows))
            )
            for rows in (prompts[:3], prompts)  # with a start that all of them share, and without
        ]
    for fast, plain in zip(actual[:2], actual[2:], strict=True):
        assert [row.tokens for row in fast] == [row.tokens for row in plain]
        for one, other in zip(fast, plain, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_reference_matches_transformers(tiny_directory):
    theirs = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)
    with whet.reference():
        model, _ = whet.load(tiny_directory, dtype=torch.float64, device="cpu")
    model.requires_grad_(True)
    example = Example(tokens()[0].tolist(), [False, *(True for _ in range(11))], "one")
    batch = make_batch([[example]])
    SFT().loss(model, batch).sums["loss"].backward()
    ids = tokens()[:1]
    logits = theirs(ids).logits
    torch.testing.assert_close(model(ids), logits, rtol=1e-6, atol=1e-6)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    loss.backward()
    expected = dict(theirs.named_parameters())
    assert_same(
        {name: p.grad for name, p in model.named_parameters()},
        {name: expected[model.hf_name(name)].grad for name, _ in model.named_parameters()},
        1e-6,
    )


def test_adapter_matches_its_formula(tiny_directory):
    with whet.reference():
        model, _ = whet.load(tiny_directory, dtype=torch.float64, device="cpu")
    shake(whet.attach_lora(model, rank=4).double())
    layer = next(module for module in model.modules() if isinstance(module, LoRALinear))
    x = torch.randn(3, 32, dtype=torch.float64)
    expected = x @ layer.base.weight.T + 4.0 * x @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_plain_adam_matches_torch(name, device):
    torch.manual_seed(0)
    start = [torch.randn(5, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    settings = {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6}
    ours, theirs = ([p.clone().to(device).requires_grad_() for p in start] for _ in range(2))
    groups = [{"params": ours[:1], "weight_decay": 0.1}, {"params": ours[1:]}]
    optimizer = PlainAdam(groups, **settings, decoupled=name == "adamw")
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    other = kind(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}], **settings
    )
    for step in range(4):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = two.grad = torch.randn_like(one)
        optimizer.found_inf = torch.tensor(float(step == 2), device=device)
        optimizer.step()
        if step != 2:  # a step that changes nothing
            other.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)
        assert optimizer.state[one].keys() == other.state[two].keys()
        for key, value in optimizer.state[one].items():
            torch.testing.assert_close(value.cpu(), other.state[two][key].cpu(), check_dtype=False)


class Stop(Callback):
    """Stops the run after two steps."""

    def on_step_end(self, step, metrics):
        return StopRun("enough", unfinished=True) if step == 2 else None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_run_matches_the_reference(method, device, tiny_directory, tmp_path, monkeypatch, caplog):
    def losses(name, *callbacks):
        sections = {
            "method": {"kind": method},
            "run": {"steps": 6, "name": name, "device": device},
            "eval": {"every": 3},
        }
        result = whet.train(run_config(tiny_directory, tmp_path, optim={"lr": 1e-3}, **sections), callbacks)
        return [row[key] for row in result.history for key in ("loss", "eval_loss") if key in row]

    fast = losses("fast")
    assert "reference path" not in caplog.text
    losses("half", Stop())
    monkeypatch.setenv("WHET_REFERENCE", "1")
    with caplog.at_level(logging.INFO, "whet"):
        plain = losses("plain")
    assert "reference path: plain torch" in caplog.text
    assert "reference path" in (tmp_path / "runs" / "plain" / "log.txt").read_text()
    assert fast == pytest.approx(plain, rel=1e-4)
    # a checkpoint is of neither path
    whet.resume(tmp_path / "runs" / "half")
    lines = (tmp_path / "runs" / "half" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row[key] for row in rows for key in ("loss", "eval_loss") if key in row] == pytest.approx(
        plain, rel=1e-4
    )


def refuse(name):
    def refused(*_, **__):
        raise AssertionError(f"{name} is not plain torch")

    return refused


FORBIDDEN = {
    "explicit backward": (torch.autograd.Function, "apply"),
    "prefix sharing": (decoder, "share_prefixes"),
    "attention by document": (attention, "_attend_by_document"),
    "varlen attention": (attention, "_attend_varlen"),
    "grouped experts": (moe, "grouped_linear"),
    "sorted experts": (moe, "sort_by_expert"),
    "products of few rows": (linear, "linear"),
    "decoding kernels": (fused_decode, "can_build_kernels"),
    "decoding attention": (attention, "_attend_grouped"),
    "prepared adapters": (PreparedLayers, "__init__"),
    "fused feed-forward": (lora_swiglu, "is_supported"),
    "fused siblings": (sys.modules["whet.adapters.layers.lora_linear"], "fused_lora_outputs"),
    "CUDA graphs": (engine, "StaticDecodeBatch"),
    "fused Adam": (torch, "_fused_adamw_"),
    "Triton": (dispatch, "kernel_build_problem"),
    "torch.compile": (torch.nn.Module, "compile"),
}  # fmt: skip
ON_A_GPU = {"varlen attention", "CUDA graphs", "Triton", "decoding kernels"}


def use_everything(inputs, directory, device):
    """Run training, decoding and compilation, which together use all of the paths above."""
    dispatch.can_build_kernels.cache_clear()
    for number, row in enumerate(("sft-packed", "sft-lora", "qlora", "moe-lora", "bridge", "mtp-moe")):
        config = config_of(row)
        own = {"dir": str(directory), "device": device, "steps": 2, "compile": number == 0}
        own |= (
            {"precision": "bf16"} if device == "cuda" and number == 0 else {}
        )  # what varlen attention takes
        whet.train({**config, "run": {**config["run"], **own}})
    with torch.no_grad():
        prompts = [[*range(12), 3], [*range(12), 4]]
        model, _ = whet.load(inputs / "base", dtype=torch.float32, device=device)
        for each in (model, whet.attach_lora(model, rank=2)):
            whet.complete(each, prompts, max_tokens=3, stop_tokens=())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_reference_path_uses_no_fast_path(device, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    for name, (owner, attribute) in FORBIDDEN.items():
        monkeypatch.setattr(owner, attribute, refuse(name))
    with whet.reference():
        use_everything(inputs, tmp_path, device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_default_path_uses_all_fast_paths(device, inputs, tmp_path, monkeypatch):
    """Otherwise the test above would prove nothing."""
    monkeypatch.chdir(inputs)
    used = set()

    def noting(name, before):
        def noted(*given, **named):
            used.add(name)
            return before(*given, **named)

        return noted

    for name, (owner, attribute) in FORBIDDEN.items():
        if name == "explicit backward":  # a class method: a classmethod of the same name passes its class on
            plain = torch.autograd.Function.apply.__func__
            monkeypatch.setattr(owner, attribute, classmethod(noting(name, plain)))
        else:
            monkeypatch.setattr(owner, attribute, noting(name, getattr(owner, attribute)))
    use_everything(inputs, tmp_path, device)
    wanted = FORBIDDEN.keys() - (ON_A_GPU if device == "cpu" else {"prefix sharing", "attention by document"})
    assert wanted - used == set()


def test_reference_applies_only_to_objects_built_inside_it(tiny_directory, tmp_path):
    load = lambda: whet.load(tiny_directory, dtype=torch.float32, device="cpu")[0]  # noqa: E731
    config = validate_config(run_config(tiny_directory, tmp_path))
    before = load()
    with whet.reference():
        inside, trainer = load(), Trainer(load(), SFT(), [], config)
        whet.attach_lora(before, rank=2)
        with use_paths(FAST):
            assert current_paths() == FAST
        assert current_paths() == REFERENCE
    after = load()
    whet.attach_lora(inside, rank=2)
    for model, paths in ((before, FAST), (inside, REFERENCE), (after, FAST)):
        assert {module.paths for module in model.modules() if hasattr(module, "paths")} == {paths}
        assert model.head().paths == paths
    assert isinstance(trainer.optimizer, PlainAdam)
    assert isinstance(Trainer(load(), SFT(), [], config).optimizer, torch.optim.AdamW)


@pytest.mark.parametrize(("given", "paths"), [("1", REFERENCE), ("true", REFERENCE), ("0", FAST), ("", FAST)])
def test_environment_variable_selects_the_reference_path(given, paths, monkeypatch):
    monkeypatch.setenv("WHET_REFERENCE", given)
    assert current_paths() == paths


def test_invalid_environment_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("WHET_REFERENCE", "kernels")
    with pytest.raises(ConfigError, match="WHET_REFERENCE=kernels"):
        current_paths()
