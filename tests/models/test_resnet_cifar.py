import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gblr.data.cifar import _from_files
from gblr.data.images import ImageBatches, ImageSet
from gblr.models.resnet_cifar import MEAN, STD, CifarResNet


def test_resnet_20_has_its_published_size():
    assert sum(p.numel() for p in CifarResNet(20).parameters()) == 269_722


def test_depth_must_fit():
    with pytest.raises(ValueError, match="6 n"):
        CifarResNet(18)


def test_the_shortcut_keeps_every_second_pixel_in_the_middle_channels():
    block = CifarResNet(8, (4, 8, 16)).layer2[0]
    x = torch.randn(1, 4, 6, 6)
    shortcut = block._shortcut(x)
    assert torch.equal(shortcut[:, 2:6], x[:, :, ::2, ::2]) and not shortcut[:, :2].any() and not shortcut[:, 6:].any()


def test_stored_weights_must_fit(tmp_path):
    model = CifarResNet(20)
    save_file({k: v for k, v in model.state_dict().items() if "tracked" not in k}, tmp_path / "a.safetensors")
    same = CifarResNet.from_file(tmp_path / "a.safetensors", 20)
    assert torch.equal(same.conv1.weight, model.conv1.weight)
    with pytest.raises(ValueError, match="does not fit ResNet-32"):
        CifarResNet.from_file(tmp_path / "a.safetensors", 32)


@pytest.mark.skipif("GBLR_DATA" not in os.environ, reason="GBLR_DATA does not name the folder of the data")
def test_published_weights_reach_their_accuracy():
    folder = Path(os.environ["GBLR_DATA"])
    file = folder / "resnet_cifar10" / "resnet20.safetensors"
    if not file.exists():
        pytest.skip(f"no {file.name} there")
    model, test = CifarResNet.from_file(file, 20), _from_files(folder / "cifar10", "test")  # training images take long
    some = ImageSet(*test[:1000])
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in ImageBatches(some, 500, False, MEAN, STD))
    assert 900 <= right <= 935  # 91.73 % of all 10,000
