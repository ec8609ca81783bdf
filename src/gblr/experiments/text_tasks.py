"""Text as experiments use it, in tokens on the device: windows for language models, sentences for encoders."""

import abc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from gblr.conversion.measure import undisturbed
from gblr.data.tokens import Windows
from gblr.experiments.text_run import TextRun
from gblr.training.batches import to_device
from gblr.training.objective import Loss
from gblr.workflows.language_task import perplexity
from gblr.workflows.outputs_task import embed
from gblr.workflows.similarity_task import spearman

_CALIBRATION_BATCH = 4  # of windows: several runs share a GPU, and logits of a large vocabulary take the most
_EVAL_BATCH = 64
_MULTIPLE = 8  # of tokens: few lengths to capture, and what matrix units ask for
_ORDERED = 64  # batches within which sentences are sorted by length


class TextTask(abc.ABC):
    """What a run is calibrated, trained and judged on. `metric` is what counts most among what `judge` returns."""

    metric: str
    higher_is_better: bool
    match: Literal["logits", "hidden"]  # what training towards the dense model compares
    vocabulary: int
    tiny: bool
    device: Any

    @abc.abstractmethod
    def to(self, device: Any) -> "TextTask": ...

    @abc.abstractmethod
    def holding_out(self, num: int) -> "TextTask":
        """The last `num` training samples are judged in place of the test, and not trained on."""

    @abc.abstractmethod
    def calibration(self, num: int) -> list[dict[str, Tensor]]:
        """That many samples without labels, in batches, as a model is called with them."""

    @abc.abstractmethod
    def training(self, run: TextRun) -> Sequence[dict[str, Tensor]]:
        """Batches of one epoch, with labels if the run aims at them."""

    @property
    def loss(self) -> Loss | None:
        """Of a training batch with labels; None if the model computes it itself."""
        return None

    @abc.abstractmethod
    def judge(self, model: nn.Module, all_metrics: bool = True) -> dict[str, float]:
        """Without `all_metrics`, what counts most alone."""

    @property
    @abc.abstractmethod
    def example(self) -> Int[Tensor, "1 length"]:
        """Tokens of one sample."""


# -- language models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowTask(TextTask):
    """Windows of a fixed length; the next token is to be told. `tests` are texts by name, the first counts most."""

    train: Int[Tensor, "n length"]
    inputs: Int[Tensor, "m length"]  # for calibration
    tests: Mapping[str, Int[Tensor, "k length"]]
    vocabulary: int
    device: Any = "cpu"
    tiny: bool = False

    higher_is_better = False
    match = "logits"

    @property
    def metric(self) -> str:  # type: ignore[override]
        return next(iter(self.tests))

    def to(self, device: Any) -> "WindowTask":
        return replace(self, device=device)

    def holding_out(self, num: int) -> "WindowTask":
        return replace(self, train=self.train[:-num], tests={"held out": self.train[-num:]})

    def calibration(self, num: int) -> list[dict[str, Tensor]]:
        if num > len(self.inputs):
            raise ValueError(f"there are {len(self.inputs)} windows for calibration; got {num}.")
        parts = self.inputs[:num].long().split(_CALIBRATION_BATCH)
        return [to_device({"input_ids": part}, self.device) for part in parts]

    def training(self, run: TextRun) -> "WindowBatches":
        return WindowBatches(self.train, run.batch_size, run.seed, with_labels=run.aim == "data")

    def judge(self, model: nn.Module, all_metrics: bool = True) -> dict[str, float]:
        names = list(self.tests) if all_metrics else [self.metric]
        with undisturbed(model):
            return {name: perplexity(model, Windows(self.tests[name].long())) for name in names}

    @property
    def example(self) -> Int[Tensor, "1 length"]:
        return self.train[:1].long().to(self.device)


class WindowBatches(Sequence[dict[str, Tensor]]):
    """Windows in an order that follows from the seed and the epoch; a rest that fills no batch is left out."""

    def __init__(self, windows: Int[Tensor, "n length"], batch_size: int, seed: int, with_labels: bool):
        if len(windows) < batch_size:
            raise ValueError(f"there are {len(windows)} windows, fewer than a batch of {batch_size}.")
        self.windows, self.batch_size, self.seed, self.with_labels = windows, batch_size, seed, with_labels
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        self.order = torch.randperm(len(self.windows), generator=generator)

    def __len__(self) -> int:
        return len(self.windows) // self.batch_size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        tokens = self.windows[rows].long()
        return {"input_ids": tokens, "labels": tokens} if self.with_labels else {"input_ids": tokens}


# -- sentences ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sentences:
    """Tokens of sentences, filled up to the longest."""

    tokens: Int[Tensor, "n longest"]
    lengths: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, index: Tensor) -> dict[str, Tensor]:
        lengths = self.lengths[index]
        longest = min(self.tokens.shape[1], -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE)
        mask = torch.arange(longest) < lengths[:, None]
        return {"input_ids": self.tokens[index][:, :longest].long(), "attention_mask": mask.long()}

    def part(self, index: slice) -> "Sentences":
        return Sentences(self.tokens[index], self.lengths[index])


@dataclass(frozen=True)
class Pairs:
    """Sentences with the similarity that people gave them, 0 to 1."""

    first: Sentences
    second: Sentences
    scores: Float[Tensor, " n"]

    def part(self, index: slice) -> "Pairs":
        return Pairs(self.first.part(index), self.second.part(index), self.scores[index])


