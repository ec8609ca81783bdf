import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from gblr.data.cifar import MEAN
from gblr.experiments import datasets
from gblr.experiments.datasets import generated, load_task
from gblr.experiments.run import DENSE
from gblr.experiments.train_run import tiny_run, train_run
from gblr.models.resnet_cifar import MEAN as RESNET_MEAN


def picture(level):
    buffer = io.BytesIO()
    Image.fromarray(np.full((40, 40, 3), level, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(params=["folder", "parquet"])
def imagenet(request, tmp_path):
    """Two classes, dark and bright; 16 training and 4 validation images."""
    rows = {"train": [i % 2 for i in range(16)], "val": [0, 1, 0, 1]}
    for split, labels in rows.items():
        images = [picture(200 if label else 50) for label in labels]
        if request.param == "parquet":
            arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            content = {"image": [{"bytes": image, "path": ""} for image in images], "label": labels}
            parquet.write_table(arrow.table(content), tmp_path / f"{split}-0.parquet")
            continue
        for i, (label, image) in enumerate(zip(labels, images, strict=True)):
            (tmp_path / split / f"class{label}").mkdir(parents=True, exist_ok=True)
            (tmp_path / split / f"class{label}" / f"{i}.png").write_bytes(image)
    return load_task("imagenet", tmp_path)


def test_streamed_images_train_like_those_in_memory(imagenet):
    assert imagenet.num_classes == 2 and imagenet.size == 224
    small = replace(imagenet, size=32, tiny=True)
    record = train_run(replace(tiny_run(DENSE.run("vit-base", 1.0)), drop_path=0.1, mixup=0.8), small).record
    assert record["curve"]["epoch"] == [1, 2] and np.isfinite(record["test"]["loss"])
    with pytest.raises(ValueError, match="held out"):
        small.holding_out(2)


def test_images_without_validation_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(picture(9))
    with pytest.raises(ValueError, match="validation"):
        load_task("imagenet", tmp_path)


def test_cifar_is_decoded_once(tmp_path, monkeypatch):
    task, calls = generated(), []
    monkeypatch.setattr(datasets, "load_cifar10", lambda folder: calls.append(folder) or (task.train, task.test))
    first, again = (load_task("cifar10", tmp_path, tmp_path / "cache") for _ in range(2))
    assert len(calls) == 1 and torch.equal(first.train.images, again.train.images)
    assert first.mean == MEAN and load_task("cifar10-resnet", tmp_path, tmp_path / "cache").mean == RESNET_MEAN


def test_calibration_has_as_many_images_as_asked_for():
    assert sum(len(x) for x in generated().calibration(40)) == 40


def test_generated_images_can_be_told_apart():
    task = generated()
    means = torch.stack([task.train.images[task.train.labels == c].float().mean(0) for c in range(10)])
    nearest = torch.cdist(task.test.images.float().flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == task.test.labels).float().mean() > 0.9
