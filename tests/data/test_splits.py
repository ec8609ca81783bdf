import pytest

from gblr.data.splits import by_split, draw_held_out, draw_some, split_of, train_and_test


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train/class/1.png", "train"),
        ("dev.jsonl", "validation"),
        ("wiki.test.tokens", "test"),
        ("en-val-00001.parquet", "validation"),
        ("trainer.txt", None),
        ("contest", None),
        ("train/test_drive.txt", "train"),
    ],
)
def test_whole_words_of_a_name_tell_the_split(name, split):
    assert split_of(name) == split


def test_what_tells_no_split_trains_unless_something_is_called_train():
    assert train_and_test(by_split([("a", 1), ("b", 2), ("valid", 3)])) == ([1, 2], [3])
    assert train_and_test(by_split([("other", 1), ("train", 2), ("valid", 3), ("test", 4)])) == ([2], [4])
    assert train_and_test(by_split([("test", 4)])) == (None, [4])


@pytest.mark.parametrize("num", [2, 3, 10, 101])
def test_a_tenth_is_held_out(num):
    train, test = draw_held_out(num, seed=0)
    assert sorted(train + test) == list(range(num)) and len(test) == max(1, round(num / 10))
    assert draw_held_out(num, seed=0) == (train, test)


def test_one_sample_cannot_be_divided():
    with pytest.raises(ValueError, match="1 sample cannot be divided"):
        draw_held_out(1, seed=0)


def test_some_are_drawn_by_seed_and_stay_in_order():
    assert draw_some(5, None, 0) == draw_some(5, 9, 0) == [0, 1, 2, 3, 4]
    few = draw_some(1000, 10, seed=1)
    assert few == sorted(few) == draw_some(1000, 10, seed=1) != draw_some(1000, 10, seed=2)
