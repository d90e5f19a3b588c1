"""Beam search equals that of transformers, and finds the optimum if the beams cover all continuations."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

import whet
from tiny import random_examples, write_tiny_model
from whet.errors import ConfigError, DataError
from whet.generation.beam_search import beam_search

PROMPTS = [example.tokens for example in random_examples(4, seed=1, shortest=2, longest=20)]
STOPS = [*range(0, 260, 9)]  # many, so that hypotheses end at all lengths


@pytest.fixture(scope="module")
def reference(tiny_directory):
    return AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32)


CASES = [
    (1, STOPS, 1.0),
    *itertools.product([3], [STOPS, STOPS[:3], []], [0.0, 1.0, 2.5, -1.0]),
    (5, STOPS, 1.0),
]


@pytest.mark.parametrize(("beams", "stops", "length_penalty"), CASES)
def test_hypotheses_and_scores_equal_transformers(tiny, reference, beams, stops, length_penalty):
    for prompt in PROMPTS:
        hypotheses = beam_search(
            tiny[0], prompt, beams=beams, max_tokens=9, stop_tokens=set(stops), length_penalty=length_penalty
        )
        settings = {"num_beams": beams, "num_return_sequences": beams, "length_penalty": length_penalty}
        if beams == 1:
            settings = {}
        theirs = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=stops or -1,
            pad_token_id=259,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        expected = [
            [token for token in row[len(prompt) :].tolist() if token != 259] for row in theirs.sequences
        ]
        assert [hypothesis.tokens for hypothesis in hypotheses] == expected
        assert all(hypothesis.finished == (hypothesis.tokens[-1] in stops) for hypothesis in hypotheses)
        if beams > 1:
            scores = torch.tensor([hypothesis.score for hypothesis in hypotheses])
            torch.testing.assert_close(scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)


def test_exhaustive_beams_find_the_best_continuations(tmp_path):
    """Against all 7**3 continuations, scored by full forwards in float64."""
    write_tiny_model(tmp_path, vocab_size=7, eos_token_id=None)
    model = whet.load(tmp_path, dtype=torch.float64, device="cpu")[0]
    prompt = [1, 2, 3]
    sequences = torch.tensor([[*prompt, *rest] for rest in itertools.product(range(7), repeat=3)])
    with torch.no_grad():
        logprobs = model(sequences)[:, 2:-1].log_softmax(-1).gather(2, sequences[:, 3:, None])[..., 0].sum(1)
    best, indices = logprobs.topk(5)
    hypotheses = beam_search(model, prompt, beams=49, max_tokens=3, stop_tokens=set())[:5]
    assert [hypothesis.tokens for hypothesis in hypotheses] == sequences[indices, 3:].tolist()
    torch.testing.assert_close(torch.tensor([h.logprob for h in hypotheses], dtype=torch.float64), best)


def test_invalid_input_is_rejected(tiny):
    model, _ = tiny
    settings = {"max_tokens": 5, "stop_tokens": set()}
    with pytest.raises(ConfigError, match="beams=0 must be at least 1"):
        beam_search(model, [1], beams=0, **settings)
    with pytest.raises(DataError, match="empty prompt"):
        beam_search(model, [], beams=2, **settings)
    with pytest.raises(DataError, match="a prompt of 512 tokens leaves no room"):
        beam_search(model, [1] * 512, beams=2, **settings)
