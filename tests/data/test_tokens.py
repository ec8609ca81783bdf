from types import SimpleNamespace

import pytest
import torch

from gblr.data import tokens
from gblr.data.tokens import TextSet, Windows, pack, token_ids
from tests.models.tiny_models import WORDS, sentences, tokenizer

END = 4


def ids(text):
    return [5 + WORDS.index(word) for word in text.split()]


def test_texts_are_packed_one_after_the_other_with_the_end_mark_between():
    texts = ["the cat sees", "a dog", "the bird likes a tree"]
    whole = [*ids(texts[0]), END, *ids(texts[1]), END, *ids(texts[2])]
    found = pack(texts, tokenizer(marks=False), length=4)
    assert found.tolist() == [whole[:4], whole[4:8], whole[8:12]]
    assert pack(texts, tokenizer(marks=False), length=4, most=2).tolist() == found.tolist()[:2]
    assert pack(["the"], tokenizer(marks=False), length=4).shape == (0, 4)


def test_only_as_many_texts_are_tokenised_as_are_needed():
    read = []

    def texts():
        for text in sentences(100):
            read.append(text)
            yield text

    pack(texts(), tokenizer(marks=False), length=8, most=2)
    assert len(read) < 8


def test_long_texts_are_cut_at_line_ends(monkeypatch):
    text = "\n".join(sentences(30))
    whole = pack([text], tokenizer(marks=False), length=2)
    monkeypatch.setattr(tokens, "_PIECE", 100)
    assert torch.equal(pack([text], tokenizer(marks=False), length=2), whole)


def test_tokenizers_of_ones_own_need_encode_only():
    assert token_ids(SimpleNamespace(encode=lambda text: [1, 2]), "x") == [1, 2]
    assert token_ids(SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[3])), "x") == [3]


def test_windows_give_labels_in_training_and_none_as_inputs():
    data = torch.arange(12).view(3, 4)
    windows = Windows(data)
    assert windows[1]["labels"].tolist() == [4, 5, 6, 7]
    assert list(windows.inputs([0, 2])) == ["input_ids"] and windows.inputs([0, 2])["input_ids"].shape == (2, 4)
    assert torch.equal(Windows(data, named=False).inputs([2]), data[2:])


def test_texts_are_padded_to_the_longest_of_their_batch():
    data = TextSet(["the cat", "a big red dog sees", "very old"], tokenizer(marks=True), 6, torch.tensor([1, 0, 1]))
    batch = data.inputs([0, 2])
    assert batch["input_ids"].shape == (2, 4) and batch["attention_mask"].all()
    rows = data.__getitems__([0, 1])
    assert [len(row["input_ids"]) for row in rows] == [6, 6]  # the second is cut off: seven with its marks
    assert rows[0]["attention_mask"].tolist() == [1, 1, 1, 1, 0, 0] and rows[0]["labels"] == 1
    assert data.order() == [0, 2, 1] and data[2]["input_ids"].shape == (4,)


@pytest.mark.parametrize("labelled", [True, False])
def test_labels_are_there_only_if_given(labelled):
    data = TextSet(["the cat"], tokenizer(marks=True), 8, torch.tensor([1]) if labelled else None)
    assert ("labels" in data[0]) == labelled and "labels" not in data.inputs([0])
