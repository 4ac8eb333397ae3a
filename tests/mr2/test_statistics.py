"""The class statistics and margins against loops, exact arithmetic and the paper's identities."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sklearn_mr2.mr2.statistics import (
    ClassMoments,
    RunningClassMoments,
    class_margins,
    class_moments,
)

NORMS = [1, 2, 3, 5, math.inf]


def make_data(seed=0, n=60, n_features=4, n_classes=5, dtype=torch.float64):
    """Features whose spread and mean differ by class; the last class is absent."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(n_classes - 1, (n,), generator=generator)
    features = torch.randn(n, n_features, generator=generator, dtype=torch.float64)
    features = features * (1 + y[:, None]) + y[:, None]
    weight = torch.randint(0, 4, (n,), generator=generator).to(dtype)
    return features.to(dtype), y, weight


def loop_moments(features, y, n_classes, weight=None, norm=2.0):
    """Independent: numpy, one class and one sample at a time."""
    features, y = np.asarray(features, dtype=float), np.asarray(y)
    weight = np.ones(len(y)) if weight is None else np.asarray(weight, dtype=float)
    fields = {name: np.zeros(n_classes) for name in ("w", "r2", "dispersion", "variance")}
    mean = np.zeros((n_classes, features.shape[1]))
    for k in range(n_classes):
        rows = [i for i in range(len(y)) if y[i] == k and weight[i] > 0]
        if not rows:
            continue
        total = fields["w"][k] = sum(weight[i] for i in rows)
        mean[k] = sum(weight[i] * features[i] for i in rows) / total
        for name, p in (("dispersion", norm), ("variance", 2)):
            squares = [weight[i] * np.linalg.norm(features[i] - mean[k], p) ** 2 for i in rows]
            fields[name][k] = sum(squares) / total
        fields["r2"][k] = np.linalg.norm(mean[k], norm) ** 2 + fields["dispersion"][k]
    return fields["w"], mean, fields["r2"], fields["dispersion"], fields["variance"]


def assert_moments(actual: ClassMoments, expected, rtol=1e-10, atol=1e-10):
    for name, value, wanted in zip(ClassMoments._fields, actual, expected, strict=True):
        wanted = torch.as_tensor(wanted, dtype=value.dtype)
        torch.testing.assert_close(value, wanted, rtol=rtol, atol=atol, msg=lambda m, n=name: n + m)


# ---------------------------------------------------------------- exact moments


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 7, 1000])
def test_moments_equal_a_loop(norm, weighted, chunk_size):
    features, y, weight = make_data()
    weight = weight if weighted else None
    actual = class_moments(features, y, 5, weight, norm=norm, chunk_size=chunk_size)
    assert_moments(actual, loop_moments(features, y, 5, weight, norm))


def test_second_moment_is_the_mean_squared_norm():
    """With p = 2, ||mu||^2 + ||s||^2 = E||phi||^2, and s is the biased standard deviation."""
    features, y, _ = make_data()
    moments = class_moments(features, y, 5)
    for k in range(4):
        rows = features[y == k]
        assert float(moments.second_moment[k]) == pytest.approx(float((rows**2).sum(1).mean()))
        assert float(moments.dispersion[k]) == pytest.approx(
            float(rows.std(dim=0, correction=0).square().sum())
        )


@pytest.mark.parametrize("norm", [2, 3])
def test_weight_is_repetition(norm):
    features, y, weight = make_data()
    repeats = weight.long()
    repeated = class_moments(
        features.repeat_interleave(repeats, 0), y.repeat_interleave(repeats), 5, norm=norm
    )
    assert_moments(class_moments(features, y, 5, weight, norm=norm), repeated)


@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100), norm=st.sampled_from(NORMS))
def test_moments_scale_and_permute(seed, scale, norm):
    features, y, weight = make_data(seed, n=20)
    base = class_moments(features, y, 5, weight, norm=norm)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    other = class_moments(scale * features[order], y[order], 5, weight[order], norm=norm)
    expected = (base.weight, scale * base.mean, *(scale**2 * field for field in base[2:]))
    assert_moments(other, expected, rtol=1e-9, atol=1e-9 * scale**2)


