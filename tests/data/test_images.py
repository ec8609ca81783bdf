import pytest
import torch

from gblr.data.digits import NUM_TEST, load_digits
from gblr.data.images import ImageBatches, ImageSet, random_crop


def numbered(n=10, size=4):
    """Image i is full of i."""
    labels = torch.arange(n)
    return ImageSet(labels.to(torch.uint8)[:, None, None, None].expand(n, 3, size, size).contiguous(), labels)


def test_an_epoch_has_every_image_once_with_its_label_in_an_order_of_its_own():
    batches = ImageBatches(numbered(), batch_size=5, train=True)
    orders = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        found = list(batches)
        assert all(torch.equal((255 * x[:, 0, 0, 0]).round().long(), y) for x, y in found)
        orders.append(torch.cat([y for _, y in found]).tolist())
    assert orders[0] == orders[2] != orders[1] and sorted(orders[0]) == list(range(10))


def test_training_drops_a_rest_and_evaluation_serves_it_in_order():
    assert [len(y) for _, y in ImageBatches(numbered(), 4, train=True)] == [4, 4]
    found = list(ImageBatches(numbered(), 4, train=False))
    assert [len(y) for _, y in found] == [4, 4, 2] and torch.cat([y for _, y in found]).tolist() == list(range(10))


def test_bytes_are_normalised_by_mean_and_std_in_units_of_one():
    data = ImageSet(torch.full((2, 3, 2, 2), 255, dtype=torch.uint8), torch.zeros(2).long())
    ((x, _),) = ImageBatches(data, 2, train=False, mean=(0.5, 0.0, 1.0), std=(0.5, 0.25, 1.0))
    torch.testing.assert_close(x[0, :, 0, 0], torch.tensor([1.0, 4.0, 0.0]))


def test_zeros_around_an_image_are_black_before_it_is_normalised():
    data = ImageSet(torch.full((8, 1, 3, 3), 255, dtype=torch.uint8), torch.zeros(8).long())
    ((x, _),) = ImageBatches(data, 8, train=True, mean=(0.5,), std=(0.5,), pad=2, pad_mode="constant")
    assert set(x.unique().tolist()) == {-1.0, 1.0}


def test_each_image_is_cropped_at_its_own_place_and_stays_itself():
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(64.0).view(1, 1, 8, 8).expand(50, 1, 8, 8)
    crops = random_crop(x, 2, "constant", generator)
    padded = torch.nn.functional.pad(x[:1], (2,) * 4)
    places = [padded[0, 0, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    found = [next(k for k, place in enumerate(places) if torch.equal(crop[0], place)) for crop in crops]
    assert len(set(found)) > 10


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="between 1 and the 10 images"):
        ImageBatches(numbered(), 11, train=True)


def test_digits_are_split_without_overlap_and_alike_every_time():
    pytest.importorskip("sklearn")
    train, test = load_digits()
    assert len(test) == NUM_TEST and len(train) + len(test) == 1797
    assert train.images.shape[1:] == (1, 8, 8) and 0 <= train.images.min() and train.images.max() == 1
    assert set(train.labels.tolist()) == set(range(10))
    again, _ = load_digits()
    assert torch.equal(train.labels, again.labels)
    other, _ = load_digits(seed=1)
    assert not torch.equal(train.labels, other.labels)
