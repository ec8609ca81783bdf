import pytest
import torch
from torch import nn

from gblr.models.resnet_cifar import CifarResNet
from gblr.workflows.listing import list_layers
from gblr.workflows.settings import Settings


def test_convolutions_that_stay_dense_are_told_where_they_are_most_of_the_model():
    model, x = nn.Sequential(CifarResNet(depth=8), nn.Linear(10, 10)).eval(), torch.zeros(2, 3, 32, 32)
    note = "7 convolutions, 100% of the multiplications, stay dense: add --convolutions"
    assert note in list_layers(model, Settings("model", "data"), x)
    assert "stay dense" not in list_layers(model, Settings("model", "data", convolutions=True), x)
    assert "--recipe" in list_layers(model, Settings("model", "data", from_scratch=True), x)
    few = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten(), nn.Linear(4, 4000))
    assert "stays dense" not in list_layers(few, Settings("model", "data"), torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("model", "left"),
    [(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), "1 convolution"), (CifarResNet(8), "7 convol")],
)
def test_a_network_of_convolutions_and_a_head_asks_for_the_option(model, left):
    with pytest.raises(ValueError, match=f"{left}.* would stay dense: add --convolutions"):
        list_layers(model, Settings("model", "data"))
    assert "linear stays dense: it is the output head" in list_layers(
        CifarResNet(8), Settings("model", "data", convolutions=True)
    )


def test_patterns_that_match_nothing_are_named():
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "value": nn.Linear(4, 4)})
    text = list_layers(model, Settings("model", "data", exclude=("valeu", "query")))
    assert "`exclude` pattern 'valeu' matches no module (near matches: value" in text and "'query'" not in text