@given(offset=st.sampled_from([0.0, 1e2, 1e4, 1e6]), spread=st.sampled_from([1e-3, 1.0]))
def test_small_spread_around_a_large_mean(offset, spread):
    """Against exact rational arithmetic on the very same floating-point numbers."""
    generator = torch.Generator().manual_seed(0)
    features = offset + spread * torch.randn(12, 2, generator=generator, dtype=torch.float64)
    moments = class_moments(features, torch.zeros(12, dtype=torch.int64), 1)
    exact = Fraction(0)
    for column in features.T.tolist():
        values = [Fraction(value) for value in column]
        mean = sum(values) / len(values)
        exact += sum((value - mean) ** 2 for value in values) / len(values)
    assert float(moments.dispersion[0]) == pytest.approx(float(exact), rel=1e-9)


def test_absent_classes_are_zero_and_do_not_count():
    features, y, weight = make_data()
    weight[y == 1] = 0  # present in y, but without weight
    moments = class_moments(features, y, 5, weight)
    assert moments.present.tolist() == [True, False, True, True, False]
    for field in moments:
        assert not field[[1, 4]].any()
    assert float(moments.mean_spread) == pytest.approx(float(moments.variance[[0, 2, 3]].mean()))


@pytest.mark.parametrize("norm", [2, 3])
def test_mean_spread_is_euclidean_whatever_the_norm(norm):
    features, y, weight = make_data()
    moments = class_moments(features, y, 5, weight, norm=norm)
    _, _, _, _, variance = loop_moments(features, y, 5, weight)
    assert float(moments.mean_spread) == pytest.approx(variance[:4].mean())


def test_without_samples():
    moments = class_moments(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 2)
    assert not any(field.any() for field in moments)
    assert float(moments.mean_spread) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int16])
def test_accumulates_in_float64(dtype):
    features = make_data()[0].to(dtype)
    y = make_data()[1]
    assert_moments(class_moments(features, y, 5), loop_moments(features.double(), y, 5))


def test_reads_a_memory_mapped_array_in_slices(tmp_path):
    features, y, _ = make_data(dtype=torch.float32)
    np.save(tmp_path / "x.npy", features.numpy())
    largest = 0

    class Watched(np.memmap):
        def __getitem__(self, rows):
            nonlocal largest
            largest = max(largest, len(range(*rows.indices(len(self)))))
            return super().__getitem__(rows)

    mapped = np.load(tmp_path / "x.npy", mmap_mode="r").view(Watched)
    actual = class_moments(mapped, y.numpy(), 5, chunk_size=8)
    assert largest == 8
    assert_moments(actual, class_moments(features, y, 5))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, bool])
