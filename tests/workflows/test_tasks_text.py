import json
import math
import os
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from gblr.conversion.convert import convert_
from gblr.fitting.config import LowRankConfig
from gblr.models.load import LoadedModel, load_model
from gblr.training.loop import train
from gblr.training.train_config import TrainConfig
from gblr.workflows.similarity_task import spearman
from gblr.workflows.tasks import load_task
from tests.data.tiny_files import write_table
from tests.models.tiny_models import (
    WORDS,
    sentences,
    tokenizer,
    write_encoder,
    write_image_classifier,
    write_language_model,
    write_text_classifier,
)


@pytest.fixture
def language_model(tmp_path):
    return load_model(write_language_model(tmp_path / "gpt2"))


@pytest.fixture
def encoder(tmp_path):
    return load_model(write_encoder(tmp_path / "bert"))


def write_text(file, num=400, seed=0):
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("\n".join(sentences(num, seed)))
    return str(file)


def trained(loaded, task, **options):
    config = TrainConfig(**task.train_defaults | {"epochs": 3, "lr": 1e-2} | options)
    return train(loaded.model, task.train_data, task.eval_data, config, loss=task.loss)


# -- language modelling --------------------------------------------------------------------------------------------


def test_perplexity_is_that_of_the_models_own_loss(language_model, tmp_path):
    task = load_task(write_text(tmp_path / "a.txt"), language_model)
    assert (task.name, task.metric, task.higher_is_better) == ("language modelling", "perplexity", False)
    assert task.what == f"{len(task.train_data)} training and {len(task.eval_data)} test windows of 32 tokens"
    assert len(task.eval_data) == round(0.1 * (len(task.eval_data) + len(task.train_data)))
    tokens = task.eval_data.tokens
    with torch.no_grad():
        loss = language_model.model(input_ids=tokens, labels=tokens).loss
    assert task.evaluate(language_model.model) == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_language_model_learns_from_it(language_model, tmp_path):
    task = load_task(write_text(tmp_path / "a.txt", 100), language_model)
    before = task.evaluate(language_model.model)
    result = trained(language_model, task)
    after = task.evaluate(language_model.model)
    assert after < before and result.history[-1]["perplexity"] == pytest.approx(after, rel=1e-3)


def test_splits_of_a_folder_count_and_limits_are_kept(language_model, tmp_path):
    write_text(tmp_path / "d" / "train.txt", 100, seed=0)
    write_text(tmp_path / "d" / "valid.txt", 100, seed=1)
    task = load_task(str(tmp_path / "d"), language_model, max_train=5, max_eval=3)
    assert task.what == "5 training and 3 test windows of 32 tokens"
    words = [5 + WORDS.index(w) for w in " ".join(sentences(100, seed=1)).split()]
    assert task.eval_data.tokens[0].tolist() == words[:32]


def test_tables_and_jsonl_are_texts_too(language_model, tmp_path):
    table = write_table(tmp_path / "a.parquet", {"text": sentences(60), "label": [0, 1] * 30})
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences(60)))
    first, second = (load_task(source, language_model) for source in (table, str(tmp_path / "a.jsonl")))
    assert torch.equal(first.eval_data.tokens, second.eval_data.tokens)
    shuffled = load_task(table, language_model, seed=1)
    assert not torch.equal(first.eval_data.tokens, shuffled.eval_data.tokens)


def test_calibration_and_example_are_tokens_alone(language_model, tmp_path):
    task = load_task(write_text(tmp_path / "a.txt"), language_model)
    assert [batch["input_ids"].shape for batch in task.calibration(12)] == [(8, 32), (4, 32)]
    assert list(task.example) == ["input_ids"] and task.batch(3)["input_ids"].shape == (3, 32)
    convert_(language_model.model, LowRankConfig(0.5), calibration=task.calibration(4))


