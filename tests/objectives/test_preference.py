"""Preferences: losses match float64 formulas, only responses count, and three kinds of references agree."""

import copy
import json
import math
import shutil

import pytest
import torch

import whet
from tiny import run_config
from whet.config.load_config import validate_config
from whet.data.batches import iter_batches_once, make_batch
from whet.data.packing import StepSettings
from whet.data.sources.source import open_source
from whet.data.tokens.examples import build_pairs
from whet.data.tokens.prepare_dataset import Preparation
from whet.errors import ConfigError, DataError
from whet.hardware import choose_precision
from whet.objectives.preference import Preference, dpo_loss, ipo_loss, odds_ratio_loss, simpo_loss
from whet.runs.assemble import open_assembly
from whet.training.loss import evaluate_loss


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


NUMBERS = [(-5.0, -7.0, -6.0, -6.5), (-30.0, -10.0, -20.0, -11.0), (-2.0, -2.0, -2.0, -2.0)]


def columns(dtype=torch.float64):
    return torch.tensor(NUMBERS, dtype=dtype).T


def test_dpo_and_ipo_match_their_formulas():
    for beta, smoothing in ((0.1, 0.0), (0.5, 0.1)):
        margins = [beta * ((a - c) - (b - d)) for a, b, c, d in NUMBERS]
        expected = [
            -(1 - smoothing) * math.log(sigmoid(m)) - smoothing * math.log(sigmoid(-m)) for m in margins
        ]
        actual = dpo_loss(*columns(), beta=beta, label_smoothing=smoothing)
        assert actual.item() == pytest.approx(sum(expected) / 3)
        squares = [(m / beta - 1 / (2 * beta)) ** 2 for m in margins]
        assert ipo_loss(*columns(), beta=beta).item() == pytest.approx(sum(squares) / 3)
    far = torch.tensor([-1000.0]), torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([0.0])
    assert dpo_loss(*far, beta=1.0).item() == pytest.approx(1000)  # no overflow


def test_simpo_and_orpo_match_their_formulas():
    better, worse = torch.tensor([-0.2, -1.5]).double(), torch.tensor([-0.7, -0.1]).double()
    expected = [
        -math.log(sigmoid(2.0 * (a - b) - 0.5)) for a, b in zip(better.tolist(), worse.tolist(), strict=True)
    ]
    assert simpo_loss(better, worse, beta=2.0, gamma=0.5).item() == pytest.approx(sum(expected) / 2)

    def log_odds(logp):
        return math.log(math.exp(logp) / (1 - math.exp(logp)))

    expected = [
        -math.log(sigmoid(log_odds(a) - log_odds(b)))
        for a, b in zip(better.tolist(), worse.tolist(), strict=True)
    ]
    assert odds_ratio_loss(better, worse).item() == pytest.approx(sum(expected) / 2)
    certain = odds_ratio_loss(torch.tensor([0.0]), torch.tensor([-3.0]))
    assert torch.isfinite(certain)


def pairs(tiny, tmp_path, count=6, *, pack=True, **how):
    store = Preparation(tiny[1], cache=tmp_path / "cache", pairs=True).store(
        open_source(f"synth:house-pairs:{count}")
    )
    return build_pairs(store, **{"max_length": 256, "too_long": "truncate", "pack": pack, **how})


def plain_logprob(model, tokens, learned):
    """Return log p of the supervised tokens of one sequence, from a full softmax in float64."""
    tokens = torch.as_tensor(tokens)
    logs = model(tokens[None, :-1])[0].log_softmax(-1)
    return sum(logs[place - 1, tokens[place]] for place in range(1, len(tokens)) if learned[place])


def test_ipo_with_means_scales_the_margin_by_the_token_count():
    """As in TRL; for responses of equal length all losses shrink by the same factor."""
    sums, tokens = columns(), 7
    assert tokens**2 * ipo_loss(*(sums / tokens), beta=0.1) == pytest.approx(
        ipo_loss(*sums, beta=0.1 / tokens).item()
    )


