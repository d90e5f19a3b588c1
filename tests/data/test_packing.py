"""Steps and micro-batches: every example once, within limits, in an order fixed by seed and epoch."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import random_examples
from whet.data.batches import IGNORE_INDEX, BatchStream, evaluation_batches, make_batch
from whet.data.packing import StepSettings, fisher_yates, plan_epoch, seeded_permutation, split_step
from whet.errors import ConfigError, DataError

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def sized(*, batch_size=None, batch_tokens=None, micro=64, pack=True, order="shuffle"):
    return StepSettings(batch_size, batch_tokens, micro, pack=pack, order=order)


@given(
    lengths=lengths,
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 5),
    by_tokens=st.booleans(),
    order=st.sampled_from(["shuffle", "sequential"]),
    pack=st.booleans(),
)
def test_epoch_contains_every_example_once_and_steps_fit(lengths, seed, epoch, by_tokens, order, pack):
    size = {"batch_tokens": 90} if by_tokens else {"batch_size": 7}
    limits = sized(**size, order=order, pack=pack)
    steps = list(plan_epoch(lengths, limits, seed=seed, epoch=epoch))
    assert sorted(index for step in steps for index in step) == list(range(len(lengths)))
    assert all(steps)
    for step in steps:
        assert len(step) <= 7 if not by_tokens else sum(lengths[index] for index in step) <= 90
    assert list(plan_epoch(lengths, limits, seed=seed, epoch=epoch)) == steps
    if order == "sequential":
        assert [index for step in steps for index in step] == list(range(len(lengths)))
    elif not pack:  # similar lengths, in any order of the steps
        ranges = sorted((min(lengths[i] for i in step), max(lengths[i] for i in step)) for step in steps)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def test_padded_groups_differ_between_epochs():
    lengths = [5] * 40
    first, second = (
        list(plan_epoch(lengths, sized(batch_size=8, pack=False), seed=0, epoch=e)) for e in (0, 1)
    )
    assert {frozenset(step) for step in first} != {frozenset(step) for step in second}


def reference_mlx(lengths, batch_size, seed):
    """The rules in plain integers: sort, group, drop the tail, shuffle the groups with SplitMix64."""
    mask, state = 2**64 - 1, seed
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    groups = [order[i : i + batch_size] for i in range(0, len(order) - batch_size + 1, batch_size)]
    for last in range(len(groups) - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        chosen = (z ^ (z >> 31)) % (last + 1)
        groups[last], groups[chosen] = groups[chosen], groups[last]
    return groups


@given(
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=60),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_mlx_order_matches_reference(lengths, seed, epoch):
    settings = sized(batch_size=4, micro=4096, pack=False, order="mlx")
    assert list(plan_epoch(lengths, settings, seed=seed, epoch=epoch)) == reference_mlx(
        lengths, 4, seed + epoch
    )


def test_mlx_order_is_pinned():
    """Hand-computed: the first outputs of SplitMix64 seeded with 0 are 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4,
    0x06c45d188009454f; modulo 4, 3 and 2 they are 3, 0 and 1. Swapping 3-3, 2-0, 1-1 gives 2 1 0 3."""
    assert 0xE220A8397B1DCDAF % 4, 0x6E789E6AA1B965F4 % 3 == (3, 0)
    assert fisher_yates(4, seed=0).tolist() == [2, 1, 0, 3]
    plan = plan_epoch(
        [9, 3, 8, 2, 7, 1, 6, 5, 4], sized(batch_size=2, micro=999, pack=False, order="mlx"), seed=0, epoch=0
    )
    # sorted by length: 5 3 | 1 8 | 7 6 | 4 2 | and 0 remains
    assert list(plan) == [[7, 6], [1, 8], [5, 3], [4, 2]]


def test_mlx_pads_to_one_more_than_a_multiple_of_32_tokens():
    settings = sized(batch_size=2, micro=4096, pack=False, order="mlx")
    for tokens in (2, 31, 32, 33, 64, 65, 100):
        padded_tokens = 1 + 32 * -(-tokens // 32)
        assert settings.padded(tokens - 1) == padded_tokens - 1  # inputs only: the last token is a target
        assert sized(batch_size=2, micro=4096, pack=False).padded(tokens - 1) == 32 * -(-(tokens - 1) // 32)
    assert sized(batch_size=2, micro=50, pack=False).padded(40) == 50  # never more than the limit


def test_mlx_order_rejects_unsupported_settings():
    with pytest.raises(ConfigError, match="mlx needs run.batch_size and data.pack: false"):
        sized(batch_size=2, order="mlx")
    with pytest.raises(ConfigError, match="mlx needs run.batch_size"):
        sized(batch_tokens=90, pack=False, order="mlx")
    with pytest.raises(DataError, match="3 examples do not fill one batch of 4"):
        plan_epoch([1, 2, 3], sized(batch_size=4, pack=False, order="mlx"), seed=0, epoch=0)


@given(lengths=lengths, pack=st.booleans(), micro=st.integers(60, 200))
def test_micro_batches_contain_every_example_once_and_fit(lengths, pack, micro):
    limits = sized(batch_size=1, micro=micro, pack=pack)
    batches = split_step(range(len(lengths)), lengths, limits)
    assert sorted(index for batch in batches for row in batch for index in row) == list(range(len(lengths)))
    for batch in batches:
        width = limits.padded(max(sum(lengths[index] for index in row) for row in batch))
        assert width * len(batch) <= micro
        assert pack or all(len(row) == 1 for row in batch)
        assert not pack or len(batch) == 1


@settings(max_examples=30)
@given(count=st.integers(0, 300), seed=st.integers(-5, 2**64), epoch=st.integers(0, 1000))
def test_permutations_are_permutations(count, seed, epoch):
    assert sorted(seeded_permutation(count, seed=seed, epoch=epoch)) == list(range(count))


def test_permutations_depend_on_seed_and_epoch_and_are_stable():
    base = seeded_permutation(50, seed=0, epoch=0)
    assert base.tolist() != seeded_permutation(50, seed=1, epoch=0).tolist()
    assert base.tolist() != seeded_permutation(50, seed=0, epoch=1).tolist()
    # pinned: a change would silently reorder resumed runs
    assert seeded_permutation(10, seed=0, epoch=0).tolist() == reference_permutation(10, 0, 0, 0)
    assert seeded_permutation(10, seed=7, epoch=3, salt=1).tolist() == reference_permutation(10, 7, 3, 1)


def reference_permutation(count, seed, epoch, salt):
    """SplitMix64 in plain Python integers."""
    mask = 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    start = mix(mix(mix(seed & mask) ^ epoch) ^ salt)
    keys = [mix((start + (index + 1) * 0x9E3779B97F4A7C15) & mask) for index in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def test_positions_in_an_epoch_are_shuffled_evenly():
    """Each example comes first about equally often."""
    firsts = [seeded_permutation(10, seed=seed, epoch=0)[0] for seed in range(5000)]
    assert np.abs(np.bincount(firsts, minlength=10) - 500).max() < 110  # five standard deviations


def test_packing_fills_micro_batches():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 0.8, 4000).astype(int), 8, 2048).tolist()
    rows = split_step(range(len(lengths)), lengths, sized(batch_size=1, micro=2048))
    assert sum(lengths) / (2048 * len(rows)) > 0.97


def test_targets_are_shifted_and_padding_is_never_a_target():
    """With offset o and length n, exactly the targets at steps o..n-1 count: the slot after the end does not."""
    [example, short] = random_examples(2, shortest=6, longest=6)
    short = type(short)(short.tokens[:3], [False, False, True], "short")
    batch = make_batch([[example], [short]])
    assert batch.tokens.shape == (2, 5)
    assert batch.tokens[0].tolist() == example.tokens[:-1]
    expected = [
        t if s else IGNORE_INDEX for t, s in zip(example.tokens[1:], example.supervised[1:], strict=True)
    ]
    assert batch.targets[0].tolist() == expected
    assert batch.targets[1].tolist() == [
        IGNORE_INDEX,
        short.tokens[2],
        IGNORE_INDEX,
        IGNORE_INDEX,
        IGNORE_INDEX,
    ]
    assert batch.supervised == (batch.targets != IGNORE_INDEX).sum() == len(batch.supervised_positions)
    assert batch.real_tokens == 7
    assert torch.equal(
        batch.targets.flatten()[batch.supervised_positions], batch.targets[batch.targets != IGNORE_INDEX]
    )


def test_packed_rows_restart_positions_and_store_document_lengths():
    examples = random_examples(3, shortest=4, longest=6)
    batch = make_batch([examples])
    assert batch.documents == (tuple(example.length for example in examples),)
    expected = [position for example in examples for position in range(example.length)]
    assert batch.positions[0].tolist() == expected


def test_stream_resumes_from_its_state_across_epochs():
    examples = random_examples(11)
    limits = sized(batch_size=4)
    uninterrupted = BatchStream(examples, limits, seed=3)
    steps = [[batch.origins for batch in next(uninterrupted)] for _ in range(10)]
    for position in range(10):
        first = BatchStream(examples, limits, seed=3)
        for _ in range(position):
            next(first)
        second = BatchStream(examples, limits, seed=3)
        second.seek(first.state())
        assert [[batch.origins for batch in next(second)] for _ in range(10 - position)] == steps[position:]
    assert steps[0:3] != steps[3:6], "each epoch has its own order"


def test_error_names_example_larger_than_a_micro_batch():
    examples = random_examples(3, shortest=70, longest=70)
    with pytest.raises(DataError, match=r"example 0: 70 tokens do not fit run.micro_batch_tokens=64"):
        BatchStream(examples, sized(batch_size=2), seed=0)
    with pytest.raises(DataError, match=r"run.batch_tokens=60"):
        BatchStream(examples, sized(batch_tokens=60, micro=100), seed=0)


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("limit", [1, 2, 3, 64])
def test_suggested_max_length_is_the_largest_that_fits(limit, texts):
    def stream(tokens):
        [example] = random_examples(1, shortest=tokens, longest=tokens)
        item = example if texts == 1 else (example, example)
        return BatchStream([item], sized(batch_size=2, micro=limit), seed=0)

    fits = limit // texts + 1
    with pytest.raises(DataError) as error:
        stream(fits + 1)
    suggestion = f", or lower data.max_length to {fits}" if fits > 1 else ""  # max_length cannot be 1
    assert error.value.hint == f"raise run.micro_batch_tokens{suggestion}"
    if suggestion:
        stream(fits)


def test_evaluation_covers_every_example_once_up_to_the_limit():
    examples = random_examples(20)
    batches = evaluation_batches(examples, sized(batch_size=1))
    assert sorted(o for batch in batches for o in batch.origins) == sorted(e.origin for e in examples)
    limited = evaluation_batches(examples, sized(batch_size=1), limit=2)
    assert len(limited) == 2
    assert "example 0" in limited[0].origins, "the first ones, not the longest ones"


def test_padded_batches_are_a_multiple_of_32_wide():
    stream = BatchStream(
        random_examples(30, shortest=5, longest=70), sized(batch_size=6, micro=600, pack=False), seed=0
    )
    for batch in (batch for _ in range(10) for batch in next(stream)):
        assert batch.tokens.shape[1] % 32 == 0
        assert batch.documents is None
        assert batch.tokens.numel() <= 600


def test_unsigned_ids_do_not_wrap_around():
    [example] = random_examples(1, shortest=6, longest=6)
    unsigned = type(example)(
        np.array(example.tokens, dtype=np.uint32), np.array(example.supervised), "unsigned"
    )
    assert torch.equal(make_batch([[unsigned]]).targets, make_batch([[example]]).targets)