def test_integer_codes_of_any_type(dtype):
    features = np.array([[1.0], [2.0], [4.0]])
    moments = class_moments(features, np.array([1, 0, 1]).astype(dtype), 2)
    assert moments.mean[:, 0].tolist() == [2.0, 2.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(3, 2, 2)}, "flatten"),
        ({"y": torch.zeros(2, dtype=torch.int64)}, "y must have one entry"),
        ({"y": torch.zeros(3)}, "int64"),
        ({"y": torch.tensor([0, 1, 2])}, r"from 0 to n_classes - 1 = 1, got 0 to 2"),
        ({"y": torch.tensor([0, 1, -1])}, "got -1 to 1"),
        ({"sample_weight": torch.tensor([1.0, 1.0, -1.0])}, "negative"),
        ({"sample_weight": torch.ones(3, 1)}, "sample_weight must have"),
        ({"norm": 0.5}, "norm=0.5"),
        ({"norm": math.nan}, "norm"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_moments_reject(change, message):
    good = {"features": torch.zeros(3, 2), "y": torch.tensor([0, 1, 1]), "n_classes": 2}
    with pytest.raises(ValueError, match=message):
        class_moments(**(good | change))


def test_moments_leave_the_input_alone():
    features, y, weight = make_data()
    copies = features.clone(), y.clone(), weight.clone()
    class_moments(features, y, 5, weight, norm=3)
    for before, after in zip(copies, (features, y, weight), strict=True):
        assert torch.equal(before, after)


# ---------------------------------------------------------------- margins

spreads = st.lists(st.floats(1e-2, 1e2), min_size=1, max_size=8)


@given(spreads, st.floats(0.01, 10), st.floats(0, 1))
def test_margins_by_the_formula(spread, mean_margin, exponent):
    total = math.fsum(value**exponent for value in spread)
    expected = [mean_margin * len(spread) * value**exponent / total for value in spread]
    actual = class_margins(
        torch.tensor(spread, dtype=torch.float64), mean_margin, exponent=exponent, floor=0
    )
    assert actual.tolist() == pytest.approx(expected, rel=1e-13)


@given(
    st.lists(st.floats(0, 1e300) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=8),
    st.floats(0.01, 10),
    st.sampled_from([0.0, 1 / 3, 1.0, 3.0]),
    st.sampled_from([0.0, 0.1]),
)
def test_margins_are_finite_with_the_asked_mean(spread, mean_margin, exponent, floor):
    spread = torch.tensor(spread, dtype=torch.float64)
    margins = class_margins(spread, mean_margin, exponent=exponent, floor=floor)
    assert margins.isfinite().all()
    known = spread.isfinite()
    assert (margins[~known] == mean_margin).all()
    if known.any():
        assert float(margins[known].mean()) == pytest.approx(mean_margin)
    assert (margins >= mean_margin * floor / (1 + floor) * (1 - 1e-12)).all()


def test_spread_ratio_of_8_gives_margin_ratio_of_2():
    margins = class_margins(torch.tensor([2.0, 16.0]))
    assert float(margins[1] / margins[0]) == pytest.approx(2)


def test_absent_classes_do_not_inflate_margins():
    """Counting them as zero would multiply the others' margins by K / seen."""
    spread = torch.tensor([1.0, 8.0, 0.0, 0.0])
    margins = class_margins(spread, 0.5, present=torch.tensor([True, True, False, False]))
    assert margins[:2].tolist() == pytest.approx(class_margins(spread[:2], 0.5).tolist())
    assert margins[2:].tolist() == [0.5, 0.5]


def test_collapsed_classes():
    assert class_margins(torch.zeros(3), 0.7).tolist() == pytest.approx([0.7] * 3)
    one = class_margins(torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert 0.1 / 1.1 <= float(one[0]) < 0.11
    assert float(one.mean()) == pytest.approx(1)
    assert class_margins(torch.tensor([0.0, 1.0]), floor=0).tolist() == [0.0, 2.0]
    none = class_margins(torch.tensor([1.0, 2.0]), present=torch.tensor([False, False]))
    assert none.tolist() == [1.0, 1.0]


def test_floor_spares_all_but_the_extreme():
    spread = torch.logspace(0, 2, 20)
    torch.testing.assert_close(class_margins(spread), class_margins(spread, floor=0))


@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100), norm=st.sampled_from(NORMS))
def test_margins_ignore_scale_duplication_and_labels(seed, scale, norm):
    features, y, weight = make_data(seed)

    def margins(features, y, weight):
        moments = class_moments(features, y, 5, weight, norm=norm)
        return class_margins(moments.second_moment, present=moments.present)

    base = margins(features, y, weight)
    torch.testing.assert_close(margins(scale * features, y, weight), base)
    doubled = margins(features.repeat(2, 1), y.repeat(2), weight.repeat(2))
    torch.testing.assert_close(doubled, base)
    relabel = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(margins(features, relabel[y], weight)[relabel], base)


@pytest.mark.parametrize("norm", NORMS)
def test_margins_ignore_rotation_only_for_the_2_norm(norm):
    features, y, _ = make_data()
    rotation = torch.linalg.qr(
        torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ).Q
    base, rotated = (
        class_margins(class_moments(x, y, 4, norm=norm).second_moment)
        for x in (features, features @ rotation)
    )
    assert torch.allclose(base, rotated, rtol=1e-9) == (norm == 2)


@pytest.mark.parametrize("norm", [2, 3])
def test_normalised_features_need_another_norm(norm):
    """On the sphere E||phi||_2^2 is 1 for every class; the 3-norm tells them apart."""
    features, y, _ = make_data()
    features = nn.functional.normalize(features)
    moments = class_moments(features, y, 4, norm=norm)
    margins = class_margins(moments.second_moment, 1.5)
    assert torch.allclose(margins, torch.full_like(margins, 1.5)) == (norm == 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean_margin": 0}, "mean_margin"),
        ({"mean_margin": math.inf}, "mean_margin"),
        ({"exponent": -1}, "exponent"),
        ({"exponent": math.nan}, "exponent"),
        ({"floor": 1}, "floor"),
    ],
)
def test_margins_reject(arguments, message):
    with pytest.raises(ValueError, match=message):
        class_margins(torch.ones(2), **arguments)


