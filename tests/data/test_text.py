import gzip
import json
import lzma

import pytest

from gblr.data.text import is_text, read_texts


def test_a_plain_file_is_one_text_or_one_a_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one two\n\n three \n")
    assert read_texts(file) == {"": ["one two\n\n three \n"]}
    assert read_texts(file, by_line=True) == {"": ["one two", "three"]}


def test_jsonl_has_a_text_a_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in ("one\ntwo", "three")) + "\n\n")
    assert read_texts(file) == read_texts(file, by_line=True) == {"": ["one\ntwo", "three"]}


def test_compressed_files_and_splits_of_a_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.txt").write_text("for training")
    (tmp_path / "wiki.valid.txt.xz").write_bytes(lzma.compress(b"to judge"))
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(b'{"text": "neither"}'))
    (tmp_path / "picture.png").write_text("")
    assert read_texts(tmp_path) == {"": ["neither"], "train": ["for training"], "validation": ["to judge"]}


def test_a_single_file_tells_no_split(tmp_path):
    (tmp_path / "test.txt").write_text("all there is")
    assert read_texts(tmp_path / "test.txt") == {"": ["all there is"]}


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"body": "x", "id": 2}', r'line 2 .* "text"; it has body, id'), ("[1]", "it has list"), ("{text", "is no JSON")],
)
def test_a_line_that_is_not_understood_is_named(line, words, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=words):
        read_texts(file)


def test_nothing_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected .txt or .jsonl"):
        read_texts(tmp_path)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        read_texts(tmp_path)


@pytest.mark.parametrize(("name", "yes"), [("a.TXT", True), ("a.raw.txt.xz", True), ("a.xz", False), ("a.csv", False)])
def test_which_files_are_text(name, yes, tmp_path):
    assert is_text(tmp_path / name) == yes


def test_bytes_that_are_no_utf8_are_told(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Größe\nCafé\n".encode("latin-1"))
    with pytest.warns(UserWarning, match=r"latin.txt is not all UTF-8: 3 bytes were replaced"):
        assert read_texts(tmp_path / "latin.txt", by_line=True) == {"": ["Gr\ufffd\ufffde", "Caf\ufffd"]}
    (tmp_path / "plain.txt").write_text("such a character: \ufffd", encoding="utf-8")
    assert read_texts(tmp_path / "plain.txt") == {"": ["such a character: \ufffd"]}


def test_the_mark_of_windows_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "a dog"}\n', encoding="utf-8-sig")
    assert read_texts(tmp_path) == {"": ["a cat\n", "a dog"]}


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"a cat", lambda data: data[:30]])
def test_damaged_archives_are_named(suffix, damage, tmp_path):
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(damage({".gz": gzip, ".xz": lzma}[suffix].compress(bytes(range(65, 91)) * 9)))
    with pytest.raises(OSError, match=rf"a.txt{suffix} is damaged, or not compressed as its name says"):
        read_texts(file)
