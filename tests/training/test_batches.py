import random
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from gblr.training.assembly import start_accelerator
from gblr.training.batches import cut, make_batches, num_samples, to_device
from gblr.training.order import PartSampler, SeededDataset
from gblr.training.rng import Stream, derived_seed, rng_state, seed_all, set_rng_state
from gblr.training.train_config import TrainConfig

CPU = torch.device("cpu")


def process(rank=0, of=1):
    return SimpleNamespace(device=CPU, process_index=rank, num_processes=of)


def numbers(length):
    return TensorDataset(torch.arange(length), torch.arange(length) % 3)


class Augmented(Dataset):
    """Draws from all three global generators."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()]), index


def epoch(data, number=0, skip=0, rank=0, of=1, train=True, **options):
    config = TrainConfig(batch_size=4, **options)
    return list(make_batches(data, config, process(rank, of), train).epoch(number, skip))


def inputs(parts):
    return [x.tolist() for (x, _), _ in parts]


def test_a_training_epoch_has_every_sample_once_in_an_order_of_its_own():
    first, again, second = (inputs(epoch(numbers(12), number)) for number in (0, 0, 1))
    assert sorted(chain.from_iterable(first)) == list(range(12))
    assert first == again != second


def test_another_seed_is_another_order():
    assert inputs(epoch(numbers(12))) != inputs(epoch(numbers(12), seed=1))


def test_the_rest_is_dropped_in_training_and_kept_in_evaluation():
    assert [real for _, real in epoch(numbers(10))] == [4, 4]
    parts = epoch(numbers(10), train=False)
    assert list(chain.from_iterable(inputs(parts))) == list(range(10))
    assert [real for _, real in parts] == [4, 4, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_be_taken_up_in_its_middle_with_the_same_random_numbers(workers):
    whole = inputs(epoch(Augmented(), num_workers=workers))
    assert inputs(epoch(Augmented(), skip=2)) == whole[2:]
    assert len({tuple(row[1:]) for batch in whole for row in batch}) == 12  # all draws differ


def test_processes_share_each_batch_and_augment_as_one_would():
    whole = inputs(epoch(Augmented()))
    parts = [inputs(epoch(Augmented(), rank=rank, of=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_a_process_without_a_sample_of_the_rest_reads_one_that_does_not_count():
    parts = [epoch(numbers(9), rank=rank, of=4, train=False) for rank in range(4)]
    assert [[real for _, real in part] for part in parts] == [[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert all(len(x) == 1 for part in parts for (x, _), _ in part)
    counted = [x for part in parts for (x, _), real in part for x in x.tolist()[:real]]
    assert sorted(counted) == list(range(9))


def test_data_draws_from_a_stream_of_its_own():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert len(epoch(Augmented())) == 3
    assert torch.equal(torch.rand(3), expected)


class Shuffled:
    """Batches made on the fly, with the global generator, as users do."""

    def __init__(self):
        self.epochs = []

    def __len__(self):
        return 3

    def set_epoch(self, number):
        self.epochs.append(number)

    def __iter__(self):
        for index in torch.randperm(12).split(4):
            yield index + torch.rand(4), index


def test_any_iterable_of_batches_is_replayed_exactly():
    data = Shuffled()
    whole, later = inputs(epoch(data, number=2)), inputs(epoch(data, number=2, skip=1))
    assert later == whole[1:] and data.epochs == [2, 2]
    assert whole != inputs(epoch(data, number=3))


def test_processes_take_their_part_of_given_batches():
    whole = inputs(epoch(Shuffled()))
    parts = [inputs(epoch(Shuffled(), rank=rank, of=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_given_batches_for_evaluation_may_be_too_small_for_all_processes():
    data = [(torch.arange(3), torch.arange(3))]
    parts = [epoch(data, rank=rank, of=4, train=False)[0] for rank in range(4)]
    assert [(x.tolist(), real) for (x, _), real in parts] == [([0], 0), ([0], 1), ([1], 1), ([2], 1)]
    with pytest.raises(ValueError, match="4 processes cannot share a batch of 3 equally"):
        epoch(data, of=4)


def test_a_loader_of_the_users_is_shuffled_by_the_seed_and_can_be_taken_up():
    config = TrainConfig(batch_size=4)
    accelerator = start_accelerator(config)

    def order(number, skip=0):
        loader = DataLoader(numbers(12), batch_size=4, shuffle=True)
        return inputs(make_batches(loader, config, accelerator, True).epoch(number, skip))

    assert order(0) == order(0) != order(1)
    assert order(1, skip=1) == order(1)[1:]


def test_generators_of_a_loaders_samplers_follow_the_epoch():
    config = TrainConfig(batch_size=4)
    accelerator = start_accelerator(config)

    def batches():
        generator = torch.Generator().manual_seed(5)
        sampler = WeightedRandomSampler(torch.ones(12), 12, generator=generator)
        return make_batches(DataLoader(numbers(12), batch_size=4, sampler=sampler), config, accelerator, True)

    run = batches()
    first, second = (inputs(run.epoch(number)) for number in range(2))
    assert first != second
    assert inputs(batches().epoch(1, skip=1)) == second[1:]


class Buckets(Sampler):
    """Batches of several sizes, in an order of its own."""

    def __init__(self):
        self.generator, self.epochs = torch.Generator(), []

    def __len__(self):
        return 3

    def set_epoch(self, number):
        self.epochs.append(number)

    def __iter__(self):
        whole = [list(range(4)), list(range(4, 6)), list(range(6, 12))]
        yield from (whole[place] for place in torch.randperm(3, generator=self.generator))


def test_a_loader_whose_batches_have_no_common_size_is_taken_as_it_is():
    buckets = Buckets()
    loader = DataLoader(numbers(12), batch_sampler=buckets)
    whole = [inputs(epoch(loader, number)) for number in range(6)]
    assert sorted(chain.from_iterable(whole[0])) == list(range(12)) and buckets.epochs == list(range(6))
    assert {len(batch) for batch in whole[0]} == {4, 2, 6} and len({str(batches) for batches in whole}) > 1
    assert inputs(epoch(loader, 3, skip=1)) == whole[3][1:]
    parts = [inputs(epoch(loader, rank=rank, of=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole[0]


class Stored(IterableDataset):
    """Whole batches, one after the other."""

    def __len__(self):
        return 3

    def __iter__(self):
        return (tuple(part) for part in zip(*(t.split(4) for t in numbers(12).tensors), strict=True))


def test_a_loader_of_whole_batches_is_taken_as_it_is():
    assert inputs(epoch(DataLoader(Stored(), batch_size=None))) == torch.arange(12).view(3, 4).tolist()


class Batched(Dataset):
    """Reads a batch at once, as Hugging Face's data sets do."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, indices):
        return [(index, torch.rand(()).item()) for index in indices]