def test_margins_are_float32_at_least():
    assert class_margins(torch.ones(2, dtype=torch.float16)).dtype == torch.float32
    assert class_margins(torch.tensor([1, 8])).tolist() == pytest.approx([2 / 3, 4 / 3])


# ---------------------------------------------------------------- running moments


def feed(running, features, y, weight, sizes):
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        running.update(features[rows], y[rows], None if weight is None else weight[rows])
        start += size
    assert start >= len(features)


@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 2, 7, 60]),
    offset=st.sampled_from([0.0, 1e4]),
    weighted=st.booleans(),
)
def test_accumulating_is_exact(seed, size, offset, weighted):
    features, y, weight = make_data(seed)
    features, weight = features + offset, weight if weighted else None
    running = RunningClassMoments(5, 4, momentum=None)
    feed(running, features, y, weight, [size] * math.ceil(60 / size))
    assert_moments(running.moments(), class_moments(features, y, 5, weight), atol=1e-6)
    torch.testing.assert_close(
        running.moments().variance, class_moments(features, y, 5, weight).variance
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_momentum_is_an_exact_discount(momentum):
    """The same as exact moments with weights momentum ** (later appearances of the class)."""
    features, y, weight = make_data(n=80)
    weight = weight + 1
    running = RunningClassMoments(5, 4, momentum=momentum, dtype=torch.float64)
    feed(running, features, y, weight, [8] * 10)
    discounted = weight.clone()
    for i in range(80):
        later = {j // 8 for j in range(80) if y[j] == y[i] and j // 8 > i // 8}
        discounted[i] *= momentum ** len(later)
    assert_moments(running.moments(), class_moments(features, y, 5, discounted))


def test_batch_variances_are_biased_and_running_moments_are_not():
    """One sample of a class per batch has no variance; the running dispersion has."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 8, generator=generator)
    running = RunningClassMoments(1, 8)
    for row in features:
        running.update(row[None], torch.zeros(1, dtype=torch.int64))
    moments = running.moments()
    assert float(moments.second_moment[0]) == pytest.approx(8, rel=0.15)
    assert float(moments.mean_spread) == pytest.approx(8, rel=0.15)


@pytest.mark.parametrize("kind", ["gaussian", "rectified", "normalised"])
@pytest.mark.parametrize("norm", [3, 5])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_other_norms_merge_closely(kind, norm, size):
    features = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    if kind != "gaussian":
        features = torch.relu(features - 1)
    if kind == "normalised":
        features = nn.functional.normalize(features)
    y = torch.zeros(1000, dtype=torch.int64)
    running = RunningClassMoments(1, 64, momentum=None, norm=norm)
    feed(running, features, y, None, [size] * (1000 // size))
    exact = class_moments(features, y, 1, norm=norm)
    assert float(running.moments().dispersion) == pytest.approx(float(exact.dispersion), rel=0.01)
    assert float(running.moments().variance) == pytest.approx(float(exact.variance), rel=1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_first_appearance_is_the_batch(norm, momentum):
    features, y, weight = make_data()
    running = RunningClassMoments(5, 4, momentum=momentum, norm=norm, dtype=torch.float64)
    running.update(features, y, weight)
    assert_moments(running.moments(), class_moments(features, y, 5, weight, norm=norm))


@pytest.mark.parametrize("norm", [2, 3])
def test_only_classes_in_the_batch_change(norm):
    features, y, weight = make_data()
    running = RunningClassMoments(5, 4, norm=norm)
    running.update(features, y, weight + 1)
    before = running.moments()
    rows = y == 2
    running.update(features[rows] + 1, y[rows])
    # A class whose samples in the batch have no weight does not change either.
    running.update(features[y == 3], y[y == 3], torch.zeros(int((y == 3).sum())))
    after = running.moments()
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[[0, 1, 3, 4]], new[[0, 1, 3, 4]])
        assert not torch.equal(old[2], new[2])


def test_nothing_changes_in_evaluation_mode():
    features, y, _ = make_data()
    running = RunningClassMoments(5, 4)
    running.update(features, y)
    before = running.moments()
    running.eval()
    running.update(features + 5, y)
    assert all(torch.equal(a, b) for a, b in zip(before, running.moments(), strict=True))


def test_loaded_moments_are_continued():
    features, y, weight = make_data()
    running = RunningClassMoments(5, 4, momentum=None)
    running.load(class_moments(features[:40], y[:40], 5, weight[:40]))
    running.update(features[40:], y[40:], weight[40:])
    assert_moments(running.moments(), class_moments(features, y, 5, weight))


def test_returned_moments_do_not_change():
    features, y, _ = make_data()
    running = RunningClassMoments(5, 4)
    running.update(features, y)
    moments = running.moments()
    kept = copy.deepcopy(moments)
    running.update(features + 5, y)
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_rows_that_overflow_are_left_out(bad):
    features, y, _ = make_data(dtype=torch.float32)
    broken = features.clone()
    broken[3, 1] = bad
    running, clean = RunningClassMoments(5, 4), RunningClassMoments(5, 4)
    running.update(broken, y)
    keep = torch.arange(len(y)) != 3
    clean.update(features[keep], y[keep])
    assert_moments(running.moments(), clean.moments(), rtol=1e-5, atol=1e-5)


def test_empty_batch_changes_nothing():
    running = RunningClassMoments(2, 3)
    running.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert not running.moments().present.any()


def test_no_gradient_is_kept():
    features, y, _ = make_data()
    features.requires_grad_()
    running = RunningClassMoments(5, 4)
    running.update(features, y)
    assert not any(field.requires_grad for field in running.moments())


def test_state_dict_round_trip_continues_the_same():
    features, y, _ = make_data()
    running = RunningClassMoments(5, 4)
    running.update(features, y)
    other = RunningClassMoments(5, 4)
    other.load_state_dict(running.state_dict())
    for module in (running, other):
        module.update(features * 2, y)
    assert all(torch.equal(a, b) for a, b in zip(running.moments(), other.moments(), strict=True))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16])
def test_statistics_stay_in_float32(cast):
    features, y, _ = make_data(dtype=torch.float32)
    running = RunningClassMoments(5, 4)
    running.update(features, y)
    before = running.moments()
    cast(running)
    assert all(torch.equal(a, b) for a, b in zip(before, running.moments(), strict=True))
    running.update(features.half(), y)
    assert running.mean.dtype == torch.float32
    assert running.double().mean.dtype == torch.float64
    assert RunningClassMoments(5, 4, dtype=torch.float16).mean.dtype == torch.float32


def test_compiles_without_a_graph_break():
    features, y, weight = make_data(dtype=torch.float32)
    plain, compiled = RunningClassMoments(5, 4), RunningClassMoments(5, 4)
    step = torch.compile(compiled.update, backend="eager", fullgraph=True)
    for _ in range(2):
        plain.update(features, y, weight)
        step(features, y, weight)
    assert_moments(compiled.moments(), plain.moments(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"momentum": 1.0}, "momentum"), ({"momentum": -0.1}, "momentum"), ({"norm": 0}, "norm")],
)
def test_running_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        RunningClassMoments(2, 2, **arguments)


def test_running_rejects_batches():
    running = RunningClassMoments(2, 2)
    y = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="n_features=2"):
        running.update(torch.zeros(2, 3), y)
    with pytest.raises(ValueError, match="int64"):
        running.update(torch.zeros(2, 2), y.int())
    with pytest.raises(ValueError, match="one entry"):
        running.update(torch.zeros(2, 2), y[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [2, 3])
def test_on_a_gpu(norm):
    features, y, weight = make_data()
    cuda = [tensor.cuda() for tensor in (features, y, weight)]
    exact = class_moments(features, y, 5, weight, norm=norm)
    on_gpu = class_moments(*cuda[:2], 5, cuda[2], norm=norm)
    assert on_gpu.mean.is_cuda
    assert_moments(ClassMoments(*(field.cpu() for field in on_gpu)), exact)
    running = RunningClassMoments(5, 4, momentum=None, norm=norm).cuda()
    running.update(*cuda)
    assert_moments(ClassMoments(*(field.cpu() for field in running.moments())), exact)
