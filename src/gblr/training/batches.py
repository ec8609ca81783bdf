"""Whatever a user calls data, as batches of this process, on its device, epoch by epoch and from any batch on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gblr.training.order import PartSampler, SeededDataset, part_of
from gblr.training.rng import Stream, derived_seed
from gblr.training.train_config import TrainConfig

Part = tuple[Any, int]  # a batch, and how many of its samples count


class Batches(ABC):
    """The global batches of an epoch, of which each process sees its part.

    All that is random in making them draws from a stream of its own, seeded by run and epoch: the model's random
    numbers do not depend on the data's, and an epoch can be taken up in its middle.
    """

    def __init__(self, config: TrainConfig, accelerator: Any):
        self.seed, self.device = config.seed, accelerator.device
        self.rank, self.num_processes = accelerator.process_index, accelerator.num_processes

    @abstractmethod
    def __len__(self) -> int:
        """Global batches in an epoch."""

    @abstractmethod
    def _parts(self, epoch: int, skip: int) -> Iterator[Part]:
        """The parts of this process from global batch `skip` on."""

    def epoch(self, number: int, skip: int = 0) -> Iterator[Part]:
        stream = Stream(derived_seed(self.seed, "data", number), self.device)
        parts = self._parts(number, skip)
        while True:
            with stream.active():
                part = next(parts, None)
            if part is None:
                return
            yield to_device(part[0], self.device), part[1]


class DatasetBatches(Batches):
    """A map-style data set, in a seeded order."""

    def __init__(
        self,
        dataset: Any,
        config: TrainConfig,
        accelerator: Any,
        train: bool,
        collate: Callable[[list[Any]], Any] | None,
    ):
        super().__init__(config, accelerator)
        if train and len(dataset) < config.batch_size:
            raise ValueError(
                f"`batch_size` must be at most the {len(dataset)} training samples; got {config.batch_size}."
            )
        self.dataset = dataset
        self.sampler = PartSampler(len(dataset), config.batch_size, train, config.seed, self.rank, self.num_processes)
        self.loader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset),
            batch_sampler=self.sampler,
            collate_fn=collate,
            num_workers=config.num_workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=config.num_workers > 0 and not hasattr(dataset, "set_epoch"),
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def _parts(self, epoch: int, skip: int) -> Iterator[Part]:
        _set_epoch(self.dataset, epoch)
        self.sampler.start(epoch, skip)
        for number, batch in enumerate(self.loader, start=skip):
            yield batch, self.sampler.num_real(number)


class LoaderBatches(Batches):
    """A DataLoader of the user's, which Accelerate divides among the processes; its batch size is the global one."""

    def __init__(self, loader: DataLoader[Any], config: TrainConfig, accelerator: Any):
        super().__init__(config, accelerator)
        self.given = loader
        self.loader: Any = accelerator.prepare_data_loader(loader, device_placement=False)

    def __len__(self) -> int:
        return len(self.loader)

    def _parts(self, epoch: int, skip: int) -> Iterator[Part]:
        self.loader.set_epoch(epoch)
        _seed_generators(self.given, self.seed, epoch)
        return ((batch, self._num_real(batch)) for batch in islice(self.loader, skip, None))

    def _num_real(self, batch: Any) -> int:
        """Accelerate fills the last batch up with samples from the first."""
        size = num_samples(batch)
        if self.num_processes > 1 and self.loader.end_of_dataloader and self.loader.remainder > 0:
            return min(size, max(0, self.loader.remainder - self.rank * size))
        return size