class Plain(nn.Module):
    """A language model of one's own: tokens in, scores out, no `.loss`."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, tokens):
        return self.inner(tokens).logits


def test_a_language_model_of_ones_own(tmp_path):
    inner = GPT2LMHeadModel.from_pretrained(write_language_model(tmp_path / "gpt2"))
    own = SimpleNamespace(encode=lambda text: tokenizer(marks=False)(text)["input_ids"])
    loaded = LoadedModel(Plain(inner).eval(), "python:x:y", "Plain", tokenizer=own, max_length=32)
    source = write_text(tmp_path / "a.txt")
    task = load_task(source, loaded)
    assert isinstance(task.example, torch.Tensor) and task.loss is not None
    theirs = load_task(source, load_model(str(tmp_path / "gpt2")))
    assert task.evaluate(loaded.model) == pytest.approx(theirs.evaluate(inner), rel=1e-5)
    assert "train_loss" in trained(loaded, task, epochs=1).history[0]
    loaded.model = nn.Embedding(32, 4)
    with pytest.raises(ValueError, match=r"outputs of shape \(1, .*, 4\).*\(batch, tokens, vocabulary\)"):
        load_task(source, loaded)


def test_too_little_text_is_refused(language_model, tmp_path):
    with pytest.raises(ValueError, match="too short for windows of 32 tokens"):
        load_task(write_text(tmp_path / "a.txt", 5), language_model)


# -- encoders ------------------------------------------------------------------------------------------------------


def test_an_encoder_on_plain_text_should_stay_like_the_dense_one(encoder, tmp_path):
    task = load_task(write_text(tmp_path / "a.txt", 100), encoder, max_train=40)
    assert (task.name, task.what) == ("outputs of the dense model", "40 training and 10 test texts")
    assert task.evaluate(encoder.model) == pytest.approx(1)
    batches = task.calibration(40)
    assert [len(batch["input_ids"]) for batch in batches] == [32, 8] and "attention_mask" in task.example
    convert_(encoder.model, LowRankConfig(0.3), calibration=batches)
    lost = task.evaluate(encoder.model)
    assert lost < 0.9999
    trained(encoder, task, batch_size=8, lr=1e-3)
    assert task.evaluate(encoder.model) > lost


def test_a_tables_texts_serve_an_encoder_whatever_their_labels(encoder, tmp_path):
    table = write_table(tmp_path / "a.parquet", {"text": sentences(30), "label": [0, 1, 2] * 10})
    task = load_task(table, encoder)
    assert task.name == "outputs of the dense model"
    assert task.note.startswith("note: the column 'label' is not used, as BertModel gives no scores of classes")
    assert load_task(write_table(tmp_path / "b.parquet", {"text": sentences(30)}), encoder).note == ""


def test_padding_does_not_change_the_metric(encoder, tmp_path):
    task = load_task(write_text(tmp_path / "a.txt", 300), encoder)
    other = load_task(write_text(tmp_path / "a.txt", 300), encoder)
    nn.init.normal_(encoder.model.embeddings.word_embeddings.weight, std=0.5)
    assert task.evaluate(encoder.model) == other.evaluate(encoder.model) < 0.99


def write_pairs(folder, num=40):
    for split, seed in (("train", 0), ("test", 1)):
        a, b = sentences(num, seed), sentences(num, seed + 10)
        write_table(
            folder / f"{split}.parquet",
            {"sentence1": a, "sentence2": b, "score": [float(abs(len(x) - len(y))) for x, y in zip(a, b, strict=True)]},
        )
    return str(folder)


def test_pairs_of_sentences_are_judged_by_rank_correlation(encoder, tmp_path):
    task = load_task(write_pairs(tmp_path / "sts"), encoder, max_eval=30)
    assert (task.name, task.metric) == ("sentence similarity", "Spearman correlation")
    assert task.what == "80 training sentences and 30 test pairs"
    value = task.evaluate(encoder.model)
    assert -1 <= value <= 1 and value == task.evaluate(encoder.model)
    assert task.loss(encoder.model.train(), task.example) == 0  # dropout is off
    assert trained(encoder, task, batch_size=8, epochs=1).history[0]["train_loss"] < 1


def test_pairs_without_scores_judge_nothing(encoder, tmp_path):
    """As the test part of GLUE has them; nor do rows with gaps."""
    source = write_pairs(tmp_path / "sts")
    pairs = {"sentence1": sentences(5), "sentence2": sentences(5, 1)}
    write_table(tmp_path / "sts" / "test.parquet", pairs | {"score": [-1.0] * 5})
    pairs["sentence1"][3] = None
    write_table(tmp_path / "sts" / "validation.parquet", pairs | {"score": [1.0, None, 2.0, 3.0, float("nan")]})
    task = load_task(source, encoder)
    assert task.what == "80 training sentences and 2 test pairs" and abs(task.evaluate(encoder.model)) == pytest.approx(
        1
    )
    assert task.note == "note: 3 of 5 test pairs lack a sentence or score: left out"


def test_spearman_shares_ranks_among_equals():
    a, b = torch.tensor([1.0, 2.0, 2.0, 4.0]), torch.tensor([10.0, 30.0, 20.0, 40.0])
    assert spearman(a, b) == pytest.approx(0.9486833)  # scipy.stats.spearmanr
    assert spearman(a, -a) == pytest.approx(-1)


def test_a_text_classifier_is_judged_on_its_labels(tmp_path):
    loaded = load_model(write_text_classifier(tmp_path / "bert"))
    texts = [f"{word} {text}" for word, text in zip(["cat", "dog"] * 100, sentences(200), strict=True)]
    source = write_table(tmp_path / "a.parquet", {"text": texts, "label": ["meows", "barks"] * 100})
    task = load_task(source, loaded)
    assert (task.name, task.what) == ("text classification", "180 training and 20 test texts, 2 classes")
    before = task.evaluate(loaded.model)
    assert trained(loaded, task, epochs=6, batch_size=8).history[-1]["accuracy"] == pytest.approx(
        task.evaluate(loaded.model) / 100, abs=1e-4
    )
    assert task.evaluate(loaded.model) > max(before, 70)


LABELS = {"id2label": {0: "MEOWS", 1: "BARKS"}, "label2id": {"MEOWS": 0, "BARKS": 1}}


@pytest.mark.parametrize("form", ["words", "categories", "numbers"])
def test_the_models_own_numbers_of_classes_count(tmp_path, form):
    """By its names; in the data, "barks" comes first."""
    loaded = load_model(write_text_classifier(tmp_path / "bert", **LABELS))
    words = [["meows", "barks"][i % 3 == 0] for i in range(60)]
    names = {"label": ["barks", "meows"]} if form == "numbers" else None
    labels = pa.array(words) if form == "words" else pa.array(words).dictionary_encode()
    labels = [names["label"].index(word) for word in words] if names else labels
    source = write_table(tmp_path / "a.parquet", {"text": sentences(60), "label": labels}, names)
    task = load_task(source, loaded)
    assert task.name == "text classification" and not task.note
    wanted = [0 if word == "meows" else 1 for word in words]
    found = {text: int(label) for text, label in zip(task.train_data.texts, task.train_data.labels, strict=True)}
    assert all(wanted[sentences(60).index(text)] == label for text, label in found.items())


def test_names_that_the_model_does_not_know_are_told(tmp_path):
    loaded = load_model(write_text_classifier(tmp_path / "bert", **LABELS))
    source = write_table(tmp_path / "a.parquet", {"text": sentences(40), "label": ["no", "yes"] * 20})
    assert "numbered no, yes; the model calls its outputs MEOWS, BARKS" in load_task(source, loaded).note


def test_rows_that_are_no_use_are_left_out_and_told(tmp_path):
    loaded = load_model(write_text_classifier(tmp_path / "bert", num_labels=3))
    columns = {"text": [*sentences(38), None, "a cat"], "label": [0, 1] * 19 + [1, -1]}
    task = load_task(write_table(tmp_path / "a.parquet", columns), loaded)
    assert task.note == "note: 2 of 40 rows have no text or a label below 0: left out"
    assert task.what == "34 training and 4 test texts, 2 classes"  # of the model's three
    with pytest.raises(ValueError, match="rows without a label"):
        load_task(write_table(tmp_path / "b.parquet", {"text": sentences(3), "label": [1.0, None, 0.0]}), loaded)
    task = load_task(write_table(tmp_path / "c.parquet", {"text": sentences(40), "stars": [1.5] * 40}), loaded)
    assert task.note.startswith("note: no column of classes was found (stars beside the text)")


def test_parts_with_other_columns(tmp_path):
    """The test part comes first by name."""
    loaded = load_model(write_text_classifier(tmp_path / "bert"))
    write_table(tmp_path / "d" / "train.parquet", {"text": sentences(40), "label": [0, 1] * 20})
    write_table(tmp_path / "d" / "test.parquet", {"text": sentences(9)})
    assert load_task(str(tmp_path / "d"), loaded).what == "36 training and 4 test texts, 2 classes"
    write_table(tmp_path / "d" / "test.parquet", {"review": sentences(9), "label": [0] * 9})
    with pytest.raises(ValueError, match=r"the test part of .* has no column text, .* it has review, label"):
        load_task(str(tmp_path / "d"), loaded)


def test_the_heads_classes_must_fit(tmp_path):
    loaded = load_model(write_text_classifier(tmp_path / "bert", num_labels=3))
    source = write_table(tmp_path / "a.parquet", {"text": sentences(40), "label": ["no", "yes"] * 20})
    with pytest.raises(ValueError, match=r"2 classes, but BertForSequenceClassification gives 3 scores"):
        load_task(source, loaded)


# -- what does not fit ---------------------------------------------------------------------------------------------


def test_text_needs_a_model_that_reads_it_and_a_tokenizer(tmp_path):
    source = write_text(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="is text, but ViTForImageClassification takes images"):
        load_task(source, load_model(write_image_classifier(tmp_path / "vit")))
    with pytest.raises(ValueError, match=r"without a tokenizer.*tokenizer.json beside.*\(model, tokenizer\)"):
        load_task(source, load_model(write_encoder(tmp_path / "bert", with_tokenizer=False)))


def test_pairs_need_an_encoder(language_model, tmp_path):
    with pytest.raises(ValueError, match="need an encoder of text; GPT2LMHeadModel is a causal language model"):
        load_task(write_pairs(tmp_path / "sts"), language_model)


def test_sources_that_are_not_understood(encoder, tmp_path, monkeypatch):
    for absent in (str(tmp_path / "absent"), "absent.txt", "./absent", "absent.csv"):
        with pytest.raises(FileNotFoundError, match=r"there is no .*absent.*. Data is digits, cifar10:DIR"):
            load_task(absent, encoder)
    (tmp_path / "numbers.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"understood \(numbers.csv\)"):
        load_task(str(tmp_path / "numbers.csv"), encoder)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match="it is empty"):
        load_task(str(tmp_path / "d"), encoder)
    table = write_table(tmp_path / "a.parquet", {"x": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"not understood: x \(double\)"):
        load_task(table, encoder)
    table = write_table(tmp_path / "b.parquet", {"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())})
    with pytest.raises(ValueError, match=r"b\.parquet holds no row"):
        load_task(table, encoder)


def test_anything_else_is_looked_for_on_the_hub(encoder, tmp_path, monkeypatch):
    from gblr.data.tables import read_parquet

    table = read_parquet(write_table(tmp_path / "a.parquet", {"text": sentences(30)}))[""]
    monkeypatch.setattr("gblr.workflows.tasks.read_hub", lambda name: {"train": table})
    assert load_task("someone/texts", encoder).what == "27 training and 3 test texts"


@pytest.mark.slow
@pytest.mark.skipif(
    not {"GBLR_DATA", "GBLR_MINILM"} <= set(os.environ),
    reason="set GBLR_DATA to a folder with stsb/, GBLR_MINILM to the directory of all-MiniLM-L6-v2",
)
def test_the_real_sentence_encoder_has_its_real_score():
    loaded = load_model(os.environ["GBLR_MINILM"])
    task = load_task(f"{os.environ['GBLR_DATA']}/stsb", loaded)
    assert task.evaluate(loaded.model) == pytest.approx(0.8203, abs=1e-4)