@pytest.mark.parametrize("kind", ["dpo", "ipo", "ipo-mean", "orpo", "simpo"])
@pytest.mark.parametrize("pack", [True, False])
def test_objective_matches_the_formula_on_full_sequences(tiny, tmp_path, kind, pack):
    model, _ = tiny
    actual = pairs(tiny, tmp_path, 5, pack=pack)
    settings = StepSettings(5, None, 4096, pack=pack)
    for examples in (actual[index] for index in range(len(actual))):
        assert [e.supervised_count > 0 for e in examples] == [True, True]
    beta = 0.3
    kind, _, logprobs = kind.partition("-")
    objective = Preference(kind, beta=beta, gamma=0.7, logprobs=logprobs or "sum")
    exact = copy.deepcopy(model).double()
    logps = [[plain_logprob(exact, e.tokens, e.supervised) for e in actual[index]] for index in range(5)]
    torch.manual_seed(1)
    reference = torch.tensor([[a.item(), b.item()] for a, b in logps]) + torch.randn(5, 2)
    actual.reference_logprobs = reference.double().numpy()
    [(places, batch)] = iter_batches_once(actual, settings)
    result = objective.loss(model, batch)
    weights = objective.weights(batch)
    total = sum(objective.coefficients[term] * value / weights[term] for term, value in result.sums.items())
    total.backward()
    gradient = model.embed_tokens.weight.grad.clone()
    sizes = [[e.supervised_count for e in actual[index]] for index in range(5)]
    means = [
        [logp / size for logp, size in zip(*both, strict=True)] for both in zip(logps, sizes, strict=True)
    ]
    if kind in ("dpo", "ipo"):
        counts = sizes if logprobs == "mean" else [[1, 1]] * 5  # TRL's are per token of each answer
        gaps = [
            (a - r[0]) / m - (b - r[1]) / n
            for (a, b), r, (m, n) in zip(logps, reference, counts, strict=True)
        ]
        each = [-(beta * g).sigmoid().log() if kind == "dpo" else (g - 1 / (2 * beta)) ** 2 for g in gaps]
    elif kind == "simpo":
        each = [-(beta * (a - b) - 0.7).sigmoid().log() for a, b in means]
    else:
        odds = [[m - torch.log1p(-m.exp()) for m in both] for both in means]
        each = [-beta * (a - b).sigmoid().log() for a, b in odds]
    expected = torch.stack(each).mean()
    if kind == "orpo":
        expected = expected - sum(a for a, _ in logps) / sum(a for a, _ in sizes)
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-5)
    expected.backward()
    wanted = exact.embed_tokens.weight.grad
    assert (gradient.double() - wanted).norm() < 1e-4 * wanted.norm()
    shares = {name: (value / weights["loss"]).item() for name, value in result.metrics.items()}
    assert shares["logprob_chosen"] == pytest.approx(sum(a.item() for a, _ in logps) / 5, rel=1e-4)
    assert 0 <= shares["reward_accuracy"] <= 1


def test_only_responses_are_scored(tiny, tmp_path):
    """With other prompts and the same responses, the supervised tokens stay the same."""
    actual = pairs(tiny, tmp_path, 3)
    chosen, rejected = actual[0]
    tokenizer = tiny[1]
    assert tokenizer.decode(
        [t for t, s in zip(chosen.tokens, chosen.supervised, strict=True) if s]
    ).startswith("Done: ")
    assert tokenizer.decode(
        [t for t, s in zip(rejected.tokens, rejected.supervised, strict=True) if s]
    ).startswith('{"room"')


def preference_config(tiny_directory, tmp_path, objective, **sections):
    data = {
        "train": "synth:house-pairs:12",
        "valid": "synth:house-pairs-valid:4",
        "max_length": 256,
        **sections.pop("data", {}),
    }
    return run_config(tiny_directory, tmp_path, objective=objective, data=data, **sections)