class GivenBatches(Batches):
    """Any sized iterable of global batches; every process goes through all of it and takes its part of each."""

    def __init__(self, data: Any, config: TrainConfig, accelerator: Any, train: bool):
        super().__init__(config, accelerator)
        self.data, self.train = data, train

    def __len__(self) -> int:
        return len(self.data)

    def _parts(self, epoch: int, skip: int) -> Iterator[Part]:
        _set_epoch(self.data, epoch)
        if isinstance(self.data, DataLoader):
            for part in (self.data.dataset, *_samplers(self.data)):
                _set_epoch(part, epoch)
            _seed_generators(self.data, self.seed, epoch)
        return (self._part(batch) for batch in islice(self.data, skip, None))

    def _part(self, batch: Any) -> Part:
        size = num_samples(batch)
        if self.num_processes == 1:
            return batch, size
        if self.train and size % self.num_processes:
            raise ValueError(f"{self.num_processes} processes cannot share a batch of {size} equally; use a multiple.")
        begin, end = part_of(size, self.rank, self.num_processes)
        return cut(batch, begin, max(end, begin + 1)) if begin < size else cut(batch, 0, 1), end - begin


def make_batches(
    data: Any, config: TrainConfig, accelerator: Any, train: bool, collate: Callable[[list[Any]], Any] | None = None
) -> Batches:
    """Picks by type: DataLoader, data set (torch's or Hugging Face's), or an iterable of batches."""
    if config.batch_size % accelerator.num_processes:
        raise ValueError(
            f"`batch_size` is that of all {accelerator.num_processes} processes together and must be a multiple of "
            f"their number; got {config.batch_size}."
        )
    if not isinstance(data, Sized) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise TypeError(
            "data must be a data set, a DataLoader, or an iterable of batches with a length; "
            f"got {type(data).__name__} without one."
        )
    if _length(data) == 0:
        raise ValueError(f"the {'training' if train else 'evaluation'} data is empty.")
    if isinstance(data, DataLoader):
        if data.batch_size or getattr(data.batch_sampler, "batch_size", None):
            return LoaderBatches(data, config, accelerator)
        return GivenBatches(data, config, accelerator, train)  # Accelerate divides batches of one size only
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"{type(data).__name__} is an IterableDataset, which may give samples or batches; pass "
            "DataLoader(data, batch_size=...) if it gives samples, DataLoader(data, batch_size=None) if batches."
        )
    if isinstance(data, Dataset) or hasattr(data, "__getitems__"):
        return DatasetBatches(data, config, accelerator, train, collate)
    return GivenBatches(data, config, accelerator, train)


def _length(data: Sized) -> int:
    try:
        return len(data)
    except TypeError as error:  # a DataLoader asks its data set
        inner = type(getattr(data, "dataset", data)).__name__
        raise TypeError(
            f"{type(data).__name__} over {inner} has no length, and schedules need the number of batches in an epoch; "
            f"give {inner} a `__len__`, the number of samples (of batches, where batch_size=None)."
        ) from error


def num_samples(batch: Any) -> int:
    """Length of the first axis of the first tensor."""
    for leaf in tensors_in(batch):
        if leaf.dim() > 0:
            return len(leaf)
    raise ValueError(
        "a batch is a tuple (inputs, labels) or a mapping of keyword arguments, with samples along the first axis of "
        f"its tensors; got {type(batch).__name__} without such a tensor."
    )


def cut(batch: Any, begin: int, end: int) -> Any:
    """Samples begin .. end - 1 of a batch."""
    size = num_samples(batch)
    return map_tensors(lambda t: t[begin:end] if t.dim() > 0 and len(t) == size else t, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    return map_tensors(lambda t: t.to(device, non_blocking=True), batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Over all tensors; mappings such as a tokenizer's BatchEncoding come back as dicts."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(map_tensors(function, value) for value in batch)
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All of them, in an order that depends on the keys and places alone."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def _set_epoch(data: Any, epoch: int) -> None:
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    return [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]


def _seed_generators(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    """Those that the loader and its samplers own: what an earlier epoch drew from them is lost in a continued run."""
    found = [getattr(owner, "generator", None) for owner in (loader, *_samplers(loader))]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    for number, generator in enumerate(unique.values()):
        generator.manual_seed(derived_seed(seed, "generator", number, epoch))
