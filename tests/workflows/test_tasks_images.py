import pytest
import torch
from torch import nn

from gblr.models.load import LoadedModel, load_model
from gblr.training.loop import train
from gblr.training.train_config import TrainConfig
from gblr.workflows import image_task
from gblr.workflows.tasks import load_task
from tests.data.tiny_files import image_rows, png, write_images, write_table
from tests.models.tiny_models import write_encoder, write_image_classifier, write_image_encoder


class Reddest(nn.Module):
    """Right about every picture of `write_images`: the red of class k is 50 k or a little more."""

    image_mean, image_std = (0.0,), (1 / 255,)

    def __init__(self, num_classes=3):
        super().__init__()
        self.centres = nn.Parameter(50.0 * torch.arange(num_classes))

    def forward(self, x):
        return -(x[:, 0].mean((1, 2))[:, None] - self.centres).abs()


def own(model, **known):
    return LoadedModel(model.eval(), "python:x:y", type(model).__name__, **known)


def reddest(num_classes=3):
    return own(Reddest(num_classes), image_mean=Reddest.image_mean, image_std=Reddest.image_std)


@pytest.fixture
def classifier(tmp_path):
    return load_model(write_image_classifier(tmp_path / "vit"))


def test_digits_are_the_demo():
    torch.manual_seed(0)
    loaded = load_model("vit:digits")
    task = load_task("digits", loaded)
    assert task.what == "1437 training and 360 test images of 8 x 8, 10 classes"
    assert (task.name, task.metric, task.unit, task.higher_is_better) == (
        "image classification", "accuracy", "%", True
    )  # fmt: skip
    assert 0 <= task.evaluate(loaded.model) < 40
    assert task.example.shape == (2, 1, 8, 8) and task.batch(5).shape == (5, 1, 8, 8)
    assert TrainConfig(**task.train_defaults).epochs == 60


def test_calibration_is_drawn_by_the_seed_from_the_training_part():
    loaded = load_model("vit:digits")
    task, same, other = (load_task("digits", loaded, seed=seed, max_train=100) for seed in (0, 0, 1))
    batches = task.calibration(80)
    assert [len(batch) for batch in batches] == [64, 16]
    assert all(torch.equal(a, b) for a, b in zip(batches, same.calibration(80), strict=True))
    assert not torch.equal(batches[0], other.calibration(80)[0])
    training = task.samples.inputs(range(100))
    assert all((training == x).flatten(1).all(1).any() for x in torch.cat(batches))
    assert sum(len(batch) for batch in task.calibration(1000)) == 100
    with pytest.raises(ValueError, match="1 or more; got 0"):
        task.calibration(0)


def test_evaluating_leaves_the_model_as_it_was():
    loaded = load_model("vit:digits")
    loaded.model.train()
    load_task("digits", loaded, max_eval=20).evaluate(loaded.model)
    assert loaded.model.training and all(p.grad is None for p in loaded.model.parameters())


@pytest.mark.parametrize("split", [True, False])
def test_a_folder_of_images_is_judged_on_its_test_part(split, tmp_path):
    write_images(tmp_path / ("train" if split else ""), 20)
    if split:
        write_images(tmp_path / "test", 3)
    task = load_task(str(tmp_path), reddest())
    counts = "60 training and 9 test" if split else "54 training and 6 test"
    assert task.what == f"{counts} images of 8 x 8, 3 classes" and task.evaluate(reddest().model) == 100
    wrong = Reddest()
    wrong.centres.data = wrong.centres.data.flip(0)
    assert task.evaluate(wrong) < 70


