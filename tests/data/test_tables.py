import os
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gblr.data.cifar import load_cifar10
from gblr.data.tables import (
    Columns,
    class_names,
    class_numbers,
    find_columns,
    parts_of,
    pictures,
    read_hub,
    read_parquet,
    strings,
    take,
)
from tests.data.tiny_files import image_rows, write_table


@pytest.mark.parametrize(
    ("columns", "meaning"),
    [
        (image_rows([0, 1]), Columns(image="image", label="label")),
        ({"jpg": [b"x"], "caption": ["a"]}, Columns(image="jpg")),
        ({"text": ["a"], "label": [1]}, Columns(text="text", label="label")),
        ({"id": [7], "review": ["a"], "title": ["b"]}, Columns(text="review")),
        ({"id": [7], "whatever": ["a"]}, Columns(text="whatever")),
        (
            {"sentence1": ["a"], "sentence2": ["b"], "similarity_score": [2.5]},
            Columns(pair=("sentence1", "sentence2"), score="similarity_score"),
        ),
        (
            {"idx": [0], "sentence1": ["a"], "sentence2": ["b"], "label": [1.0]},
            Columns(pair=("sentence1", "sentence2"), score="label"),
        ),
    ],
)
def test_names_and_types_tell_what_columns_mean(columns, meaning, tmp_path):
    (table,) = read_parquet(write_table(tmp_path / "a.parquet", columns)).values()
    assert find_columns(table, "a.parquet") == meaning


def test_columns_that_are_not_understood_are_listed(tmp_path):
    (table,) = read_parquet(write_table(tmp_path / "a.parquet", {"x": [1.0], "y": [2]})).values()
    with pytest.raises(
        ValueError, match=r"columns of a.parquet are not understood: x \(double\), y \(int64\). Expected"
    ):
        find_columns(table, "a.parquet")


def test_files_of_a_folder_are_joined_by_split(tmp_path):
    for i, name in enumerate(["train-0.parquet", "train-1.parquet", "test/a.parquet", "unsupervised.parquet"]):
        write_table(tmp_path / name, {"text": [name], "label": [i]})
    tables = read_parquet(tmp_path)
    assert {split: len(table) for split, table in tables.items()} == {"": 1, "train": 2, "test": 1}
    train, test = parts_of(tables, "label")
    assert strings(train, "text") == ["train-0.parquet", "train-1.parquet"] and len(test) == 1
    write_table(tmp_path / "train-2.parquet", {"other": [1]})
    with pytest.raises(ValueError, match="different columns"):
        read_parquet(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no .parquet files"):
        read_parquet(tmp_path / "test" / "x")


def test_a_test_part_without_labels_gives_way(tmp_path):
    for name, label in (("train", 1), ("validation", 0), ("test", -1)):
        write_table(tmp_path / f"{name}.parquet", {"text": [name], "label": [label]})
    train, test = parts_of(read_parquet(tmp_path), "label")
    assert strings(train, "text") == ["train"] and strings(test, "text") == ["validation"]
    assert strings(parts_of(read_parquet(tmp_path), None)[1], "text") == ["test"]


def test_one_split_alone_is_all_there_is(tmp_path):
    write_table(tmp_path / "test.parquet", {"text": ["a", ""]})
    train, test = parts_of(read_parquet(tmp_path), None)
    assert strings(train, "text") == ["a"] and test is None


def test_classes_by_number_by_word_and_by_their_stored_names(tmp_path):
    columns = {"text": ["x", "y", "z"], "label": [2, 0, 2]}
    (plain,) = read_parquet(write_table(tmp_path / "a.parquet", columns)).values()
    assert class_names(plain, "label") is None and class_numbers(plain, "label", None).tolist() == [2, 0, 2]
    names = ["no", "perhaps", "yes"]
    (named,) = read_parquet(write_table(tmp_path / "b.parquet", columns, {"label": names})).values()
    assert class_names(named, "label") == tuple(names)
    (words,) = read_parquet(write_table(tmp_path / "c.parquet", {"label": ["yes", "no"]})).values()
    assert class_names(words, "label") == ("no", "yes")
    assert class_numbers(words, "label", ("no", "yes")).tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"training part lacks: \['yes'\]"):
        class_numbers(words, "label", ("no",))
    (gaps,) = read_parquet(write_table(tmp_path / "d.parquet", {"label": [1, None]})).values()
    with pytest.raises(ValueError, match="rows without a label"):
        class_numbers(gaps, "label", None)


def test_files_that_are_no_tables_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a.parquet cannot be read as parquet: .*\. Write or download it again"):
        read_parquet(tmp_path / "a.parquet")
    doubled = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(doubled, tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet has several columns named text\."):
        read_parquet(tmp_path / "b.parquet")


def test_pictures_come_from_bytes(tmp_path):
    (table,) = read_parquet(write_table(tmp_path / "a.parquet", image_rows([0, 2, 1]))).values()
    found = pictures(take(table, [0, 1]), "image", torch.tensor([0, 2]))
    assert len(found) == 2 and found.original_size() == (8, 8) and found.labels.tolist() == [0, 2]
    assert pictures(table, "image", None).labels.tolist() == [0, 0, 0]


def test_the_hub_gives_the_same_tables(tmp_path, monkeypatch):
    table = read_parquet(write_table(tmp_path / "a.parquet", {"text": ["x"]}))[""]
    seen = []

    def load_dataset(*args):
        seen.append(args)
        return {"train": SimpleNamespace(data=SimpleNamespace(table=table))}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert read_hub("someone/texts:small")["train"] is table and seen == [("someone/texts", "small")]


def test_without_a_network_the_hub_says_what_to_do(monkeypatch):
    def load_dataset(*args):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"no file or folder here.*no route. Check the spelling.*give their folder"):
        read_hub("someone/texts")


@pytest.mark.slow
@pytest.mark.skipif("GBLR_DATA" not in os.environ, reason="set GBLR_DATA to a folder with cifar10/")
def test_real_images_are_the_same_by_either_way():
    _, test = load_cifar10(os.environ["GBLR_DATA"])
    table = read_parquet(f"{os.environ['GBLR_DATA']}/cifar10")["test"]
    assert find_columns(table, "cifar10") == Columns(image="img", label="label")
    some = pictures(take(table, range(500)), "img", None)
    sized = type(some)(some.encoded, some.labels, size=(32, 32))
    assert torch.equal(sized[list(range(500))][0], test.images[:500])
