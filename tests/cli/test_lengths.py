"""How long the texts are that a model is timed on."""

import json

from tests.models.tiny_models import sentences, write_encoder


def test_times_of_texts_tell_how_long_the_texts_are(gblr, tmp_path):
    write_encoder(tmp_path / "dense")
    (tmp_path / "texts.txt").write_text("\n".join(sentences(80)))
    options = ("--data", "texts.txt", "--method", "low-rank", "--calibration", 8, "--cost", 0.5, "--threads", 1)
    ended = gblr("compress", "dense", *options, "--out", "run")
    assert ended.code == 0, ended.err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert set(record["timed_lengths"]) == {"1", "64"} and 0 < record["timed_lengths"]["1"]
    assert f"64 x {record['timed_lengths']['64']} tokens" in " ".join(ended.out.replace("\u2502", " ").split())
    ended = gblr("bench", "run", "--batch", 1, "--json")
    assert json.loads(ended.out)["rows"][0]["tokens"] == record["timed_lengths"]["1"]
    assert "tokens of a text" in gblr("bench", "run", "--batch", 1).out


def test_images_have_no_length(gblr, small):
    assert json.loads((small.folder / "run.json").read_text())["timed_lengths"] == {}
    assert "tokens" not in small.out + gblr("bench", small.folder, "--batch", 1).out