def test_images_are_fitted_to_the_model_and_normalised_as_it_wants(classifier, tmp_path):
    write_images(tmp_path / "data", 4, size=(20, 30))
    classifier.image_mean, classifier.image_std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    task = load_task(str(tmp_path / "data"), classifier)
    x = task.batch(11)
    assert x.shape == (11, 3, 8, 8)
    assert {round(float(v)) for v in (x[:, 0] + 1).flatten() * 127.5} <= {*range(4), *range(50, 54), *range(100, 104)}
    assert 0 <= task.evaluate(classifier.model) <= 100


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_what_images_are_normalised_by_does_not_depend_on_how_many_are_used(kind, tmp_path):
    net = own(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    if kind == "folder":
        write_images(tmp_path / "data", 10)
    else:
        write_table(tmp_path / "data" / "train.parquet", image_rows([0, 1, 2] * 8))
    whole, few = (load_task(str(tmp_path / "data"), net, max_train=most) for most in (None, 4))
    assert whole.image_mean == few.image_mean and whole.image_std == few.image_std and len(few.samples) == 4
    x = whole.samples.inputs(range(len(whole.samples)))
    assert x.mean((0, 2, 3)).abs().max() < 1e-4 and f"mean {whole.image_mean[0]:.3g}" in whole.note


def test_parquet_and_folder_agree(tmp_path):
    write_table(tmp_path / "t" / "train.parquet", image_rows([0, 1, 2] * 5))
    write_table(tmp_path / "t" / "test.parquet", image_rows([0, 1, 2, 2]))
    task = load_task(str(tmp_path / "t"), reddest())
    assert task.what == "15 training and 4 test images of 8 x 8, 3 classes" and task.evaluate(reddest().model) == 100
    few = load_task(str(tmp_path / "t"), reddest(), max_train=6, max_eval=2)
    assert len(few.train_data) == 6 and few.what.startswith("6 training and 2 test")
    assert load_task(str(tmp_path / "t" / "train.parquet"), reddest()).what.startswith("13 training and 2 test")


def test_many_images_stay_encoded_until_they_are_read(tmp_path, monkeypatch):
    write_images(tmp_path, 10)
    whole = load_task(str(tmp_path), reddest())
    monkeypatch.setattr(image_task, "_IN_MEMORY", 1000)
    lazy = load_task(str(tmp_path), reddest())
    assert lazy.what == whole.what and torch.equal(lazy.batch(27), whole.batch(27))
    assert lazy.evaluate(reddest().model) == 100


def test_images_without_labels_ask_for_the_outputs_of_the_dense_model(classifier, tmp_path):
    write_images(tmp_path / "data", 20, classes=())
    task = load_task(str(tmp_path / "data"), classifier)
    assert (task.name, task.metric) == ("outputs of the dense model", "similarity to dense")
    assert task.evaluate(classifier.model) == pytest.approx(1)
    nn.init.normal_(classifier.model.classifier.weight)
    assert task.evaluate(classifier.model) < 0.999


def test_so_does_a_model_without_a_head(tmp_path):
    write_images(tmp_path / "data", 8)
    task = load_task(str(tmp_path / "data"), load_model(write_image_encoder(tmp_path / "vit")))
    assert task.name == "outputs of the dense model" and task.what == "22 training and 2 test images of 8 x 8"


@pytest.mark.parametrize("labelled", [True, False])
def test_gblr_trains_on_it(labelled, classifier, tmp_path):
    write_images(tmp_path / "data", 8, classes=("bird", "cat", "dog") if labelled else ())
    task = load_task(str(tmp_path / "data"), classifier)
    nn.init.normal_(classifier.model.classifier.weight)
    options = task.train_defaults | {"epochs": 8, "batch_size": 4, "lr": 1e-2}
    result = train(classifier.model, task.train_data, task.eval_data, TrainConfig(**options), loss=task.loss)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert ("accuracy" in result.history[0]) == labelled


def test_the_number_of_classes_must_fit(classifier, tmp_path):
    with pytest.raises(ValueError, match=r"digits has 10 classes, but ViTForImageClassification .* \(batch, 3\)"):
        load_task("digits", classifier)
    write_images(tmp_path / "data", 4, classes=("a", "b"))
    with pytest.raises(ValueError, match=r"2 classes.*whose head has 2 outputs"):
        load_task(str(tmp_path / "data"), classifier)


def test_numbers_of_classes_that_were_only_counted_may_be_fewer(tmp_path):
    counted = write_table(tmp_path / "a.parquet", image_rows([0, 1] * 5))
    assert load_task(counted, reddest()).what.endswith("2 classes")
    named = write_table(tmp_path / "b.parquet", image_rows([0, 1] * 5), {"label": ["no", "yes"]})
    with pytest.raises(ValueError, match="has 2 classes"):
        load_task(named, reddest())


def test_the_models_names_of_classes_decide_their_order(tmp_path):
    write_images(tmp_path, 4)
    loaded = own(Reddest(), image_mean=(0.0,), image_std=(1 / 255,), label_names=("dog", "cat", "bird"))
    loaded.model.centres.data = loaded.model.centres.data.flip(0)
    assert load_task(str(tmp_path), loaded).evaluate(loaded.model) == 100


def test_a_model_that_cannot_take_the_images_says_so(tmp_path):
    write_images(tmp_path, 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    with pytest.raises(ValueError, match=r"cannot take the images .* \(batch, 3, 8, 8\): .* `image_size`"):
        load_task(str(tmp_path), own(net))
    assert load_task(str(tmp_path), own(net, image_size=16)).example.shape == (2, 3, 16, 16)


def test_an_error_inside_of_the_model_is_told_as_such(tmp_path):
    class Broken(Reddest):
        def forward(self, x):
            return self.norm(x)

    write_images(tmp_path, 4)
    with pytest.raises(ValueError, match=r"Broken cannot take the images .* no attribute 'norm'"):
        load_task(str(tmp_path), own(Broken()))


@pytest.mark.parametrize("more", [lambda y: (y, None), lambda y: {"scores": y}, lambda y: {"x": -y, "logits": y}])
def test_models_may_return_more_than_their_scores(tmp_path, more):
    class Talkative(Reddest):
        def forward(self, x):
            return more(super().forward(x))

    write_images(tmp_path, 8)
    loaded = own(Talkative(), image_mean=Reddest.image_mean, image_std=Reddest.image_std)
    task = load_task(str(tmp_path), loaded)
    assert task.evaluate(loaded.model) == 100
    result = train(loaded.model, task.train_data, task.eval_data, TrainConfig(epochs=1, batch_size=4, lr=1e-6))
    assert result.history[-1]["accuracy"] == 1


def test_images_of_many_sizes_get_the_commonest_whatever_their_order(tmp_path):
    write_images(tmp_path / "train", 4, size=(10, 12))
    write_images(tmp_path / "test", 2, size=(6, 6))
    for name in ("bird", "cat"):
        (tmp_path / "train" / name / "0.png").write_bytes(png(50, (20, 20)))
    tasks = [load_task(str(tmp_path), reddest(), max_train=most, seed=seed) for most, seed in ((None, 0), (2, 1))]
    for task in tasks:
        assert task.example.shape[-2:] == (10, 12) and task.eval_data.inputs([0]).shape[-2:] == (10, 12)
        assert "2 sizes; all are fitted to the commonest, 10 x 12 (10 of 12)" in task.note


def test_models_of_text_take_no_images(tmp_path):
    with pytest.raises(ValueError, match="digits has images, but BertModel takes text"):
        load_task("digits", load_model(write_encoder(tmp_path)))


def test_half_precision_models_get_half_precision_images(tmp_path):
    loaded = load_model("vit:digits", dtype=torch.bfloat16)
    task = load_task("digits", loaded, max_train=10, max_eval=10)
    assert task.example.dtype == torch.bfloat16 and task.evaluate(loaded.model) >= 0


def test_cifar10_is_augmented_only_from_scratch(monkeypatch):
    from gblr.data.images import ImageSet

    data = ImageSet(torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.arange(20) % 10)
    monkeypatch.setattr("gblr.data.cifar.load_cifar10", lambda folder: (data, data))
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    for trained in (True, False):
        task = load_task("cifar10:somewhere", own(net, pretrained=trained))
        assert task.train_data.flip != trained and task.eval_data.pad == 0
        assert task.train_defaults["label_smoothing"] == 0.1
        assert (task.train_defaults["lr"] < 1e-3) == (task.distill > 0) == trained


def test_networks_of_convolutions_train_in_their_layout_and_with_batch_norms_rates():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 10))
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 10))
    normalized = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    found = [image_task._train_defaults(own(net, pretrained=True), 100) for net in (plain, conv, normalized)]
    assert [options["channels_last"] for options in found] == [False, True, True]
    assert found[0]["lr"] == found[1]["lr"] < found[2]["lr"]
    assert all(TrainConfig(**options) for options in found)
