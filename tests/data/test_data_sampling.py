"""The laws of `batch`: pure, disjoint between parts, every example once per epoch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detonation.data import Data, batch, batches, predictions
from detonation.data.dataset import _permutation


class Numbers:
    """Examples that are their own index."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, indices):
        return {"input_ids": indices.clone(), "labels": indices.clone()}


class Noisy(Numbers):
    def augment(self, batch, generator):
        return {**batch, "noise": torch.rand(len(batch["labels"]), generator=generator)}


def seen(count, seed, steps, parts, size):
    """The examples of all parts of all steps, in order; [steps * parts * size]."""
    drawn = [
        batch(Numbers(count), seed=seed, step=step, part=part, parts=parts, size=size)["input_ids"]
        for step in range(steps)
        for part in range(parts)
    ]
    return torch.cat(drawn)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_example_once(count, parts, size, seed):
    if size * parts > count:
        with pytest.raises(ValueError, match=f"needs {size * parts}, but there are {count}"):
            seen(count, seed, 1, parts, size)
        return
    steps = -(-3 * count // (parts * size))
    order = seen(count, seed, steps, parts, size)
    for epoch in range(3):
        assert torch.equal(
            order[epoch * count : (epoch + 1) * count].sort().values, torch.arange(count)
        )


def test_steps_can_be_drawn_in_any_order():
    arguments = {"seed": 3, "parts": 3, "size": 4}
    forward = [
        [batch(Numbers(50), step=s, part=p, **arguments)["labels"] for p in range(3)]
        for s in range(20)
    ]
    _permutation.cache_clear()
    for step in reversed(range(20)):
        for part in (2, 0, 1):
            again = batch(Numbers(50), step=step, part=part, **arguments)["labels"]
            assert torch.equal(again, forward[step][part])


def test_the_same_stream_whatever_the_number_of_parts():
    assert torch.equal(seen(40, 0, 6, 2, 4), seen(40, 0, 3, 4, 4))


def test_seeds_and_epochs_shuffle_differently():
    first, second = seen(100, 0, 20, 1, 10).split(100)
    assert not torch.equal(first, second)
    assert not torch.equal(first, seen(100, 1, 10, 1, 10))
    # The epoch of one seed is not the next epoch of its neighbour.
    assert not torch.equal(second, seen(100, 1, 10, 1, 10))


def test_the_global_random_state_is_neither_read_nor_changed():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = batch(Noisy(30), seed=0, step=1, part=0, parts=2, size=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(1)
    again = batch(Noisy(30), seed=0, step=1, part=0, parts=2, size=3)
    assert torch.equal(first["noise"], again["noise"])


def test_augmentation_differs_between_steps_parts_and_seeds():
    def noise(seed, step, part):
        return tuple(
            batch(Noisy(30), seed=seed, step=step, part=part, parts=2, size=3)["noise"].tolist()
        )

    assert len({noise(s, t, p) for s in range(3) for t in range(3) for p in range(2)}) == 18


@pytest.mark.parametrize(
    ("step", "part", "parts", "size"), [(-1, 0, 1, 1), (0, 2, 2, 1), (0, -1, 2, 1), (0, 0, 1, 0)]
)
def test_wrong_numbers_are_refused(step, part, parts, size):
    with pytest.raises(ValueError, match=r"step|part"):
        batch(Numbers(10), seed=0, step=step, part=part, parts=parts, size=size)


class OnlyDraw:
    def draw(self, step, part, parts, size):
        return Numbers(size)[torch.arange(size)]


class CountedStream(OnlyDraw):
    """A stream may also know how many documents it has."""

    def __len__(self):
        return 3

    def position(self, part, parts):
        return {}

    def go_to(self, part, parts, position):
        pass


def test_data_tell_which_methods_they_lack():
    Data("own", "own", "images", CountedStream(), Numbers(4))
    with pytest.raises(
        ValueError, match="OnlyDraw, the training data, lack position, go_to: a stream needs draw"
    ):
        Data("own", "own", "images", OnlyDraw(), Numbers(4))
    with pytest.raises(
        ValueError, match="OnlyDraw, the validation data, lack __len__, __getitem__"
    ):
        Data("own", "own", "images", Numbers(4), OnlyDraw())
    with pytest.raises(
        ValueError, match="range_iterator, the training data, lack __len__, __getit"
    ):
        Data("own", "own", "images", iter(range(4)), Numbers(4))


def test_validation_batches_are_fixed_complete_and_end_short():
    sizes = [len(b["labels"]) for b in batches(Numbers(10), 4)]
    assert sizes == [4, 4, 2]
    assert torch.equal(torch.cat([b["labels"] for b in batches(Numbers(10), 4)]), torch.arange(10))


def test_a_limit_spreads_over_all_examples():
    (only,) = batches(Numbers(100), 8, limit=5)
    assert only["labels"].tolist() == [0, 20, 40, 60, 80]
    assert len(list(batches(Numbers(10), 4, limit=1000))) == 3
    with pytest.raises(ValueError, match="at least 1, not 4 and 0"):
        list(batches(Numbers(10), 4, limit=0))


def test_predictions_counts_the_terms_of_the_mean_loss():
    rows = torch.zeros(3, 5, dtype=torch.int64)
    assert predictions("text", {"labels": rows}) == 12
    assert predictions("images", {"labels": rows[:, 0]}) == 3
    rows[1, 2:] = -100
    assert predictions("translation", {"labels": rows}) == 12
