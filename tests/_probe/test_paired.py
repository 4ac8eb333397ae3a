import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sklearn_mr2._probe.paired import paired_difference


def sample(rng, n_per_class, p_gain, p_loss):
    """Paired outcomes with the given chances that only one of the two is right."""
    codes = np.repeat(np.arange(len(n_per_class)), n_per_class)
    u = rng.random(len(codes))
    gain, loss = np.asarray(p_gain)[codes], np.asarray(p_loss)[codes]
    first = (u >= gain) & (u < gain + loss)
    return first, u < gain, codes


def test_one_class_is_the_interval_of_agresti_and_min_with_unbiased_variance():
    n, gained, lost = 40, 9, 2
    second = np.arange(n) < gained
    first = (np.arange(n) >= gained) & (np.arange(n) < gained + lost)
    difference = paired_difference(first, second, np.zeros(n, dtype=int), np.ones(1))
    # The paired table with half an observation more in each cell, sample by sample.
    scores = np.repeat([1, -1, 0], [gained, lost, n - gained - lost])
    scores = np.append(scores, [1, -1, 0, 0])
    weights = np.append(np.ones(n), np.full(4, 0.5))
    mean = np.average(scores, weights=weights)
    variance = weights @ (scores - mean) ** 2 / (n + 1) / (n + 2)
    half = 1.959963984540054 * np.sqrt(variance)
    assert difference == pytest.approx(((gained - lost) / n, mean - half, mean + half))


@pytest.mark.parametrize(
    ("n_per_class", "p_gain", "p_loss"),
    [
        ([30, 30, 30, 30], [0.1, 0.05, 0.2, 0.0], [0.05, 0.05, 0.02, 0.1]),
        ([8, 8, 8], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]),
        # The rare class changes most; an interval that pools the samples would be too short.
        ([12, 600], [0.3, 0.01], [0.2, 0.01]),
        ([4, 4, 400], [0.2, 0.2, 0.02], [0.2, 0.0, 0.02]),
        ([6] * 100, [0.01] * 100, [0.01] * 100),
        ([10], [0.3], [0.05]),
    ],
)
def test_covers_the_true_difference(n_per_class, p_gain, p_loss):
    rng = np.random.default_rng(0)
    weight = np.full(len(n_per_class), 1 / len(n_per_class))
    truth = weight @ (np.array(p_gain) - np.array(p_loss))
    hits = []
    for _ in range(2000):
        low, high = paired_difference(*sample(rng, n_per_class, p_gain, p_loss), weight)[1:]
        hits.append(low <= truth <= high)
    assert 0.935 <= np.mean(hits) <= 0.995


@st.composite
def outcomes(draw):
    n_per_class = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    n = sum(n_per_class)
    right = st.lists(st.booleans(), min_size=n, max_size=n).map(np.array)
    codes = np.repeat(np.arange(len(n_per_class)), n_per_class)
    raw = draw(st.lists(st.integers(0, 3), min_size=len(n_per_class), max_size=len(n_per_class)))
    weight = np.array(raw, dtype=float) if any(raw) else np.ones(len(raw))
    return draw(right), draw(right), codes, weight / weight.sum()


@given(outcomes(), st.randoms(use_true_random=False))
def test_properties(data, random):
    first, second, codes, weight = data
    difference = paired_difference(first, second, codes, weight)
    by_class = [second[codes == k].mean() - first[codes == k].mean() for k in range(len(weight))]
    assert difference.value == pytest.approx(weight @ np.array(by_class), abs=1e-12)
    assert -1 <= difference.low <= difference.value <= difference.high <= 1
    assert difference.low < difference.high
    # Swapping the classifiers turns the signs.
    swapped = paired_difference(second, first, codes, weight)
    assert swapped == pytest.approx((-difference.value, -difference.high, -difference.low))
    # The order of the samples does not matter; a higher level gives a wider interval.
    order = np.array(random.sample(range(len(codes)), len(codes)))
    assert paired_difference(first[order], second[order], codes[order], weight) == pytest.approx(
        difference
    )
    wider = paired_difference(first, second, codes, weight, level=0.99)
    assert wider.low <= difference.low
    assert wider.high >= difference.high


def test_verdict_needs_an_interval_without_zero():
    def verdict(gained, lost, n=50):
        second = np.arange(n) < gained
        first = np.arange(n) >= n - lost
        return paired_difference(first, second, np.zeros(n, dtype=int), np.ones(1)).verdict

    assert verdict(0, 0) == verdict(1, 0) == verdict(3, 2) == "no clear difference"
    assert verdict(12, 1) == "better"
    assert verdict(1, 12) == "worse"
