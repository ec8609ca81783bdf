"""Real text as tasks: read and tokenised once, and kept as numbers beside the results.

A folder of data has imdb/ (parquet: text, label), text/ (.txt.xz: wikitext-2-raw-test.raw, wikipedia-articles-sample,
c4-sample) and stsb/ (parquet: sentence1, sentence2, similarity_score), or, for WikiText-103, files whose names say
train, valid and test.
"""

import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gblr.atomic import appearing
from gblr.data.tables import read_parquet
from gblr.data.text import read_texts
from gblr.data.tokens import pack
from gblr.experiments.text_models import load_text_model
from gblr.experiments.text_tasks import Pairs, Sentences, SentenceTask, TextTask, WindowTask
from gblr.progress import progress

Arrays = dict[str, np.ndarray]
_LENGTH, _SHORT = 1024, 512  # tokens of a window
_CALIBRATION = 128  # windows, of the Wikipedia sample
_TESTED = 80  # windows of a test text: 81,840 tokens told
_TRAIN = 13_500  # windows at most
_VOCABULARY = 8192  # of the tokenizer that is trained on IMDb
_SENTENCES, _LONGEST = 200_000, 128  # without labels; tokens of one
_TOKENISED_AT_ONCE = 10_000


def load_text_task(name: str, data: Path, cache: Path, model: str) -> TextTask:
    """`name` is "smollm2", "imdb", "stsb" or "wikitext103"; `model` is where its tokenizer is."""
    read, build = _TASKS[name]
    file = cache / f"{name}-tokens.npz"
    if not file.exists():
        arrays = read(Path(data), model)
        cache.mkdir(parents=True, exist_ok=True)
        with appearing(file) as new, new.open("wb") as stream:
            np.savez_compressed(stream, **{key: _narrow(value) for key, value in arrays.items()})  # type: ignore
    with np.load(file) as stored:
        return build({key: stored[key] for key in stored.files})


def _narrow(values: np.ndarray) -> np.ndarray:
    whole = np.issubdtype(values.dtype, np.integer)
    return values.astype(np.uint16) if whole and values.max(initial=0) < 1 << 16 else values


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32) if np.issubdtype(values.dtype, np.integer) else values)


# -- language models ---------------------------------------------------------------------------------------------------


