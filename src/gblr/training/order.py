"""Reading a data set in a seeded order that can be taken up at any batch, by any number of processes and workers."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, TensorDataset

from gblr.training.rng import derived_seed


class Sample(NamedTuple):
    """Which sample, and the seed of whatever is random in reading it."""

    place: int
    seed: int


class SeededDataset(Dataset):
    """Reads each sample with random numbers of its own: augmentation is the same whoever reads it, and when.

    Python's, numpy's and torch's global generators are left seeded; `Stream.active` around the reading puts them back.
    A data set that reads whole batches at once (Hugging Face's) has one seed for those.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self._batched = getattr(dataset, "__getitems__", None)
        self._fixed = type(dataset) is TensorDataset  # nothing random in it; seeding takes longer than reading

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: Sample) -> Any:
        if not self._fixed:
            _seed_host(sample.seed)
        return self.dataset[sample.place]

    def __getitems__(self, samples: list[Sample]) -> list[Any]:
        if self._batched is None:
            return [self[sample] for sample in samples]
        _seed_host(samples[0].seed)
        return self._batched([sample.place for sample in samples])


def _seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class PartSampler(Sampler[list[Sample]]):
    """Of each global batch the part of one process. `start` says which epoch comes next and how much of it is done.

    Training shuffles and drops an incomplete last batch. Evaluation keeps both order and rest; a process that is left
    without a sample of the rest reads the first one, so that all processes run the model equally often.
    """

    def __init__(self, length: int, batch_size: int, train: bool, seed: int, rank: int = 0, num_processes: int = 1):
        self.length, self.batch_size, self.train, self.seed = length, batch_size, train, seed
        self.rank, self.num_processes = rank, num_processes
        self.epoch = self.skip = 0

    def start(self, epoch: int, skip: int = 0) -> None:
        self.epoch, self.skip = epoch, skip

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.batch_size)
        return whole if self.train or rest == 0 else whole + 1

    def num_real(self, batch: int) -> int:
        """How many samples of this process's part of that batch count."""
        size = min(self.batch_size, self.length - batch * self.batch_size)
        begin, end = part_of(size, self.rank, self.num_processes)
        return end - begin

    def __iter__(self) -> Iterator[list[Sample]]:
        order = self._order()
        for batch in range(self.skip, len(self)):
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            begin, end = part_of(len(whole), self.rank, self.num_processes)
            part = whole[begin:end] or whole[:1]
            yield [Sample(index, derived_seed(self.seed, self.epoch, index)) for index in part]

    def _order(self) -> list[int]:
        if not self.train:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(derived_seed(self.seed, self.epoch))
        return torch.randperm(self.length, generator=generator, device="cpu").tolist()


def part_of(size: int, rank: int, num_processes: int) -> tuple[int, int]:
    """Begin and end of a process's part of `size` samples; all parts are equal where the number divides `size`."""
    return rank * size // num_processes, (rank + 1) * size // num_processes