@dataclass(frozen=True)
class SentenceTask(TextTask):
    """Cosines of sentence embeddings against similarities given by people, by Spearman's correlation."""

    sentences: Sentences  # without labels
    inputs: Sentences  # for calibration
    train: Pairs
    test: Pairs
    vocabulary: int
    device: Any = "cpu"
    tiny: bool = False

    metric = "spearman"
    higher_is_better = True
    match = "hidden"

    def to(self, device: Any) -> "SentenceTask":
        return replace(self, device=device)

    def holding_out(self, num: int) -> "SentenceTask":
        kept = len(self.train.scores) - num
        return replace(self, train=self.train.part(slice(kept)), test=self.train.part(slice(kept, None)))

    def calibration(self, num: int) -> list[dict[str, Tensor]]:
        if num > len(self.inputs):
            raise ValueError(f"there are {len(self.inputs)} sentences for calibration; got {num}.")
        order = self.inputs.lengths[:num].argsort()
        return [to_device(self.inputs.batch(part), self.device) for part in order.split(_EVAL_BATCH)]

    def training(self, run: TextRun) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(run.seed)
        if run.aim == "data":
            order = torch.randperm(len(self.train.scores), generator=generator)
            return [self._pairs(part) for part in _whole(order, run.batch_size)]
        order = torch.randperm(len(self.sentences), generator=generator)
        near = [part[self.sentences.lengths[part].argsort()] for part in order.split(_ORDERED * run.batch_size)]
        batches = [rows for part in near for rows in _whole(part, run.batch_size)]
        random.Random(run.seed).shuffle(batches)
        return [self.sentences.batch(rows) for rows in batches]

    def _pairs(self, rows: Tensor) -> dict[str, Tensor]:
        """Both sentences along a second axis, filled up alike."""
        both = Sentences(
            torch.stack([self.train.first.tokens[rows], self.train.second.tokens[rows]], 1).flatten(0, 1),
            torch.stack([self.train.first.lengths[rows], self.train.second.lengths[rows]], 1).flatten(),
        )
        batch = {key: t.unflatten(0, (-1, 2)) for key, t in both.batch(torch.arange(len(both))).items()}
        return batch | {"scores": self.train.scores[rows]}

    @property
    def loss(self) -> Loss:
        return similarity_loss

    def judge(self, model: nn.Module, all_metrics: bool = True) -> dict[str, float]:
        with undisturbed(model), torch.no_grad():
            first, second = (self._embedded(model, side) for side in (self.test.first, self.test.second))
            return {"spearman": spearman(functional.cosine_similarity(first, second), self.test.scores.double())}

    def _embedded(self, model: nn.Module, sentences: Sentences) -> Float[Tensor, "n width"]:
        order = sentences.lengths.argsort()
        parts = [embed(model, sentences.batch(rows)).cpu() for rows in order.split(_EVAL_BATCH)]
        return torch.cat(parts)[order.argsort()].double()

    @property
    def example(self) -> Int[Tensor, "1 length"]:
        return self.inputs.batch(torch.tensor([0]))["input_ids"].to(self.device)


def similarity_loss(model: Any, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Squared error of the cosine of two sentences to their similarity."""
    inputs = {key: batch[key].flatten(0, 1) for key in ("input_ids", "attention_mask")}
    found = model(**inputs).last_hidden_state.float()
    weight = inputs["attention_mask"][..., None].to(found.dtype)
    means = ((found * weight).sum(1) / weight.sum(1)).unflatten(0, (-1, 2))
    cosines = functional.cosine_similarity(means[:, 0], means[:, 1])
    return functional.mse_loss(cosines, batch["scores"])


def _whole(order: Tensor, size: int) -> list[Tensor]:
    return [part for part in order.split(size) if len(part) == size] or [order]


# -- generated text ----------------------------------------------------------------------------------------------------


def generated_windows(num: int = 48, length: int = 24, vocabulary: int = 64, seed: int = 0) -> WindowTask:
    """A walk over tokens in which each has a few likely followers: losses fall within a few steps."""
    generator = torch.Generator().manual_seed(seed)
    followers = torch.randint(vocabulary, (vocabulary, 3), generator=generator)
    tokens = torch.randint(vocabulary, (2 * num, 1), generator=generator)
    for _ in range(length - 1):
        choice = torch.randint(3, (2 * num,), generator=generator)
        tokens = torch.cat([tokens, followers[tokens[:, -1], choice][:, None]], 1)
    return WindowTask(tokens[:num], tokens[:num], {"generated": tokens[num:]}, vocabulary, tiny=True)


def generated_sentences(num: int = 64, longest: int = 12, vocabulary: int = 64, seed: int = 0) -> SentenceTask:
    """Pairs of random sentences; the second shares tokens with the first in proportion to the score."""
    generator = torch.Generator().manual_seed(seed)

    def sentences(count: int) -> Sentences:
        tokens = torch.randint(vocabulary, (count, longest), generator=generator)
        return Sentences(tokens, torch.randint(4, longest + 1, (count,), generator=generator))

    def pairs() -> Pairs:
        first = sentences(num)
        scores = torch.rand(num, generator=generator)
        same = torch.rand(num, longest, generator=generator) < scores[:, None]
        second = Sentences(torch.where(same, first.tokens, sentences(num).tokens), first.lengths)
        return Pairs(first, second, scores)

    return SentenceTask(sentences(num), sentences(num), pairs(), pairs(), vocabulary, tiny=True)