@pytest.mark.parametrize("method", [{"kind": "lora", "rank": 4}, {"kind": "full"}])
def test_precomputed_and_online_references_give_the_same_run(tiny_directory, tmp_path, method):
    losses = {}
    for reference in ("precompute", "online", "precompute-again"):
        objective = {"kind": "dpo", "beta": 0.5, "reference": reference.split("-")[0]}
        config = preference_config(
            tiny_directory, tmp_path, objective, method=method, run={"name": reference}
        )
        result = whet.train(config)
        losses[reference] = [row["loss"] for row in result.history if "loss" in row]
        assert result.history[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert "eval_perplexity" not in result.metrics
        assert {"reward_margin", "reward_accuracy", "kl", "logprob_chosen"} <= result.metrics.keys()
        said = (result.directory / "log.txt").read_text()
        if reference == "precompute-again":
            assert "reference: using stored log-probabilities of train" in said
    assert losses["precompute"][0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses["precompute"] == pytest.approx(losses["online"], rel=1e-4)
    assert losses["precompute"] == losses["precompute-again"]


@pytest.mark.parametrize("kind", ["dpo", "ipo", "orpo", "simpo"])
@pytest.mark.parametrize("pack", [True, False])
def test_every_kind_trains_and_resumes_exactly(tiny_directory, tmp_path, kind, pack):
    from whet.training.callbacks import Callback, StopRun

    class StopAt(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 3 else None

    def config(name):
        return preference_config(
            tiny_directory, tmp_path, {"kind": kind}, data={"pack": pack},
            optim={"lr": 1e-3 if kind == "ipo" else 3e-2},
            run={"name": name, "steps": 8, "batch_size": 6},
        )  # fmt: skip

    whole = whet.train(config("whole"))
    assert whole.metrics["eval_reward_margin"] > whole.history[0]["eval_reward_margin"]
    assert whole.metrics["eval_loss"] < whole.history[0]["eval_loss"]
    part = whet.train(config("part"), [StopAt()])
    rest = whet.resume(part.directory)
    losses = [row["loss"] for row in whole.history if "loss" in row]
    assert [row["loss"] for row in (*part.history, *rest.history) if "loss" in row] == losses


@pytest.mark.parametrize("kind", ["orpo", "dpo"])
def test_metrics_do_not_depend_on_the_micro_batches(tiny_directory, tmp_path, kind):
    path = tmp_path / "uneven.jsonl"
    pairs = [
        {"prompt": f"{n}?", "chosen": "yes " * n, "rejected": "no, never " * (9 - n)} for n in range(1, 9)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    actual = []
    for name, micro in (("one", 8192), ("many", 256)):
        config = preference_config(
            tiny_directory, tmp_path, {"kind": kind},
            data={"train": str(path), "valid": str(path)},
            optim={"lr": 3e-2, "warmup": 0},
            run={"name": name, "micro_batch_tokens": micro, "batch_size": 8, "steps": 3},
        )  # fmt: skip
        actual.append(whet.train(config).history)
    assert any(abs(row["kl"]) > 1e-3 for row in actual[0] if "kl" in row) == (kind == "dpo")
    for one, many in zip(*actual, strict=True):
        numbers = {name for name in one if name.startswith(("log", "reward", "eval_", "kl", "loss", "grad"))}
        for name in numbers - {"eval_s"}:
            assert one[name] == pytest.approx(many[name], rel=2e-4, abs=2e-6), name


@pytest.mark.parametrize("curriculum", [None, {"kind": "difficulty", "score": "n"}])
@pytest.mark.parametrize("pack", [True, False])
def test_micro_batches_use_the_token_limit(tiny_directory, tmp_path, pack, curriculum):
    path = tmp_path / "uneven.jsonl"
    pairs = [
        {"prompt": "?", "chosen": "y" * n, "rejected": "n" * (2 * n % 37 + 1), "n": n} for n in range(1, 40)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = preference_config(
        tiny_directory, tmp_path, {"kind": "simpo"},
        data={"train": str(path), "valid": None, "pack": pack, "curriculum": curriculum},
        run={"batch_size": 16, "micro_batch_tokens": 150, "steps": 8},
    )  # fmt: skip
    with open_assembly(validate_config(config)) as work:
        sizes = [batch.tokens.numel() for _ in range(8) for batch in next(work.stream)]
    assert 100 < max(sizes) <= 150


def with_other_layers(directory, to):
    """Save the same model with other linear layers."""
    model, tokenizer = whet.load(directory, dtype=torch.float32, device="cpu")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    whet.save(model, tokenizer, to)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_stored_reference_logprobs_are_those_of_the_reference_model(tiny_directory, tmp_path, method):
    """Also with quantized layers, which are not parameters."""
    with_other_layers(tiny_directory, tmp_path / "other")
    for base in (tiny_directory, tmp_path / "other"):
        config = preference_config(
            base, tmp_path, {"kind": "dpo", "beta": 0.5}, method={"kind": method, "rank": 4},
            run={"name": base.name, "steps": 1},
        )  # fmt: skip
        first = whet.train(config).history[0]
        assert first["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert first["eval_reward_margin"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "bad.jsonl:1: chosen and rejected are the same"),
        (
            {"prompt": "a", "completion": "b"},
            "bad.jsonl:1: a completion record has no completions to compare",
        ),
    ],
)
def test_invalid_preference_records_are_errors(tiny_directory, tmp_path, record, message):
    (tmp_path / "bad.jsonl").write_text(json.dumps(record))
    config = preference_config(
        tiny_directory, tmp_path, {"kind": "dpo"}, data={"train": str(tmp_path / "bad.jsonl")}
    )
    with pytest.raises(DataError, match=message):
        whet.train(config)


def test_responses_that_render_equally_are_errors(tiny_directory, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(tiny_directory, tmp_path / "trims")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trims")
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    tokenizer.save_pretrained(tmp_path / "trims")
    records = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": " b"},
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = preference_config(
        tmp_path / "trims",
        tmp_path,
        {"kind": "dpo"},
        data={"train": str(tmp_path / "bad.jsonl"), "valid": None},
    )
    with pytest.raises(DataError, match="bad.jsonl:2: chosen and rejected are the same"):
        whet.train(config)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"kind": "dpo", "beta": 0}, "objective.beta: Input should be greater than 0"),
        ({"kind": "dpo", "label_smoothing": 0.5}, "objective.label_smoothing: Input should be less than 0.5"),
        ({"kind": "simpo", "gamma": -1}, "objective.gamma: Input should be greater than or equal to 0"),
        ({"kind": "distill", "teacher": "t", "alpha": 1.5}, "objective.alpha: .* less than or equal to 1"),
        ({"kind": "distill", "teacher": "t", "temperature": 0}, "objective.temperature: .* greater than 0"),
        (
            {"kind": "distill", "teacher": [{"model": "t", "weight": -1}]},
            "objective.teacher.0.weight: Input should be greater than 0",
        ),
    ],
)
def test_weights_out_of_range_are_errors(tiny_directory, tmp_path, objective, message):
    with pytest.raises(ConfigError, match=message):
        whet.train(preference_config(tiny_directory, tmp_path, objective))


def test_pairs_that_are_too_long(tiny, tmp_path):
    sizes = sorted({len(side.tokens) for index in range(6) for side in pairs(tiny, tmp_path)[index]})
    cut = pairs(tiny, tmp_path, max_length=sizes[-1] - 3)
    assert cut.sides.length_counts["truncated"] >= 1
    dropped = pairs(tiny, tmp_path, max_length=sizes[-1] - 3, too_long="drop")
    assert len(dropped) == 6 - cut.sides.length_counts["truncated"] - cut.sides.length_counts["dropped"]
    with pytest.raises(DataError, match="data.max_length is"):
        pairs(tiny, tmp_path, max_length=sizes[-1] - 3, too_long="error")
    with pytest.raises(DataError, match="cannot be split"):
        pairs(tiny, tmp_path, too_long="split")
    with pytest.raises(DataError, match="no pair is left"):
        pairs(tiny, tmp_path, max_length=5)


def test_missing_reference_is_an_error(tiny, tmp_path):
    actual = pairs(tiny, tmp_path, 2)
    with pytest.raises(ConfigError, match="dpo needs a reference for synth:house-pairs:2#1"):
        Preference("dpo", beta=0.1).loss(tiny[0], make_batch([[*actual[0], *actual[1]]]))


def test_references_of_another_config_with_the_same_weights_are_not_reused(
    tiny_directory, tmp_path, monkeypatch
):
    monkeypatch.setenv("WHET_TOKENS", str(tmp_path / "tokens"))
    shutil.copytree(tiny_directory, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config |= {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    for place, model in enumerate((tiny_directory, tmp_path / "other")):
        objective = {"kind": "dpo", "reference": "precompute"}
        run = whet.train(preference_config(model, tmp_path, objective, run={"name": f"{place}", "steps": 1}))
        assert run.history[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize("kind", ["simpo", "orpo", "dpo"])
def test_eval_accuracy_is_the_exact_share_of_pairs(tiny, tmp_path, kind):
    """Summed in float32 shares of micro-batches, 7 of 7 pairs gave 1.0000000149."""
    model, all_pairs = tiny[0], pairs(tiny, tmp_path, 7)
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():
        parameter.data *= 0.5
    objective = Preference(kind, beta=0.1, reference=reference if kind == "dpo" else None)
    batches = [make_batch([[*pair]]) for pair in all_pairs]
    precision = choose_precision("fp32", model.device)
    correct = sum(objective.loss(model, batch).metrics["reward_accuracy"].item() for batch in batches)
    for count, expected in ((7, correct / 7), (3, None)):
        accuracy = evaluate_loss(model, objective, batches[:count], precision=precision)[
            "eval_reward_accuracy"
        ]
        assert accuracy * count == round(accuracy * count)
        assert expected is None or accuracy == expected
        assert 0 <= accuracy <= 1
    winners = [batch for batch in batches if objective.loss(model, batch).metrics["reward_accuracy"].item()]
    if winners:
        repeated = (winners * 7)[:7]
        metrics = evaluate_loss(model, objective, repeated, precision=precision)
        assert metrics["eval_reward_accuracy"] == 1.0