def _read_smollm2(data: Path, model: str) -> Arrays:
    """Trained on reviews and what calibration leaves of the Wikipedia sample; tested on three kinds of text."""
    tokenizer = _tokenizer("smollm2", model)
    wikipedia = _packed(_texts(data, "wikipedia-articles-sample"), tokenizer, _LENGTH)
    articles = wikipedia[_CALIBRATION : _CALIBRATION + _TRAIN // 2]
    reviews = _shuffled(_reviews(data, "train", "unsupervised"))
    return {
        "inputs": wikipedia[:_CALIBRATION].numpy(),
        "train": torch.cat([articles, _packed(reviews, tokenizer, _LENGTH, _TRAIN - len(articles))]).numpy(),
        "test wikitext2": _packed(_texts(data, "wikitext-2-raw-test.raw"), tokenizer, _LENGTH, _TESTED).numpy(),
        "test c4": _packed(_texts(data, "c4-sample"), tokenizer, _LENGTH, _TESTED).numpy(),
        "test imdb": _packed(_shuffled(_reviews(data, "test")), tokenizer, _LENGTH, _TESTED).numpy(),
        "vocabulary": np.array(len(tokenizer)),
    }


def _read_imdb(data: Path, model: str) -> Arrays:
    """With a byte-level BPE tokenizer that is trained on the same reviews."""
    reviews = _shuffled(_reviews(data, "train", "unsupervised"))
    tokenizer = _trained_tokenizer(reviews)
    train = _packed(reviews, tokenizer, _SHORT)
    return {
        "train": train.numpy(),
        "inputs": train[: 2 * _CALIBRATION].numpy(),
        "test imdb": _packed(_shuffled(_reviews(data, "test")), tokenizer, _SHORT, 4 * _TESTED).numpy(),
        "vocabulary": np.array(_VOCABULARY),
    }


def _read_wikitext103(data: Path, model: str) -> Arrays:
    tokenizer = _tokenizer("gpt2", model)
    found = read_texts(data)
    if missing := {"train", "validation", "test"} - set(found):
        raise FileNotFoundError(f"{data} has no text for {', '.join(sorted(missing))}; it has {', '.join(found)}.")
    train = _packed(found["train"], tokenizer, _LENGTH)
    return {
        "train": train.numpy(),
        "inputs": train[:_CALIBRATION].numpy(),
        "test validation": _packed(found["validation"], tokenizer, _LENGTH).numpy(),
        "test test": _packed(found["test"], tokenizer, _LENGTH).numpy(),
        "vocabulary": np.array(len(tokenizer)),
    }


def _window_task(arrays: Arrays) -> WindowTask:
    tests = {key.removeprefix("test "): _tensor(value) for key, value in arrays.items() if key.startswith("test ")}
    return WindowTask(_tensor(arrays["train"]), _tensor(arrays["inputs"]), tests, int(arrays["vocabulary"]))


def _packed(texts: list[str], tokenizer: Any, length: int, most: int | None = None) -> Int[Tensor, "n length"]:
    with progress("tokenising", len(texts)) as tick:

        def ticking() -> Iterable[str]:
            for text in texts:
                yield text
                tick()

        windows = pack(ticking(), tokenizer, length, most)
    if not len(windows):
        raise ValueError(f"the text is shorter than a window of {length} tokens.")
    return windows


def _texts(data: Path, name: str) -> list[str]:
    folder = data / "text"
    file = next(iter(sorted(folder.glob(f"{name}.txt*"))), None)
    if file is None:
        raise FileNotFoundError(f"{folder} has no {name}.txt, with .xz or .gz behind it or not.")
    return [text for texts in read_texts(file).values() for text in texts]


def _reviews(data: Path, *splits: str) -> list[str]:
    """Line breaks of HTML become those of text."""
    texts = []
    for split in splits:
        files = sorted((data / "imdb").glob(f"{split}*.parquet"))
        if not files:
            raise FileNotFoundError(f"{data / 'imdb'} has no {split}*.parquet.")
        for file in files:
            for table in read_parquet(file).values():
                texts += [re.sub(r"<br ?/?>", "\n", text) for text in table["text"].to_pylist()]
    return texts


def _shuffled(texts: list[str]) -> list[str]:
    """Reviews come sorted by their opinion."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    return [texts[i] for i in order]


def _tokenizer(name: str, model: str) -> Any:
    found = load_text_model(name, model).tokenizer
    if found is None:
        raise FileNotFoundError(f"{model} has no tokenizer beside its weights.")
    return found


def _trained_tokenizer(texts: list[str]) -> Any:
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")


# -- sentences ---------------------------------------------------------------------------------------------------------


def _read_stsb(data: Path, model: str) -> Arrays:
    """Pairs of the STS benchmark; sentences without labels are its training sentences and those of reviews and
    articles.
    """
    tokenizer = _tokenizer("minilm", model)
    tables = {
        split: next(iter(read_parquet(data / "stsb" / f"{split}.parquet").values())) for split in ("train", "test")
    }
    arrays: Arrays = {"vocabulary": np.array(len(tokenizer))}
    known: list[str] = []
    for split, table in tables.items():
        for side in ("sentence1", "sentence2"):
            texts = table[side].to_pylist()
            known += texts if split == "train" else []
            arrays |= _rows(f"{split} {side}", texts, tokenizer)
        arrays[f"{split} scores"] = np.array(table["similarity_score"].to_pylist(), np.float32) / 5
    known = _shuffled(sorted(set(known)))
    more = _sentences(_texts(data, "wikipedia-articles-sample") + _shuffled(_reviews(data, "unsupervised")))
    arrays |= _rows("inputs", known[:2048], tokenizer)
    return arrays | _rows("sentences", (known + more)[:_SENTENCES], tokenizer)


def _sentences(texts: list[str]) -> list[str]:
    """A plain cut after full stops; headings and shreds are left out. No more than are used."""
    found: list[str] = []
    for text in texts:
        found += [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text) if 20 <= len(part.strip()) <= 400]
        if len(found) >= _SENTENCES:
            break
    return _shuffled(found)


def _rows(name: str, texts: list[str], tokenizer: Any) -> Arrays:
    ids: list[list[int]] = []
    with progress(f"tokenising {name}", len(texts)) as tick:
        for begin in range(0, len(texts), _TOKENISED_AT_ONCE):
            part = texts[begin : begin + _TOKENISED_AT_ONCE]
            ids += tokenizer(part, truncation=True, max_length=_LONGEST)["input_ids"]
            for _ in part:
                tick()
    lengths = np.array([len(row) for row in ids])
    tokens = np.zeros((len(ids), int(lengths.max())), np.int64)
    for row, values in zip(tokens, ids, strict=True):
        row[: len(values)] = values
    return {f"{name} tokens": tokens, f"{name} lengths": lengths}


def _sentence_task(arrays: Arrays) -> SentenceTask:
    def sentences(name: str) -> Sentences:
        return Sentences(_tensor(arrays[f"{name} tokens"]), _tensor(arrays[f"{name} lengths"]))

    def pairs(split: str) -> Pairs:
        first, second = sentences(f"{split} sentence1"), sentences(f"{split} sentence2")
        longest = max(first.tokens.shape[1], second.tokens.shape[1])
        first, second = (
            Sentences(torch.nn.functional.pad(s.tokens, (0, longest - s.tokens.shape[1])), s.lengths)
            for s in (first, second)
        )
        return Pairs(first, second, _tensor(arrays[f"{split} scores"]))

    vocabulary = int(arrays["vocabulary"])
    return SentenceTask(sentences("sentences"), sentences("inputs"), pairs("train"), pairs("test"), vocabulary)


_TASKS: dict[str, tuple[Callable[[Path, str], Arrays], Callable[[Arrays], TextTask]]] = {
    "smollm2": (_read_smollm2, _window_task),
    "imdb": (_read_imdb, _window_task),
    "wikitext103": (_read_wikitext103, _window_task),
    "stsb": (_read_stsb, _sentence_task),
}
