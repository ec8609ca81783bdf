import copy

import torch
from torch import nn

from gblr.conversion.convert import convert_
from gblr.conversion.filters import conv_layers
from gblr.experiments.step import GraphAdamW, Step, Teacher, made_fast_
from gblr.fitting.config import GaudiConfig
from gblr.models.resnet_cifar import CifarResNet
from gblr.training.param_groups import param_groups


def images(generator, num=4):
    return torch.randn(num, 3, 32, 32, generator=generator)


def step_of(model, teacher):
    optimizer = GraphAdamW(param_groups(model, 1e-3, 1e-3, 0.0), torch.device("cpu"))
    return Step(model, optimizer, on_gpu=False, smoothing=0.0, teacher=teacher)


def test_a_network_that_agrees_with_its_teacher_loses_by_the_labels_alone(generator):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    teacher = Teacher(copy.deepcopy(model), share=0.75)
    x, target = images(generator), nn.functional.one_hot(torch.arange(4), 5).float()
    by_labels = nn.functional.cross_entropy(model(x), target)
    torch.testing.assert_close(teacher.mixed_in(by_labels, model(x), x), 0.25 * by_labels)


def test_distillation_leads_to_the_teacher_and_leaves_it_alone(generator):
    torch.manual_seed(0)
    model, dense = (nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)) for _ in range(2))
    before = copy.deepcopy(dense.state_dict())
    x, target = images(generator), torch.full((4, 5), 0.2)

    @torch.no_grad()
    def distance():
        return float((model(x).softmax(-1) - dense(x).softmax(-1)).norm())

    first, step = distance(), step_of(model, Teacher(dense, share=1.0))
    for _ in range(60):
        loss = step(x, target)
    assert distance() < 0.2 * first and loss < 0.1
    assert all(torch.equal(before[name], value) for name, value in dense.state_dict().items())
    assert all(parameter.grad is None for parameter in dense.parameters())


def test_convolutions_give_the_same_in_the_layout_for_matrix_units(generator):
    torch.manual_seed(0)
    model = CifarResNet(depth=8, widths=(4, 8, 8)).eval()
    convert_(model, GaudiConfig(0.5, init="scratch"), where=conv_layers(include=("layer1", "layer3")))
    x = images(generator)
    before = model(x)
    made_fast_(model, compiled=False)
    assert model.layer2[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
