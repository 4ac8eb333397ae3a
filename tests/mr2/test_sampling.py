"""Batches in which samples have others of their class."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sklearn_mr2.mr2.sampling import ClassBalancedSampler
from sklearn_mr2.net import TensorDataset, TensorLoader


def batches_of(y, per_class, batch_size, seed=0):
    data = TensorDataset(torch.zeros(len(y), 1), y)
    generator = torch.Generator().manual_seed(seed)
    return list(ClassBalancedSampler(per_class)(data, batch_size, generator))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    per_class=st.integers(2, 5),
    batch_size=st.integers(1, 40),
)
def test_each_class_of_a_batch_has_as_many_samples_as_it_can(sizes, per_class, batch_size):
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    for index in batches_of(y, per_class, batch_size):
        assert len(index.unique()) == len(index)
        classes, counts = y[index].unique(return_counts=True)
        for k, count in zip(classes.tolist(), counts.tolist(), strict=True):
            assert count >= min(per_class, sizes[k])


@given(
    y=st.lists(st.integers(0, 12), min_size=1, max_size=80),
    per_class=st.integers(2, 5),
    batch_size=st.integers(1, 40),
)
def test_the_length_of_a_loader_is_the_number_of_its_batches(y, per_class, batch_size):
    data = TensorDataset(torch.zeros(len(y), 1), torch.tensor(y))
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    sampler = ClassBalancedSampler(per_class)
    loader = TensorLoader(data, batch_size, generator=generator, sampler=sampler)
    length = len(loader)
    assert torch.equal(generator.get_state(), before)
    assert length == sum(1 for _ in loader)


def test_an_epoch_of_balanced_data_sees_every_sample_once():
    y = torch.arange(120) % 20
    seen = torch.cat(batches_of(y, 3, 12))
    assert len(seen) == 120
    assert seen.unique().numel() == 120


def test_rare_classes_occur_as_often_as_others():
    y = torch.tensor([0] * 90 + [1] * 10)
    batches = batches_of(y, 5, 10)
    assert len(batches) == 10
    assert all((y[index] == 1).sum() == 5 for index in batches)


def test_order_follows_the_generator():
    y = torch.arange(60) % 6
    first, same, other = (torch.cat(batches_of(y, 2, 8, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_needs_at_least_two():
    with pytest.raises(ValueError, match="samples_per_class=1"):
        ClassBalancedSampler(1)
