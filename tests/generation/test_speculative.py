"""Self-speculative decoding produces the tokens of plain greedy decoding, however good the drafts are."""

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, MambaConfig, MambaForCausalLM

import whet
from tiny import random_examples, run_config
from whet.errors import DataError, ModelError
from whet.generation.engine import generate_tokens
from whet.generation.speculative import speculate
from whet.model_io.load import load_with_heads
from whet.models.from_scratch.init_weights import new_decoder
from whet.models.from_scratch.presets import preset_spec
from whet.models.mtp import new_prediction_heads
from whet.objectives.mtp import MultiTokenPrediction
from whet.ops.attention import Layout


def randomized_heads(model, count):
    """Return heads with large random weights, whose drafts are as good as random."""
    torch.manual_seed(1)
    heads = new_prediction_heads(model, count)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return heads


def greedy_tokens(model, prompt, max_tokens, stops=()):
    return generate_tokens(model, [prompt], max_tokens=max_tokens, stop_tokens=set(stops))[0]


def prompts(count=4):
    return [example.tokens for example in random_examples(count, seed=1, shortest=1, longest=25)]


@pytest.fixture(scope="module")
def counting_model():
    """A small model with heads, trained on rows in which each token determines the next."""
    torch.manual_seed(0)
    model = new_decoder(preset_spec("nano", d_model=32, heads=2, layers=1, width=64, vocab_size=23), seed=0)
    objective = MultiTokenPrediction(model, n_predict=3, mtp_weight=1.0)
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.heads.parameters()], lr=1e-2)
    for _ in range(50):
        rows = [torch.randint(23, (16,))]
        while len(rows) < 20:
            rows.append((7 * rows[-1] + 3) % 23)
        optimizer.zero_grad()
        objective.losses(model, torch.stack(rows, 1))["total_loss"].backward()
        optimizer.step()
    return model, objective.heads


@pytest.mark.parametrize("count", [1, 2, 4])
def test_bad_drafts_do_not_change_tokens(tiny, count):
    model, _ = tiny
    heads = randomized_heads(model, count)
    for prompt in prompts():
        result = speculate(model, heads, prompt, max_tokens=30)
        assert result.tokens == greedy_tokens(model, prompt, 30)
        assert result.guessed > 10
        assert result.passes == 30 - result.accepted


def test_good_drafts_save_forward_passes(counting_model):
    model, heads = counting_model
    guessed = accepted = 0
    for start in range(0, 23, 8):
        result = speculate(model, heads, [start], max_tokens=60)
        assert result.tokens == greedy_tokens(model, [start], 60)
        assert result.passes == 60 - result.accepted
        guessed, accepted = guessed + result.guessed, accepted + result.accepted
        assert result.acceptance == result.accepted / result.guessed
    assert accepted > 0.8 * guessed
    assert result.passes < 25


def test_drafts_equal_heads_without_cache(counting_model, monkeypatch):
    """The drafts of each round equal those of a full forward pass over the decoded tokens."""
    model, heads = counting_model
    from whet.generation import speculative

    rounds = []
    original = speculative._Drafter.draft

    def recorded(self, hidden, known, *, count):
        result = original(self, hidden, known, count=count)
        rounds.append((list(known), result))
        return result

    monkeypatch.setattr(speculative._Drafter, "draft", recorded)
    torch.manual_seed(0)
    speculate(model, heads, torch.randint(23, (9,)).tolist(), max_tokens=24)
    assert len(rounds) > 5
    for known, result in rounds:
        tokens = list(known)
        with torch.no_grad():
            state = model.hidden(torch.tensor([known[:-1]]))
            positions = torch.arange(len(known) - 1)[None]
            for depth in range(1, len(result) + 1):
                later = model.embed(torch.tensor([tokens[depth:]]))
                state = heads.advance(depth, state, later, positions=positions, layout=Layout())
                tokens.append(model.logits(state[0, -1]).argmax().item())
        assert tokens[len(known) :] == result


def test_stop_tokens_and_limits_equal_plain_decoding(counting_model):
    model, heads = counting_model
    unstopped = greedy_tokens(model, [5], 20)
    for stop in unstopped[:7]:
        assert speculate(model, heads, [5], max_tokens=20, stop_tokens={stop}).tokens == greedy_tokens(
            model, [5], 20, {stop}
        )
    for limit in range(6):
        assert speculate(model, heads, [5], max_tokens=limit).tokens == unstopped[:limit]
    long = torch.randint(23, (model.max_positions - 5,)).tolist()
    assert speculate(model, heads, long, max_tokens=20).tokens == greedy_tokens(model, long, 20)
    assert len(greedy_tokens(model, long, 20)) == 5
    with pytest.raises(DataError, match="an empty prompt"):
        speculate(model, heads, [], max_tokens=3)


@pytest.mark.parametrize(
    "changes", [{"attention": "window", "window": 5}, {"attention": "latent"}, {"positions": "alibi"}]
)
def test_other_layer_kinds(changes):
    model = new_decoder(preset_spec("nano", vocab_size=40, layers=2, **changes), seed=0)
    for parameter in model.parameters():
        parameter.data *= 3
    heads = randomized_heads(model, 2)
    result = speculate(model, heads, [1, 2, 3], max_tokens=40)
    assert result.tokens == greedy_tokens(model, [1, 2, 3], 40)


def test_bridge_models_need_a_cache_that_can_be_truncated(tmp_path):
    torch.manual_seed(0)
    shared = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    no_special_tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    CohereForCausalLM(
        CohereConfig(**shared, **no_special_tokens, intermediate_size=48, num_attention_heads=4)
    ).save_pretrained(tmp_path / "cohere")
    MambaForCausalLM(MambaConfig(**shared, **no_special_tokens, state_size=4)).save_pretrained(
        tmp_path / "mamba"
    )
    model, _ = whet.load(tmp_path / "cohere", dtype=torch.float32, device="cpu")
    result = speculate(model, randomized_heads(model, 2), [5, 6, 7], max_tokens=20)
    assert result.tokens == greedy_tokens(model, [5, 6, 7], 20)
    model, _ = whet.load(tmp_path / "mamba", dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="recurrent states cannot be truncated"):
        speculate(model, randomized_heads(model, 2), [5, 6, 7], max_tokens=20)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_checkpoint_is_loaded_with_its_heads(tiny_directory, tmp_path, kind):
    config = run_config(
        tiny_directory, tmp_path,
        method={"kind": "full"} if kind == "full" else {"kind": "lora", "rank": 4},
        objective={"kind": "mtp", "n_predict": 2, "block": {"heads": 2, "width": 24}}, run={"steps": 2},
    )  # fmt: skip
    result = whet.train(config)
    path = result.directory / "checkpoints" / "step-000002"
    model, heads, tokenizer = load_with_heads(path, dtype=torch.float32, device="cpu")
    from safetensors.torch import load_file

    stored = load_file(path / "weights.safetensors")
    for name, parameter in heads.named_parameters():
        assert torch.equal(parameter, stored[f"heads.{name}"])
    prompt = tokenizer("turn on")["input_ids"]
    final, _ = whet.load(result.directory, dtype=torch.float32, device="cpu")
    assert speculate(model, heads, prompt, max_tokens=12).tokens == greedy_tokens(final, prompt, 12)
    with pytest.raises(ModelError, match="is not a checkpoint of a run with objective.kind: mtp"):
        load_with_heads(result.directory / "final")
