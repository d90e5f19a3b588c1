"""Each merge method equals the formula of its paper, computed in float64."""

import numpy as np
import pytest
import torch

from whet.model_io.merging import merge_methods

WEIGHTS = [0.7, 1.3, 0.4]


@pytest.fixture
def tensors():
    """A base and three models whose updates often disagree in sign."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(13, 17, generator=generator)
    return base, [base + 0.1 * torch.randn(13, 17, generator=generator) for _ in range(3)]


def assert_close(actual, expected):
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=1e-5, atol=1e-6)


def to_float64(tensor):
    return tensor.double().numpy()


def test_average_is_the_weighted_sum(tensors):
    _, models = tensors
    expected = sum(weight * to_float64(model) for weight, model in zip(WEIGHTS, models, strict=True))
    assert_close(merge_methods.average(iter(models), WEIGHTS), expected)
    assert torch.equal(merge_methods.average([models[0]], [1.0]), models[0])
    assert_close(merge_methods.average([torch.tensor(3.0), torch.tensor(5.0)], [0.5, 0.5]), 4.0)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_slerp_matches_the_formula(tensors, share):
    _, (first, second, _) = tensors
    second = second + torch.randn(13, 17, generator=torch.Generator().manual_seed(1))
    a, b = to_float64(first), to_float64(second)
    angle = np.arccos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    assert angle > 0.3
    expected = (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)
    assert_close(merge_methods.slerp(first, second, share), expected)


def test_slerp_of_unit_vectors_keeps_the_norm_and_divides_the_angle():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert_close(merge_methods.slerp(a, b, 1 / 3), [np.cos(np.pi / 6), np.sin(np.pi / 6)])


@pytest.mark.parametrize("second", [1.0, 1.00001, -1.0, 0.0], ids=["equal", "longer", "opposite", "zero"])
def test_slerp_is_linear_without_an_arc(second):
    a = torch.tensor([3.0, 4.0])
    assert_close(merge_methods.slerp(a, second * a, 0.25), to_float64(a) * (0.75 + 0.25 * second))


def test_task_arithmetic_adds_the_weighted_updates(tensors):
    base, models = tensors
    expected = to_float64(base) + sum(
        w * (to_float64(m) - to_float64(base)) for w, m in zip(WEIGHTS, models, strict=True)
    )
    assert_close(merge_methods.task_arithmetic(base, iter(models), WEIGHTS), expected)


def ties_reference(deltas, weights):
    """Elect the sign with the larger total magnitude, then average the entries with that sign."""
    merged = np.zeros_like(deltas[0])
    for index in np.ndindex(merged.shape):
        entries = [(delta[index], weight) for delta, weight in zip(deltas, weights, strict=True)]
        ups = [(value, weight) for value, weight in entries if value > 0]
        downs = [(value, weight) for value, weight in entries if value < 0]
        magnitude_up = sum(value * weight for value, weight in ups)
        magnitude_down = -sum(value * weight for value, weight in downs)
        winners = ups if magnitude_up > magnitude_down else downs
        if winners:
            merged[index] = sum(v * w for v, w in winners) / sum(w for _, w in winners)
    return merged


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], WEIGHTS], ids=["the paper's", "weighted"])
def test_ties_trims_elects_and_averages_agreeing_updates(tensors, density, weights):
    base, models = tensors
    trimmed = []
    for model in models:
        delta = to_float64(model - base)  # in float32, because the entries are compared with each other
        num_kept = round(density * delta.size)
        order = np.argsort(-np.abs(delta), axis=None)
        largest = np.zeros(delta.size)
        largest[order[:num_kept]] = delta.flatten()[order[:num_kept]]
        trimmed.append(largest.reshape(delta.shape))
    assert_close(
        merge_methods.ties(base, iter(models), weights, density=density),
        to_float64(base) + ties_reference(trimmed, weights),
    )


def test_ties_elects_by_magnitude_and_not_by_count():
    base = torch.zeros(2)
    models = [torch.tensor([3.0, 1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, 0.0])]
    assert merge_methods.ties(base, models, [1, 1, 1], density=1.0).tolist() == [3.0, 0.0]


def test_trim_keeps_exactly_the_largest():
    delta = torch.tensor([0.1, -5.0, 0.0, 3.0, -0.2])
    assert merge_methods.trim(delta, 0.4).tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]
    assert merge_methods.trim(delta, 1e-9).tolist() == [0.0, -5.0, 0.0, 0.0, 0.0]


def generators(seed=0, name="a"):
    return [merge_methods.tensor_generator(seed, model, name) for model in range(3)]


@pytest.mark.parametrize("name", ["dare", "dare_ties"])
def test_dare_drops_with_the_masks_of_its_seed_and_rescales(tensors, name):
    base, models = tensors
    masks = [torch.rand(base.shape, generator=generator) < 0.4 for generator in generators()]
    deltas = [
        np.where(mask.numpy(), (to_float64(model) - to_float64(base)) / 0.4, 0.0)
        for model, mask in zip(models, masks, strict=True)
    ]
    expected = {
        "dare": sum(weight * delta for weight, delta in zip(WEIGHTS, deltas, strict=True)),
        "dare_ties": ties_reference(deltas, WEIGHTS),
    }[name]
    actual = getattr(merge_methods, name)(base, models, WEIGHTS, density=0.4, generators=generators())
    assert_close(actual, to_float64(base) + expected)


def test_drop_keeps_the_density_and_the_mean_and_depends_on_seed_model_and_tensor():
    delta = torch.ones(100_000)
    first = merge_methods.drop(delta, 0.3, generators()[0])
    assert abs((first != 0).float().mean() - 0.3) < 0.01
    assert abs(first.mean() - 1) < 0.03
    assert torch.equal(first, merge_methods.drop(delta, 0.3, generators()[0]))
    for generator in (generators()[1], generators(seed=1)[0], generators(name="b")[0]):
        assert not torch.equal(first, merge_methods.drop(delta, 0.3, generator))
