"""method.continue: a run trains the adapter of another run further, on the same base."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import whet
from tiny import run_config, write_tiny_model, write_tokenizer
from tiny_adapters import tokens
from whet.adapters.nf4 import NF4Linear
from whet.config.load_config import load_config, to_yaml, validate_config
from whet.data.sources.source import open_source
from whet.errors import ConfigError
from whet.planning.plan import plan_run
from whet.runs.assemble import open_assembly
from whet.runs.dry_run import check_assembly
from whet.training.callbacks import Callback, StopRun

METHODS = {
    "lora": {"targets": "attention", "layers": 1, "rank_pattern": {"q_proj": 2}},
    "rslora": {"variant": "rslora"},
    "dora": {"variant": "dora"},
    "pissa": {"variant": "pissa"},
    "embedding": {"targets": ["embed_tokens", "q_proj"]},
    "saved": {"targets": "mlp", "modules_to_save": ["embed_tokens", "lm_head"]},
    "qlora": {"kind": "qlora"},
    "qlora-dora": {"kind": "qlora", "variant": "dora"},
}


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        return StopRun("enough", unfinished=True) if step == self.step else None


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "model"
    write_tiny_model(directory, tie_word_embeddings=False)
    return directory


def config_of(model, tmp_path, name, method, **sections):
    sections["run"] = {"name": name, **sections.get("run", {})}
    config = run_config(model, tmp_path, eval={"every": 2}, **sections)
    return {**config, "method": method}


def eval_losses(result):
    return [row["eval_loss"] for row in result.history if "eval_loss" in row]


def peft_logits(base, adapter):
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    with torch.no_grad():
        return model.eval()(input_ids=tokens()).logits


@pytest.mark.parametrize("name", METHODS)
def test_run_starts_where_the_first_ended_and_keeps_its_base(base, tmp_path, name):
    first = whet.train(config_of(base, tmp_path, "first", {"rank": 4, **METHODS[name]}))
    method = {"continue": True}
    second = whet.train(config_of(first.directory, tmp_path, "second", method))
    assert eval_losses(second)[0] == pytest.approx(eval_losses(first)[-1], rel=1e-6)
    assert eval_losses(second)[-1] < eval_losses(second)[0]
    assert not (second.directory / "base").exists(), "no copy of the base weights"
    final = second.directory / "final"
    stored = [json.loads((d / "adapter_config.json").read_text()) for d in (first.directory / "final", final)]
    assert stored[0] == stored[1], "the same adapter on the same base"
    assert stored[1]["base_model_name_or_path"] == str(base)
    quantized = METHODS[name].get("kind") == "qlora"
    assert (final / "base_quantization.json").is_file() == quantized
    model, _ = whet.load(second.directory, dtype=torch.float32, device="cpu")
    assert any(isinstance(module, NF4Linear) for module in model.modules()) == quantized
    if not quantized:
        with torch.no_grad():
            torch.testing.assert_close(model(tokens()), peft_logits(base, final), rtol=1e-4, atol=1e-5)


def test_config_of_the_run_records_the_adapter_and_is_valid(base, tmp_path):
    first = whet.train(config_of(base, tmp_path, "first", {"rank": 2, "alpha": 3, "dropout": 0.1}))
    second = whet.train(config_of(first.directory, tmp_path, "second", {"continue": True, "lr_ratio": 4}))
    text = (second.directory / "config.yaml").read_text()
    config = load_config(second.directory / "config.yaml")
    method = config.method
    assert (method.kind, method.rank, method.alpha, method.dropout) == ("lora", 2, 3, 0.1)
    assert method.continues
    assert method.lr_ratio == 4
    assert "targets" not in text, "a default would say something else than the adapter"
    assert to_yaml(config) == text


@pytest.mark.parametrize("source", ["run", "checkpoint", "mlx", "pissa-checkpoint"])
def test_other_sources_of_the_adapter(base, tmp_path, source):
    variant = {"variant": "pissa"} if source == "pissa-checkpoint" else {}
    first = whet.train(config_of(base, tmp_path, "first", {"rank": 4, **variant}, run={"steps": 2})).directory
    name = first
    if "checkpoint" in source:
        name = first / "checkpoints" / "step-000002"
    if source == "mlx":
        name = tmp_path / "mlx"
        whet.save_adapter(whet.load(first, dtype=torch.float32, device="cpu")[0], name, layout="mlx")
    config = config_of(name, tmp_path, "second", {"continue": True})
    check_assembly(validate_config(config))
    second = whet.train(config)
    expected = eval_losses(
        whet.train(config_of(base, tmp_path, "again", {"rank": 4, **variant}, run={"steps": 2}))
    )
    assert eval_losses(second)[0] == pytest.approx(expected[-1], rel=1e-6)
    final = json.loads((second.directory / "final" / "adapter_config.json").read_text())
    assert final["base_model_name_or_path"] == str(base)


def test_adapters_of_experts_continue(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    write_tokenizer(tmp_path / "moe")
    method = {"rank": 2, "targets": ["experts", "q_proj"]}
    first = whet.train(config_of(tmp_path / "moe", tmp_path, "first", method))
    second = whet.train(config_of(first.directory, tmp_path, "second", {"continue": True}))
    assert eval_losses(second)[0] == pytest.approx(eval_losses(first)[-1], rel=1e-6)
    with torch.no_grad():
        logits = whet.load(second.directory, dtype=torch.float32, device="cpu")[0](tokens())
    expected = peft_logits(tmp_path / "moe", second.directory / "final")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_continued_run_resumes_and_its_checkpoints_load(base, tmp_path, kind):
    first = whet.train(config_of(base, tmp_path, "first", {"kind": kind, "rank": 4})).directory
    full = whet.train(config_of(first, tmp_path / "full", "second", {"continue": True}))
    part = whet.train(config_of(first, tmp_path / "part", "second", {"continue": True}), [StopAt(2)])
    resumed = whet.resume(part.directory)
    weights = [load_file(run.directory / "final" / "adapter_model.safetensors") for run in (full, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    checkpoint, _ = whet.load(
        full.directory / "checkpoints" / "step-000004", dtype=torch.float32, device="cpu"
    )
    final, _ = whet.load(full.directory, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(checkpoint(tokens()), final(tokens()), rtol=0, atol=0)


def test_provenance_records_the_chain(base, tmp_path):
    directories = [whet.train(config_of(base, tmp_path, "0", {"rank": 2}, run={"steps": 1})).directory]
    for number in (1, 2):
        config = config_of(directories[-1], tmp_path, str(number), {"continue": True}, run={"steps": 1})
        directories.append(whet.train(config).directory)
    assert "continues" not in json.loads((directories[0] / "provenance.json").read_text())
    chain = json.loads((directories[2] / "provenance.json").read_text())["continues"]
    assert [entry["adapter"] for entry in chain] == [str(directories[i] / "final") for i in (1, 0)]
    assert {entry["base"] for entry in chain} == {str(base)}
    hashes = [entry["sha256"]["adapter_model.safetensors"] for entry in chain]
    assert len(set(hashes)) == 2


def test_two_runs_match_a_peft_loop_with_a_fresh_optimizer(base, tmp_path):
    data = {"train": "synth:house:8", "valid": None, "max_length": 256, "order": "sequential", "pack": False}
    optim = {
        "name": "adamw",
        "lr": 1e-2,
        "warmup": 0,
        "schedule": "constant",
        "weight_decay": 0.0,
        "clip": None,
    }
    run = {"steps": 2, "batch_size": 4}

    def settings(model, name, method):
        config = run_config(model, tmp_path, data=data, optim=optim, run={**run, "name": name})
        return {**config, "method": method}

    method = {"rank": 3, "alpha": 5, "targets": ["q_proj", "down_proj"]}
    with open_assembly(validate_config(settings(base, "start", method))) as work:
        whet.save_adapter(work.model, tmp_path / "start")
        steps = [next(work.stream) for _ in range(2)]
        beta1, beta2 = work.build.config.optim.betas
        eps = work.build.config.optim.eps
    first = whet.train(settings(base, "first", method))
    second = whet.train(settings(first.directory, "second", {"continue": True}))

    torch.manual_seed(0)
    twin = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "start", is_trainable=True
    )
    parameters = [p for p in twin.parameters() if p.requires_grad]
    losses = []
    for _ in range(2):  # two runs over the same data, each with a fresh optimizer
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(beta1, beta2), eps=eps, weight_decay=0.0)
        for step in steps:
            total, count = 0.0, 0
            for batch in step:
                logits = twin(input_ids=batch.tokens).logits.flatten(0, 1)
                positions = batch.supervised_positions
                targets = batch.targets.flatten()[positions]
                total = total + F.cross_entropy(logits[positions], targets, reduction="sum")
                count += len(targets)
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    ours = [row["loss"] for result in (first, second) for row in result.history if "loss" in row]
    assert ours == pytest.approx(losses, rel=1e-5)
    stored = load_file(second.directory / "final" / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): p for name, p in twin.named_parameters() if "lora_" in name}
    assert stored.keys() == theirs.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, theirs[name].detach(), rtol=1e-3, atol=1e-5)


PAIRS = {"train": "synth:house-pairs:6", "valid": "synth:house-pairs-valid:4", "max_length": 256}


def completion_logprobs(model, tokenizer):
    """Return the log-probabilities of all chosen and rejected completions, in float64."""
    logprobs = []
    for record in open_source(PAIRS["valid"]):
        prompt = record.fields["prompt"]
        start = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        for side in ("chosen", "rejected"):
            ids = tokenizer.apply_chat_template([*prompt, *record.fields[side]], return_dict=False)
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            logprobs.append(scores.gather(1, torch.tensor(ids)[1:, None])[start - 1 :].sum().item())
    return torch.tensor(logprobs).view(-1, 2)


@pytest.mark.parametrize("how", ["precompute", "online"])
def test_reference_of_dpo_is_the_base_with_the_first_adapter(base, tmp_path, how):
    first = whet.train(config_of(base, tmp_path, "first", {"rank": 4})).directory
    objective = {"kind": "dpo", "beta": 0.5, "reference": how}
    run = {"steps": 3, "batch_size": 3}
    result = whet.train(
        config_of(first, tmp_path, "dpo", {"continue": True}, objective=objective, data=PAIRS, run=run)
    )
    assert eval_losses(result)[0] == pytest.approx(math.log(2), abs=1e-6), "the policy is the reference"
    tokenizer = whet.load(base)[1]

    def peft_logprobs(adapter):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        return completion_logprobs(PeftModel.from_pretrained(model, adapter).eval().double(), tokenizer)

    ratios = peft_logprobs(result.directory / "final") - peft_logprobs(first / "final")
    expected = -F.logsigmoid(0.5 * (ratios[:, 0] - ratios[:, 1])).mean().item()
    assert abs(expected - math.log(2)) > 1e-3
    assert eval_losses(result)[-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_reference_of_grpo_shares_the_base_weights(base, tmp_path, kind):
    first = whet.train(config_of(base, tmp_path, "first", {"kind": kind, "rank": 4})).directory
    config = config_of(
        first,
        tmp_path,
        "grpo",
        {"continue": True},
        objective={
            "kind": "grpo", "beta": 0.1, "group_size": 3, "max_new_tokens": 6, "reward_workers": 1,
            "rewards": [{"function": "length", "arguments": {"longest": 2, "margin": 20}}],
        },
        data={"train": "synth:sums:10", "valid": None, "pack": False},
        run={"batch_size": 2, "steps": 2},
    ) | {"eval": {}}  # fmt: skip
    plan = plan_run(validate_config(config), suggest=False)
    with open_assembly(validate_config(config)) as work:
        reference, model = work.build.frozen["reference"], work.model
        trained = dict(model.named_parameters())
        adapters = 0
        for name, parameter in reference.named_parameters():
            assert (parameter is trained[name]) == (not trained[name].requires_grad)
            assert not parameter.requires_grad or parameter is trained[name]
            adapters += parameter.nbytes if parameter is not trained[name] else 0
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1)
        expected, _ = whet.load(first, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            assert torch.equal(reference(tokens()), expected(tokens()))
            assert not torch.equal(model(tokens()), expected(tokens()))
    assert plan.memory.other_models == adapters
    assert not whet.train(config).unfinished


def test_classifier_continues_with_its_head(base, tmp_path):
    records = [{"input": f"{word} {i}", "label": word} for i in range(8) for word in ("yes", "no")]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    sections = {
        "objective": {"kind": "classify", "classes": ["yes", "no"]},
        "data": {"train": str(path), "valid": str(path)},
    }
    first = whet.train(config_of(base, tmp_path, "first", {"rank": 4}, **sections))
    for number, name in enumerate((first.directory, first.directory / "checkpoints" / "step-000004")):
        second = whet.train(config_of(name, tmp_path, f"second-{number}", {"continue": True}, **sections))
        assert eval_losses(second)[0] == pytest.approx(eval_losses(first)[-1], rel=1e-6)
        whet.Classifier.load(second.directory)
    other = {**sections, "objective": {"kind": "classify", "classes": ["no", "yes"]}}
    with pytest.raises(ConfigError, match=r"objective.classes is \['no', 'yes'\], but the classifier .* has"):
        whet.train(config_of(first.directory, tmp_path, "third", {"continue": True}, **other))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": 8}, "method.rank is 8, but the adapter .* has 4"),
        ({"alpha": 8}, "method.alpha is 8, but the adapter .* has 16"),
        ({"variant": "dora"}, "method.variant is dora, but the adapter .* has lora"),
        ({"kind": "qlora"}, "method.kind is qlora, but the adapter .* has lora"),
        (
            {"targets": "mlp"},
            r"method.targets is mlp \(down_proj, gate_proj, up_proj, 3 layers\), but it is "
            r"k_proj, o_proj, q_proj, v_proj, 4 layers in the adapter",
        ),
        ({"layers": 2}, r"method.layers is 2 \(indices \[0, 1\]\), but it is \[1\] in the adapter"),
        ({"rank_pattern": {"q_proj": 3}}, r"gives .*q_proj 3, but it has 2 in the adapter"),
        ({"alpha_pattern": {"q_proj": 3}}, r"gives .*q_proj 3, but it has 16 in the adapter"),
        (
            {"modules_to_save": ["lm_head"]},
            r"method.modules_to_save is \['lm_head'\], but it is \[\] in the adapter",
        ),
    ],
)
def test_contradicting_keys_are_errors_that_name_both_values(base, tmp_path_factory, keys, message):
    path = tmp_path_factory.getbasetemp() / "contradictions"
    method = {"rank": 4, "targets": "attention", "layers": 1, "rank_pattern": {"q_proj": 2}}
    if not path.exists():
        whet.train(config_of(base, path, "first", method, run={"steps": 1}))
    config = config_of(path / "runs" / "first", path, "second", {"continue": True, **keys})
    for start in (lambda: check_assembly(validate_config(config)), lambda: whet.train(config)):
        with pytest.raises(ConfigError, match=message):
            start()
    agreeing = config_of(path / "runs" / "first", path, "second", {"continue": True, **method})
    check_assembly(validate_config(agreeing))


def test_dropout_may_change(base, tmp_path):
    first = whet.train(config_of(base, tmp_path, "first", {"rank": 4, "dropout": 0.2}, run={"steps": 1}))
    for method, expected in (({}, 0.2), ({"dropout": 0.0}, 0.0)):
        config = validate_config(config_of(first.directory, tmp_path, "x", {"continue": True, **method}))
        with open_assembly(config) as work:
            assert {m.settings.dropout for m in work.model.modules() if hasattr(m, "settings")} == {expected}


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        ("base", {"continue": True}, "is not an adapter"),
        ("missing", {"continue": True}, "missing does not exist"),
        ("base", {"continue": True, "kind": "full"}, "needs method.kind: lora or qlora"),
    ],
)
def test_continuing_something_else_is_an_error(base, tmp_path, model, method, message):
    name = base if model == "base" else tmp_path / "missing"
    with pytest.raises(ConfigError, match=message):
        whet.train(config_of(name, tmp_path, "second", method))


def test_adapter_of_peft_continues(base, tmp_path):
    torch.manual_seed(1)
    twin = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False),
    )
    twin.save_pretrained(tmp_path / "peft")
    plan = plan_run(validate_config(config_of(tmp_path / "peft", tmp_path, "x", {"continue": True})))
    assert plan.method == "lora"
    result = whet.train(config_of(tmp_path / "peft", tmp_path, "second", {"continue": True}))
    final = json.loads((result.directory / "final" / "adapter_config.json").read_text())
    assert (final["r"], final["lora_alpha"], final["base_model_name_or_path"]) == (4, 6, str(base))
    torch.testing.assert_close(
        peft_logits(base, result.directory / "final"),
        whet.load(result.directory, dtype=torch.float32, device="cpu")[0](tokens()),
        rtol=1e-4,
        atol=1e-5,
    )
