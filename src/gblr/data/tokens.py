"""Texts as a model takes them: windows of a fixed length for language models, padded batches for encoders."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

_PIECE = 1 << 24  # characters tokenised at once: a tokenizer needs some hundred bytes for each


@dataclass(frozen=True)
class Windows(Dataset):
    """Runs of tokens. A sample is {"input_ids", "labels"}; without `named`, for models that are no transformers
    models, it is the tokens alone.
    """

    tokens: Int[Tensor, "n length"]
    named: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    def inputs(self, index: Sequence[int]) -> Any:
        tokens = self.tokens[list(index)]
        return {"input_ids": tokens} if self.named else tokens

    def __getitem__(self, index: int) -> Any:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens} if self.named else tokens


@dataclass(frozen=True)
class TextSet(Dataset):
    """Texts, tokenised when read, cut off at `max_length` and padded to the longest of their batch."""

    texts: Sequence[str]
    tokenizer: Any
    max_length: int
    labels: Int[Tensor, " n"] | None = None
    names: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")  # of what the model takes

    def __len__(self) -> int:
        return len(self.texts)

    def inputs(self, index: Sequence[int]) -> dict[str, Tensor]:
        texts = [self.texts[i] for i in index]
        made = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
        return {name: made[name] for name in self.names if name in made}

    def order(self) -> list[int]:
        """Short texts first: read so, they need little padding."""
        return sorted(range(len(self)), key=lambda i: len(self.texts[i]))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, index: Sequence[int]) -> list[dict[str, Tensor]]:
        batch = self.inputs(index)
        if self.labels is not None:
            batch["labels"] = self.labels[list(index)]
        return [{name: value[row] for name, value in batch.items()} for row in range(len(index))]


def pack(texts: Iterable[str], tokenizer: Any, length: int, most: int | None = None) -> Int[Tensor, "n length"]:
    """One text after the other, with the tokenizer's end mark between them, cut into windows; at most `most`."""
    stream = _stream(texts, tokenizer)
    tokens = list(stream if most is None else islice(stream, most * length))
    whole = len(tokens) // length
    return torch.tensor(tokens[: whole * length], dtype=torch.long).view(whole, length)


def _stream(texts: Iterable[str], tokenizer: Any) -> Iterator[int]:
    end, last = getattr(tokenizer, "eos_token_id", None), None
    for number, text in enumerate(texts):
        if number and end is not None and last != end:
            yield end
        for piece, part in enumerate(_pieces(text)):
            ids = token_ids(tokenizer, part, begins=piece == 0)
            last = ids[-1] if ids else last
            yield from ids


def _pieces(text: str) -> Iterator[str]:
    """Long texts in parts that end with a line."""
    while len(text) > _PIECE:
        cut = text.rfind("\n", 0, _PIECE) + 1 or _PIECE
        yield text[:cut]
        text = text[cut:]
    yield text


def token_ids(tokenizer: Any, text: str, begins: bool = True) -> list[int]:
    """By a tokenizer of transformers, or by anything with `encode(text)` that gives a list or an object with `.ids`."""
    if hasattr(tokenizer, "pad_token_id"):
        return tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]
    made = tokenizer.encode(text)
    return list(getattr(made, "ids", made))
