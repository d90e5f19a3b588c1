"""next_token_loss: supervised targets and invalid input."""

import pytest
import torch

from whet.errors import DataError
from whet.objectives.sft import next_token_loss


def formula(model, tokens, lengths, *, end):
    """Compute the loss in float64 on targets offset..length-1, or ..length as in mlx-lm."""
    logits = model.double()(tokens[:, :-1]).log_softmax(-1)
    picked = [
        -logits[row, step - 1, tokens[row, step]]
        for row, (offset, length) in enumerate(lengths.tolist())
        for step in range(1, tokens.shape[1])
        if offset <= step < length + end
    ]
    return torch.stack(picked).mean(), len(picked)


def test_targets_are_from_the_offset_to_the_last_real_token(tiny):
    model, _ = tiny
    tokens = torch.randint(1, 260, (3, 12))
    tokens[1, 7:] = 0  # padding
    tokens[2, 4:] = 0
    lengths = torch.tensor([[0, 12], [3, 7], [1, 4]])
    loss, count = next_token_loss(model, tokens, lengths)
    loss.backward()
    expected, expected_count = formula(model, tokens, lengths, end=0)
    assert count == expected_count == 11 + 4 + 3
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_padding_is_never_a_target(tiny):
    """mlx-lm also counts token `length`, the first padding position. Here its value must not matter."""
    model, _ = tiny
    tokens = torch.randint(1, 260, (2, 9))
    lengths = torch.tensor([[0, 6], [2, 8]])
    loss, count = next_token_loss(model, tokens, lengths)
    changed = tokens.clone()
    changed[0, 6:] = 7
    changed[1, 8:] = 7
    assert torch.equal(next_token_loss(model, changed, lengths)[0], loss)
    theirs, their_count = formula(model, tokens, lengths, end=1)
    other, _ = formula(model, changed, lengths, end=1)
    assert their_count == count + 2
    assert not torch.isclose(theirs, other), "the mistake is real: padding changes their loss"


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (
            torch.zeros(4, dtype=torch.long),
            torch.zeros(4, 2),
            r"tokens must be integers of shape \[rows, at least 2\]",
        ),
        (torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 2), "at least 2"),
        (torch.zeros(2, 5), torch.zeros(2, 2), "must be integers"),
        (torch.zeros(2, 5, dtype=torch.long), torch.zeros(3, 2), r"lengths must have shape \[2, 2\]"),
        (torch.zeros(2, 5, dtype=torch.long), torch.zeros(2), r"lengths must have shape \[2, 2\]"),
        (torch.zeros(2, 5, dtype=torch.long), torch.tensor([[4, 4], [5, 5]]), "no target is supervised"),
    ],
)
def test_invalid_shapes_and_missing_targets_are_errors(tiny, tokens, lengths, message):
    with pytest.raises(DataError, match=message):
        next_token_loss(tiny[0], tokens, lengths)


@pytest.mark.parametrize("place", [0, 5])  # one that is read, and one that is a target only
@pytest.mark.parametrize("number", [-100, 999_999])
def test_token_ids_outside_the_vocabulary_are_errors(tiny, number, place):
    tokens = torch.ones(1, 6, dtype=torch.long)
    tokens[0, place] = number
    with pytest.raises(DataError, match=f"token id {number} is outside the model's vocabulary of "):
        next_token_loss(tiny[0], tokens, torch.tensor([[0, 6]]))


def test_any_token_id_is_allowed_after_the_last_target(tiny):
    tokens = torch.ones(1, 6, dtype=torch.long)
    expected, _ = next_token_loss(tiny[0], tokens, torch.tensor([[0, 5]]))
    tokens[0, 5] = -100
    assert torch.equal(next_token_loss(tiny[0], tokens, torch.tensor([[0, 5]]))[0], expected)
