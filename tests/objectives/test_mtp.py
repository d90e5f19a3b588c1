"""Multi-token prediction: the loss matches a reference, is causal, and heads learn later tokens."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

import whet
from tiny import random_examples, run_config, write_tiny_model
from whet.config.load_config import validate_config
from whet.config.objectives.mtp import MTPBlock
from whet.data.batches import make_batch
from whet.data.tokens.examples import Example
from whet.errors import ConfigError, DataError, ModelError
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.models.mtp import default_block_spec, new_prediction_heads
from whet.models.transformers_bridge import Bridge
from whet.objectives.mtp import MultiTokenPrediction
from whet.objectives.sft import SFT
from whet.ops.attention import Layout
from whet.training.loss import evaluate_loss
from whet.training.trainer import Trainer

EPS = 1e-6


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x, theta=10_000.0):
    """Apply rotary positions to [heads, T, D], pairing channel i with i + D/2."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None].double() * theta ** -(torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def llama_layer(x, w, prefix, *, heads=4, kv_heads=2):
    """Compute a llama layer on x [T, D] from its formulas; `w` are its weights by name."""
    size = w[f"{prefix}self_attn.q_proj.weight"].shape[0] // heads
    y = rms(x, w[f"{prefix}input_layernorm.weight"])
    q, k, v = (
        (y @ w[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(x), -1, size).transpose(0, 1)
        for name in "qkv"
    )
    q, k = rotate(q), rotate(k)
    k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
    scores = q @ k.transpose(1, 2) / size**0.5
    future = torch.ones(len(x), len(x)).triu(1).bool()
    mixed = (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
    x = x + mixed @ w[f"{prefix}self_attn.o_proj.weight"].T
    y = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def reference_losses(theirs, heads, examples, layer=llama_layer):
    """Return sum and count of the loss of each depth: transformers' model and the paper's equations, text by text."""
    w = {name: p.double() for name, p in heads.named_parameters()}
    embedding = theirs.get_input_embeddings().weight.double()
    output = theirs.get_output_embeddings().weight.double()
    sums, counts = [0.0] * (len(heads) + 1), [0] * (len(heads) + 1)
    for example in examples:
        tokens = torch.tensor(example.tokens)
        hidden = theirs.model(tokens[None, :-1]).last_hidden_state[0].double()
        for depth in range(len(heads) + 1):
            if depth:  # one position less at each depth: there is no token further ahead
                hidden, ahead = hidden[: len(tokens) - 1 - depth], embedding[tokens[depth:-1]]
                p = f"layers.{depth - 1}."
                pair = (rms(hidden, w[f"{p}hidden_norm.weight"]), rms(ahead, w[f"{p}token_norm.weight"]))
                x = torch.cat(pair, -1) @ w[f"{p}project.weight"].T
                hidden = rms(layer(x, w, f"{p}block."), w[f"{p}norm.weight"])
            logprobs = (hidden @ output.T).log_softmax(-1)
            for place in range(len(hidden)):
                if example.supervised[place + depth + 1]:
                    sums[depth] -= logprobs[place, tokens[place + depth + 1]]
                    counts[depth] += 1
    return sums, counts


@pytest.fixture
def double(tiny_directory):
    """Return the tiny model in float64."""
    return whet.load(tiny_directory, dtype=torch.float64, device="cpu")[0]


def objective_for(model, **settings):
    """Return an objective whose heads are far from their initial weights, so that all weights matter."""
    torch.manual_seed(3)
    objective = MultiTokenPrediction(model, **settings)
    for parameter in objective.heads.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return objective


def arranged(examples):
    yield "packed", [make_batch([examples])]
    yield "two packed rows", [make_batch([examples[:3], examples[3:]])]
    yield "padded", [make_batch([[example] for example in examples], width=60)]
    yield "alone", [make_batch([[example]]) for example in examples]


def totals(objective, model, batches):
    sums, weights = dict.fromkeys(objective.coefficients, 0.0), dict.fromkeys(objective.coefficients, 0.0)
    for batch in batches:
        actual = objective.loss(model, batch).sums
        for term, weight in objective.weights(batch).items():
            sums[term], weights[term] = sums[term] + actual[term], weights[term] + weight
    return sums, weights


def test_loss_matches_the_reference_packed_padded_and_alone(double, tiny_directory):
    theirs = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)
    objective = objective_for(double, n_predict=3)
    examples = random_examples(6, seed=4, shortest=2, longest=20)  # some too short for the last head
    with torch.no_grad():
        sums, counts = reference_losses(theirs, objective.heads, examples)
        assert counts[0] > counts[1] > counts[3] > 0
        for name, batches in arranged(examples):
            actual, weights = totals(objective, double, batches)
            assert list(weights.values()) == counts, name
            for one, other in zip(actual.values(), sums, strict=True):
                assert one.item() == pytest.approx(other.item(), rel=1e-6), name


def test_gradient_of_model_and_heads_matches_the_reference(double, tiny_directory):
    theirs = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64)
    objective = objective_for(double, n_predict=2)
    examples = random_examples(3, seed=8, shortest=6, longest=12)
    double.requires_grad_(True)
    sums, weights = totals(objective, double, [make_batch([examples])])
    sum(objective.coefficients[term] * sums[term] / weights[term] for term in sums).backward()
    actual = [p.grad for p in (*double.parameters(), *objective.heads.parameters())]
    objective.heads.zero_grad()
    sums, counts = reference_losses(theirs, objective.heads, examples)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    (means[0] + 0.3 * (means[1] + means[2]) / 2).backward()
    mirror = dict(theirs.named_parameters())
    names = [double.hf_name(name) for name, _ in double.named_parameters()]
    expected = [*(mirror[name].grad for name in names), *(p.grad for p in objective.heads.parameters())]
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def gemma2(directory):
    settings = Gemma2Config(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=6, final_logit_softcapping=5.0, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Gemma2ForCausalLM(settings).save_pretrained(directory)


def gpt2(directory):
    settings = GPT2Config(
        vocab_size=260, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    GPT2LMHeadModel(settings).save_pretrained(directory)


def cohere(directory):
    settings = CohereConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=0.25, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    CohereForCausalLM(settings).save_pretrained(directory)


@pytest.mark.parametrize("family", [gemma2, gpt2, cohere])
def test_heads_share_the_embedding_and_output_head_of_any_model(family, tmp_path):
    """Includes scales and logit caps; cohere runs through the bridge. Packed documents match single ones."""
    torch.manual_seed(0)
    family(tmp_path)
    model, _ = whet.load(tmp_path, dtype=torch.float64, device="cpu")
    assert isinstance(model, Bridge) == (family is cohere)
    objective = objective_for(model, n_predict=2)
    examples = random_examples(5, seed=6, shortest=4, longest=14)
    scale = 32**0.5 if family is gemma2 else 1.0
    rows = model.embed(torch.arange(260)[None])[0]
    torch.testing.assert_close(
        rows, scale * (model.model.get_input_embeddings() if family is cohere else model.embed_tokens).weight
    )
    expected = [0.0, 0.0, 0.0]
    with torch.no_grad():
        for example in examples:
            tokens = torch.tensor(example.tokens)
            state = model.hidden(tokens[None, :-1])
            for depth in range(3):
                if depth:
                    ahead = model.embed(tokens[None, depth:-1])
                    state = objective.heads.advance(
                        depth, state[:, : ahead.shape[1]], ahead,
                        positions=torch.arange(ahead.shape[1])[None], layout=Layout(),
                    )  # fmt: skip
                logits = state[0] @ model.head().weight.T
                logits = 5 * (logits / 5).tanh() if family is gemma2 else logits
                logits = logits * 0.25 if family is cohere else logits
                losses = F.cross_entropy(logits, tokens[depth + 1 :], reduction="none")
                expected[depth] += losses[torch.tensor(example.supervised[depth + 1 :])].sum().item()
        for name, batches in arranged(examples):
            actual, _ = totals(objective, model, batches)
            assert [value.item() for value in actual.values()] == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("packed", [False, True])
def test_predictions_do_not_depend_on_targets_or_later_tokens(packed, tmp_path):
    """Every token of the row is another one, and the head is not tied: a row of the embedding's gradient
    is the gradient at that token as an input."""
    write_tiny_model(tmp_path, tie_word_embeddings=False)
    model, _ = whet.load(tmp_path, dtype=torch.float64, device="cpu")
    model.requires_grad_(True)
    objective = objective_for(model, n_predict=3)
    lengths = (5, 8, 6) if packed else (9,)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    texts = [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    for text in texts:
        for target in text[1:]:
            rows = [[Example(t, [token == target for token in t], "") for t in texts]]
            for depth in range(4):
                model.zero_grad()
                batch = make_batch(rows)
                [term] = [
                    t for t in objective.coefficients if t.endswith(str(depth) if depth else "main_loss")
                ]
                objective.loss(model, batch).sums[term].backward()
                seen = (model.embed_tokens.weight.grad != 0).any(-1).nonzero()[:, 0].tolist()
                reachable = target - text[0] > depth  # there is a position for the head to stand at
                assert seen == (text[: target - text[0]] if reachable else [])
                assert objective.weights(batch)[term] == reachable


def micro_batch_splits(examples):
    yield "packed", [make_batch([examples])]
    yield "padded", [make_batch([[example] for example in examples])]
    yield "one by one", [make_batch([[example]]) for example in examples]
    yield "uneven", [make_batch([examples[:1]]), make_batch([examples[1:4]]), make_batch([examples[4:]])]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_gradient_does_not_depend_on_the_micro_batches(tiny_directory, method):
    examples = random_examples(6, shortest=2)
    config = validate_config(
        {
            "model": str(tiny_directory),
            "data": {"train": "unused"},
            "run": {"steps": 3, "batch_size": 6, "precision": "fp32"},
        }
    )
    results = {}
    for name, micro_batches in micro_batch_splits(examples):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
        torch.manual_seed(0)
        if method == "lora":
            whet.attach_lora(model, rank=4)
        else:
            model.requires_grad_(True)
        trainer = Trainer(model, objective_for(model, n_predict=3), [], config)
        seen = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_, seen=seen, trainer=trainer: seen.extend(
                p.grad.clone().flatten() for p in trainer.trained if p.grad is not None
            )
        )
        metrics = trainer.step(micro_batches)
        results[name] = metrics, torch.cat(seen)
        assert metrics["total_loss"] == pytest.approx(metrics["loss"], rel=1e-6)
        assert metrics["loss"] == pytest.approx(metrics["main_loss"] + 0.3 * metrics["mtp_loss"], rel=1e-6)
    metrics, expected = results["padded"]
    for name, (actual, gradient) in results.items():
        assert (gradient - expected).norm() < 2e-6 * expected.norm(), name
        for key in ("main_loss", "mtp_loss", "total_loss"):
            assert actual[key] == pytest.approx(metrics[key], rel=1e-5), name


def test_evaluation_reports_three_losses_and_the_perplexity_of_the_model(tiny_directory):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    objective = objective_for(model, n_predict=2, mtp_weight=0.5)
    examples = random_examples(6, seed=2, shortest=5)
    batches = [make_batch([examples[:4]]), make_batch([examples[4:]])]
    sums, weights = totals(objective, model, batches)
    means = {term: sums[term].item() / weights[term] for term in sums}
    config = validate_config(run_config(tiny_directory, "unused"))
    trainer = Trainer(model.requires_grad_(True), objective, [], config)
    actual = trainer.evaluate(batches)
    plain = evaluate_loss(model, SFT(), batches, precision=trainer.precision)
    mtp = (means["mtp_loss_1"] + means["mtp_loss_2"]) / 2
    assert actual["eval_main_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert actual["eval_mtp_loss"] == pytest.approx(mtp, rel=1e-5)
    assert actual["eval_loss"] == pytest.approx(means["main_loss"] + 0.5 * mtp, rel=1e-5)
    assert actual["eval_total_loss"] == pytest.approx(actual["eval_loss"], rel=1e-6)
    assert actual["eval_perplexity"] == pytest.approx(plain["eval_perplexity"], rel=1e-6)


def test_texts_too_short_for_a_head_skip_it(tiny_directory):
    model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
    objective = objective_for(model.requires_grad_(True), n_predict=2)
    config = validate_config(run_config(tiny_directory, "unused", optim={"weight_decay": 0.0}))
    trainer = Trainer(model, objective, [], config)
    before = [[p.clone() for p in head.parameters()] for head in objective.heads.layers]
    batch = make_batch([[Example([1, 2, 3], [True] * 3, "")] * 2])
    assert objective.weights(batch) == {"main_loss": 4, "mtp_loss_1": 2, "mtp_loss_2": 0}
    first = objective.loss(model, batch).sums["mtp_loss_1"].item() / 2
    assert trainer.step([batch])["mtp_loss"] == pytest.approx(first / 2, rel=1e-5)
    moved = [
        any(not torch.equal(p, q) for p, q in zip(old, head.parameters(), strict=True))
        for old, head in zip(before, objective.heads.layers, strict=True)
    ]
    assert moved == [True, False]


def test_losses_of_token_rows(double):
    objective, tokens = objective_for(double, n_predict=2), torch.randint(260, (3, 9))
    losses = objective.losses(double, tokens)
    examples = [Example(row, [True] * 9, "") for row in tokens.tolist()]
    sums, _ = totals(objective, double, [make_batch([examples])])
    main, first, second = (value / count for value, count in zip(sums.values(), (24, 21, 18), strict=True))
    expected = {"main_loss": main, "mtp_loss": (first + second) / 2}
    expected["total_loss"] = expected["main_loss"] + 0.3 * expected["mtp_loss"]
    assert {k: v.item() for k, v in losses.items()} == pytest.approx(
        {k: v.item() for k, v in expected.items()}
    )
    losses["total_loss"].backward()
    assert all(p.grad is not None for p in objective.heads.parameters())


def test_token_weights_apply_at_every_depth(double):
    objective = objective_for(double, n_predict=2)
    [example] = random_examples(1, seed=9, shortest=12, longest=12)
    batch = make_batch([[example]])
    from dataclasses import replace

    weights = torch.rand(batch.tokens.shape, dtype=torch.float64)
    actual, units = totals(objective, double, [replace(batch, weights=weights)])
    for depth, term in enumerate(actual):
        each = 0.0
        for place in range(depth, 11):
            one = [index == place + 1 for index in range(12)]
            alone = make_batch([[Example(example.tokens, one, "")]])
            if example.supervised[place + 1]:
                each += weights[0, place].item() * objective.loss(double, alone).sums[term].item()
        assert actual[term].item() == pytest.approx(each, rel=1e-6)
        chosen = torch.tensor(example.supervised[depth + 1 :])
        assert units[term] == pytest.approx(weights[0, depth:][chosen].sum().item(), rel=1e-6)


def test_gradient_checkpointing_does_not_change_gradients(tiny_directory):
    batch, actual = make_batch([random_examples(4, seed=3)]), []
    for recompute in (False, True):
        model, _ = whet.load(tiny_directory, dtype=torch.float32, device="cpu")
        model.requires_grad_(True).grad_checkpoint = recompute
        objective, calls = objective_for(model), []
        objective.heads.layers[1].block.mlp.register_forward_pre_hook(lambda *_, c=calls: c.append(1))
        sum(objective.loss(model, batch).sums.values()).backward()
        actual.append([p.grad for p in (*model.parameters(), *objective.heads.parameters())])
        assert len(calls) == 1 + recompute
    assert all(torch.equal(one, other) for one, other in zip(*actual, strict=True))


def counting(count, *, seed=0, vocab=23, length=24):
    """Return rows in which the token after t is 7 t + 3."""
    rows = [torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))]
    while len(rows) < length:
        rows.append((7 * rows[-1] + 3) % vocab)
    return torch.stack(rows, 1)


def test_heads_learn_the_tokens_after_the_next_one(tiny_directory):
    """Uses the Trainer from Python."""
    torch.manual_seed(0)
    model = new_decoder(preset_spec("nano", d_model=32, heads=2, layers=1, width=64, vocab_size=23), seed=0)
    objective = MultiTokenPrediction(model, n_predict=2)
    batches = (
        [make_batch([[Example(row, [True] * 24, "")] for row in counting(16, seed=step).tolist()])]
        for step in range(60)
    )
    config = run_config(tiny_directory, "unused", optim={"lr": 1e-2, "warmup": 0}, run={"steps": 60})
    Trainer(model, objective, batches, validate_config(config)).fit()
    tokens = counting(64, seed=99)
    with torch.no_grad():
        state, positions = model.hidden(tokens), torch.arange(tokens.shape[1])[None]
        for depth in (1, 2):
            ahead = model.embed(tokens).roll(-depth, 1)
            state = objective.heads.advance(depth, state, ahead, positions=positions, layout=Layout())
            guesses = model.logits(state).argmax(-1)[:, : -depth - 1]
            right = (guesses == tokens[:, depth + 1 :]).float().mean().item()
            assert right > 0.9, f"head {depth}: {right:.2f}, and chance is {1 / 23:.2f}"


def test_default_block_is_the_last_layer_of_the_model(tmp_path):
    spec = preset_spec("nano", vocab_size=30, pattern="*lf", layers=3)
    model = new_decoder(spec, seed=0)
    assert new_prediction_heads(model, 2).spec.blocks == (spec.blocks[1],) * 2  # the last one with attention
    own = default_block_spec(128, MTPBlock(heads=2, kv_heads=1, width=40, feedforward="gelu", bias=True))
    heads = new_prediction_heads(model, 1, own)
    assert heads.layers[0].block.self_attn.k_proj.weight.shape == (64, 128)
    assert heads.layers[0].block.mlp.up_proj.weight.shape == (40, 128)
    assert heads.layers[0].block.mlp.up_proj.bias is not None
    alibi = new_decoder(preset_spec("nano", vocab_size=30, positions="alibi"), seed=0)
    tokens, sink = torch.randint(30, (2, 9)), []
    latent = default_block_spec(128, MTPBlock(attention="latent"))
    for one, block in ((alibi, None), (alibi, default_block_spec(128)), (model, latent)):
        sink.append(objective_for(one, block_config=block).losses(one, tokens)["mtp_loss"])
    assert all(loss.isfinite() for loss in sink)


def test_invalid_input_is_an_error(tiny, tiny_directory, tmp_path):
    model, _ = tiny
    with pytest.raises(ConfigError, match="n_predict=0 must be at least 1"):
        MultiTokenPrediction(model, n_predict=0)
    with pytest.raises(
        ConfigError, match="mtp_weight must be > 0, not 0: otherwise the heads are not trained"
    ):
        MultiTokenPrediction(model, mtp_weight=0)
    with pytest.raises(DataError, match=r"tokens must be \[rows, at least 4\] for 2 heads, not \[1, 3\]"):
        MultiTokenPrediction(model).losses(model, torch.zeros(1, 3, dtype=torch.long))
    for objective, message in (
        ({"n_predict": 0}, "objective.n_predict"),
        ({"weight": 0}, "objective.weight"),
        ({"block": {"depth": 3}}, "objective.block.depth"),
        ({"block": {"heads": 5}}, "objective.block: d_model=32 is not a multiple of heads=5"),
        ({"block": {"attention": "window"}}, "objective.block: windowed attention needs a window size"),
    ):
        config = run_config(tiny_directory, tmp_path, objective={"kind": "mtp", **objective})
        with pytest.raises(ConfigError, match=message):
            whet.train(config)
    (tmp_path / "short.jsonl").write_text('{"text": "abc"}\n' * 4)
    short = run_config(
        tiny_directory, tmp_path,
        objective={"kind": "mtp", "n_predict": 7}, data={"train": str(tmp_path / "short.jsonl"), "valid": None},
    )  # fmt: skip
    with pytest.raises(
        DataError, match=r"train: the longest text has \d tokens, but the last of 7 heads needs 9"
    ):
        whet.train(short)
    narrow = new_decoder(preset_spec("nano", vocab_size=30), seed=0)
    narrow.embed = lambda tokens: torch.zeros(*tokens.shape, 64)
    with pytest.raises(ModelError, match="has 64 channels and its output head 128"):
        MultiTokenPrediction(narrow)
