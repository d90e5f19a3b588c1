"""The weighted loss, sum(w * nll) / sum(w) over a step, against transformers in float64 and over processes."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from tools.golden import stop_half_way
from transformers import LlamaForCausalLM

import whet
from distributed.checks import recorded_train
from distributed.harness import run_world
from tiny import run_commands, run_config, weighted_examples, weights_of
from whet.config.load_config import validate_config
from whet.data.batches import step_batches
from whet.data.packing import StepSettings
from whet.data.tokens.examples import lengths_of
from whet.errors import DataError
from whet.hardware import Precision
from whet.objectives.mtp import MultiTokenPrediction
from whet.objectives.sft import SFT
from whet.reporting.data.data_text import DataText
from whet.reporting.data.data_wording import split_rows
from whet.runs.inspect_data import view_data
from whet.training.loss import evaluate_loss, total_weights, weighted_loss

EXACT = Precision(torch.float64, torch.float64, torch.float64, "a test")


def formula(logits_of, examples):
    """Return sum(w * nll) / sum(w), one example at a time."""
    numerator, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for example in examples:
        ids = torch.tensor(np.asarray(example.tokens, dtype=np.int64))
        weights = torch.tensor(weights_of(example)[1:]).double()
        logprobs = logits_of(ids[None])[0, :-1].log_softmax(-1)
        numerator = numerator - (weights * logprobs.gather(1, ids[1:, None])[:, 0]).sum()
        denominator += float(weights.sum())
    return numerator / denominator


@pytest.fixture(scope="module")
def reference(tiny_directory):
    """Return examples, and their loss and gradients by the formula; transformers computes the same loss."""
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    model.double().requires_grad_(True)
    examples = weighted_examples(14)
    loss = formula(model, examples)
    loss.backward()
    theirs = LlamaForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)
    expected = formula(lambda ids: theirs(ids).logits, examples)
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)  # both compute RoPE in float32
    return examples, loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro", [40, 60, 150, 2000])
@pytest.mark.parametrize("pack", [True, False])
def test_loss_and_gradient_match_the_formula(tiny, reference, micro, pack):
    examples, expected, gradients = reference
    model = tiny[0].double()
    model.requires_grad_(True)
    settings = StepSettings(
        len(examples), None, micro if pack else max(micro, 64), pack=pack, order="sequential"
    )
    batches = step_batches(range(len(examples)), examples, lengths_of(examples), settings)
    assert len(batches) > 1 or micro == 2000
    weights = total_weights(SFT(), batches)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss, _ = weighted_loss(model, SFT(), batch, weights=weights, precision=EXACT)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-12)


def test_evaluation_is_the_weighted_mean_without_bits_per_byte(tiny, reference):
    examples, expected, _ = reference
    settings = StepSettings(None, 100, 100, pack=True, order="sequential")
    batches = step_batches(
        range(len(examples)),
        examples,
        lengths_of(examples),
        settings,
        token_bytes=np.ones(260, dtype=np.int64),
    )
    metrics = evaluate_loss(tiny[0].double(), SFT(), batches, precision=EXACT)
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-10)
    assert "eval_bits_per_byte" not in metrics


def write_records(path, count=24, **fields):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "no" * (n % 3 + 1), "weight": n % 3 / 2},
                {"role": "user", "content": "really?"},
                {"role": "assistant", "content": f"yes{n}"},
            ],
            "weight": 1 + n % 2,
            **fields,
        }
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def config(tiny_directory, tmp_path, name, *, kind="none", **sections):
    path = tmp_path / "train.jsonl"
    if not path.exists():
        write_records(path)
    data = {"train": str(path), "valid": str(path), **sections.pop("data", {})}
    run = {"name": name, "steps": 4, "batch_size": 5, "micro_batch_tokens": 128}
    settings = run_config(
        tiny_directory, tmp_path, data=data, run=run, method={"kind": "full"}, optim={"lr": 1e-3}, **sections
    )
    return settings | {"parallel": {"kind": kind}}


def test_resumed_and_distributed_runs_equal_an_uninterrupted_one(tiny_directory, tmp_path):
    whole = recorded_train(config(tiny_directory, tmp_path, "whole")).results()
    stop_half_way(config(tiny_directory, tmp_path, "resumed"))
    whet.resume(tmp_path / "runs" / "resumed", verbose=0)
    files = [tmp_path / "runs" / name / "final" / "model.safetensors" for name in ("whole", "resumed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    two = {"ddp": config(tiny_directory, tmp_path, "two", kind="ddp")}
    for rank in run_world(2, "train_and_record", out=tmp_path / "world", timeout=120, configs=two):
        assert rank["ddp"]["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert rank["ddp"]["evaluations"][-1]["eval_loss"] == pytest.approx(
            whole["evaluations"][-1]["eval_loss"], rel=1e-5
        )


def test_metrics_count_tokens_with_a_weight(tiny_directory, tmp_path):
    result = whet.train(config(tiny_directory, tmp_path, "counted", data={"order": "sequential"}), verbose=0)
    rows = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    counted = [row["supervised_tokens"] for row in rows if "supervised_tokens" in row]
    # tokens are bytes and the end of a turn; answers with weight 0 do not count
    sizes = [len(f"yes{n}") + 1 + (2 * (n % 3 + 1) + 1 if n % 3 else 0) for n in range(24)]
    assert counted[:4] == [sum(sizes[start : start + 5]) for start in (0, 5, 10, 15)]


MESSAGE = {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]
}
HEAVY_PAIR = {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 2}
HEAVY_CHOSEN = {"prompt": MESSAGE["messages"][:1], "chosen": MESSAGE["messages"][1:], "rejected": "b"}
GRPO = {"kind": "grpo", "group_size": 2, "max_new_tokens": 4, "rewards": [{"function": "length"}]}


@pytest.mark.parametrize(
    ("objective", "record"),
    [
        ({"kind": "dpo"}, HEAVY_PAIR),
        ({"kind": "orpo"}, HEAVY_CHOSEN),
        (
            {"kind": "classify", "classes": ["x", "y"], "valid_share": 0},
            {"input": "a", "label": "x", "weight": 2},
        ),
        ({"kind": "distill", "teacher": "MODEL"}, MESSAGE),
        ({"kind": "distill", "teacher": "MODEL"}, {"text": "a", "weight": 2}),
        ({"kind": "distrust"}, {"text": "a", "auth_weight": 0.5, "prov_entropy": 1.0, "weight": 2}),
        (GRPO, {"prompt": [{"role": "user", "content": "q", "weight": 0.5}]}),
    ],
)
@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_objectives_that_cannot_use_weights_refuse_them(
    tiny_directory, tmp_path, objective, record, on_bad_record
):
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    objective = {key: str(tiny_directory) if value == "MODEL" else value for key, value in objective.items()}
    data = {"valid": None, "on_bad_record": on_bad_record}
    settings = config(tiny_directory, tmp_path, "refused", objective=objective, data=data)
    with pytest.raises(DataError, match="train.jsonl:1: .* has a weight, which this objective cannot use"):
        whet.train(settings, verbose=0)


def test_masks_of_preferences_stay_allowed(tiny_directory, tmp_path):
    chosen = [
        {"role": "assistant", "content": "a", "train": False},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    record = {"prompt": MESSAGE["messages"][:1], "chosen": chosen, "rejected": "b"}
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(record)] * 5))
    settings = config(tiny_directory, tmp_path, "masked", objective={"kind": "orpo"}, data={"valid": None})
    assert whet.train(settings, verbose=0).steps == 4


def test_mtp_weighs_every_head(tiny, reference):
    """With every weight doubled, the mean stays; with weights, it is not that without them."""
    examples, _, _ = reference
    model = tiny[0].double()
    mtp = MultiTokenPrediction(model, n_predict=2)
    mtp.heads.double()

    def mean(examples):
        settings = StepSettings(None, 4000, 4000, pack=True, order="sequential")
        batches = step_batches(range(len(examples)), examples, lengths_of(examples), settings)
        weights = total_weights(mtp, batches)
        losses = [weighted_loss(model, mtp, batch, weights=weights, precision=EXACT)[0] for batch in batches]
        return float(sum(loss.detach() for loss in losses))

    doubled = [replace(one, weights=2 * weights_of(one)) for one in examples]
    unweighted = [replace(one, weights=None) for one in examples]
    assert mean(doubled) == pytest.approx(mean(examples), rel=1e-10)
    assert mean(unweighted) != pytest.approx(mean(examples), rel=1e-3)


def test_data_command_shows_weights(tiny_directory, tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config(tiny_directory, tmp_path, "shown")))
    page = tmp_path / "data.html"
    run_commands(["data", path, "--html", page], cwd=tmp_path)
    assert "weight 2" in page.read_text()
    view = view_data(validate_config(json.loads(path.read_text())), samples=2)
    rows = dict(split_rows(view.splits[0], view))
    assert rows["weights"].startswith("0.5 on ")
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    DataText(console).show(view)
    shown = console.file.getvalue()
    assert "⟦2\u00d7yes1" in shown
    assert "⟦nono" in shown  # 0.5 * 2


def test_objective_that_ignores_weights_is_an_error(tiny, reference):
    class Ignores(SFT):
        uses_token_weights = False

    examples, _, _ = reference
    settings = StepSettings(None, 4000, 4000, pack=True, order="sequential")
    batches = step_batches(range(len(examples)), examples, lengths_of(examples), settings)
    with pytest.raises(DataError, match="this batch has loss weights, which Ignores does not use"):
        total_weights(Ignores(), batches)