def test_data_sets_that_read_batches_are_asked_for_batches():
    assert len(epoch(Batched())) == 2
    assert epoch(Batched(), skip=1)[0][0][1].tolist() == epoch(Batched())[1][0][1].tolist()


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (iter([1]), TypeError, "an iterable of batches with a length"),
        (type("Endless", (IterableDataset,), {"__iter__": lambda self: iter([1])})(), TypeError, "with a length"),
        (
            DataLoader(type("Endless", (IterableDataset,), {"__iter__": lambda self: iter([1])})(), batch_size=2),
            TypeError,
            r"DataLoader over Endless has no length.*give Endless a `__len__`",
        ),
        (Stored(), TypeError, r"Stored is an IterableDataset.*DataLoader\(data, batch_size=None\) if batches"),
        ([], ValueError, "the training data is empty"),
        (numbers(3), ValueError, "`batch_size` must be at most the 3 training samples; got 4"),
    ],
)
def test_unsuitable_data_is_refused(data, error, words):
    with pytest.raises(error, match=words):
        epoch(data)


def test_the_global_batch_must_be_divisible():
    with pytest.raises(ValueError, match="all 3 processes together and must be a multiple of their number; got 4"):
        epoch(numbers(12), of=3)


def test_batches_of_any_nesting_are_cut_and_moved():
    batch = {"x": torch.arange(6).view(3, 2), "more": [torch.arange(3), "text", torch.tensor(7)]}
    part = cut(batch, 1, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]] and part["more"][0].tolist() == [1, 2]
    assert part["more"][1] == "text" and part["more"][2] == 7
    assert to_device(batch, torch.device("meta"))["x"].is_meta
    assert num_samples(batch) == 3
    with pytest.raises(ValueError, match="got str without such a tensor"):
        num_samples("text")


def test_samples_carry_seeds_that_depend_on_epoch_and_sample_alone():
    samplers = [PartSampler(8, 4, True, seed=0, rank=rank, num_processes=2) for rank in range(2)]
    seeds = {}
    for number in range(2):
        for sampler in samplers:
            sampler.start(number)
            seeds |= {(number, sample.place): sample.seed for part in sampler for sample in part}
    assert len(set(seeds.values())) == len(seeds) == 16


def test_plain_tensors_are_read_without_seeding():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sampler = PartSampler(8, 4, True, seed=0)
    assert len(SeededDataset(numbers(8)).__getitems__(next(iter(sampler)))) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_random_state_covers_all_generators_and_goes_through_a_file(tmp_path):
    seed_all(3)
    torch.save(rng_state(CPU), tmp_path / "state")
    expected = random.random(), np.random.rand(), torch.rand(()).item(), np.random.randn()
    seed_all(4)
    set_rng_state(torch.load(tmp_path / "state", weights_only=True), CPU)
    assert (random.random(), np.random.rand(), torch.rand(()).item(), np.random.randn()) == expected


def test_a_stream_goes_on_where_it_was_and_leaves_the_rest_alone():
    stream, other = Stream(5, CPU), Stream(5, CPU)
    seed_all(0)
    with stream.active():
        first = torch.rand(2)
    outside = torch.rand(1)
    with pytest.raises(RuntimeError), stream.active():
        second = torch.rand(2)
        raise RuntimeError
    seed_all(0)
    assert torch.equal(torch.rand(1), outside)
    with other.active():
        assert torch.equal(torch.rand(4), torch.cat([first, second]))


def test_derived_seeds_are_the_same_everywhere():
    assert derived_seed(0, "data", 1) == 6769683688136725807
    assert derived_seed(0, 1) != derived_seed(1, 0)
