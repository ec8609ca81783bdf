"""Losses between labels and a teacher."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import gblr
from gblr.training.distillation import TaughtLoss, distillation_loss
from gblr.training.divergence import divergence
from tests.helpers import raises_value_error

SMOOTHING = 0.1


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(6, 4)


def labelled(generator):
    return torch.randn(5, 6, generator=generator), torch.tensor([0, 1, 2, 3, 1])


def language_model(seed=0):
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


def test_the_share_leads_from_the_labels_to_the_teacher(generator):
    model, teacher, (x, labels) = classifier(0), classifier(1), labelled(generator)
    by_labels = nn.functional.cross_entropy(model(x), labels, label_smoothing=SMOOTHING)
    by_teacher = divergence(model(x), teacher(x), temperature=4.0)
    for share in (0.0, 0.3, 1.0):
        loss = TaughtLoss(teacher, share, label_smoothing=SMOOTHING)(model, (x, labels))
        torch.testing.assert_close(loss, (1 - share) * by_labels + share * by_teacher)
    assert by_teacher > 0 and divergence(teacher(x), teacher(x)) < 1e-6


@pytest.mark.parametrize("size", [(7,), (4, 3)])
def test_scores_of_positions_have_their_classes_along_axis_1(size, generator):
    """As cross entropy takes them: (batch, classes, positions) or (batch, classes, height, width)."""
    conv = nn.Conv1d if len(size) == 1 else nn.Conv2d
    torch.manual_seed(0)
    model, teacher = conv(3, 5, 1), conv(3, 5, 1)
    x, labels = torch.randn(2, 3, *size, generator=generator), torch.randint(5, (2, *size), generator=generator)
    loss = TaughtLoss(teacher, 0.3, temperature=2.0)(model, (x, labels))
    found, aimed = ((net(x) / 2.0).log_softmax(1) for net in (model, teacher))
    each = (aimed.exp() * (aimed - found)).sum(1)
    expected = 0.7 * nn.functional.cross_entropy(model(x), labels) + 0.3 * 4.0 * each.mean()
    torch.testing.assert_close(loss, expected)


class Segmenter(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 1)

    def forward(self, pixel_values, labels=None):
        logits = self.conv(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


def test_pixels_of_images_have_their_classes_along_axis_1_in_mappings_too(generator):
    """As the segmentation models of transformers give them."""
    model, teacher = Segmenter(0), Segmenter(1)
    x, labels = torch.randn(2, 3, 4, 6, generator=generator), torch.randint(5, (2, 4, 6), generator=generator)
    by_pairs = TaughtLoss(teacher.conv, 0.3)(model.conv, (x, labels))
    torch.testing.assert_close(TaughtLoss(teacher, 0.3)(model, {"pixel_values": x, "labels": labels}), by_pairs)
    alone = TaughtLoss(teacher.conv, 1.0, temperature=2.0)(model.conv, (x, labels))
    for batch in (x, (x,), {"pixel_values": x}):
        torch.testing.assert_close(distillation_loss(teacher, temperature=2.0)(model, batch), alone)


def test_a_batch_without_a_label_is_taught_by_the_teacher_alone(generator):
    model, teacher, (x, labels) = classifier(0), classifier(1), labelled(generator)
    none = torch.full_like(labels, -100)
    expected = 0.3 * TaughtLoss(teacher, 1.0)(model, (x, none))
    torch.testing.assert_close(TaughtLoss(teacher, 0.3)(model, (x, none)), expected)


def test_the_teacher_alone_needs_no_labels(generator):
    model, teacher, (x, labels) = classifier(0), classifier(1), labelled(generator)
    expected = TaughtLoss(teacher, 1.0)(model, (x, labels))
    assert torch.equal(TaughtLoss(teacher, 1.0)(model, (x, torch.full_like(labels, -100))), expected)
    texts = {"input_ids": torch.randint(0, 20, (2, 8), generator=generator)}
    assert TaughtLoss(language_model(1), 1.0)(language_model(0), texts).isfinite()


def test_gradients_of_softened_scores_keep_their_size(generator):
    """For small scores the divergence is quadratic, and temperature^2 takes out what the softening does."""
    found, aimed = (1e-2 * torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(divergence(found, aimed, 4.0), divergence(found, aimed, 1.0), rtol=0.05, atol=0.0)


def test_a_language_model_is_taught_where_there_is_text(generator):
    model, teacher = language_model(0), language_model(1)
    ids = torch.randint(0, 20, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    loss = TaughtLoss(teacher, 0.5, temperature=1.0)
    found = loss(model, batch)
    by_teacher = divergence(model(**batch).logits[mask.bool()], teacher(**batch).logits[mask.bool()])
    torch.testing.assert_close(found, 0.5 * model(**batch).loss + 0.5 * by_teacher)
    found.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_compressed_model_is_trained_by_both(generator):
    dense = classifier(0)
    model = nn.Sequential(classifier(1))  # far from its teacher
    gblr.convert_(model, gblr.LowRankConfig(0.9), where=gblr.linear_layers(include=("0",)))
    x = torch.randn(64, 6, generator=generator)
    data = TensorDataset(x, dense(x).argmax(1))
    teacher = nn.Sequential(dense)

    def distance():
        with torch.no_grad():
            return float(divergence(model(x), teacher(x), 4.0))

    before = distance()
    config = gblr.TrainConfig(epochs=20, batch_size=16, lr=3e-2)
    gblr.train(model, data, config=config, loss=gblr.TaughtLoss(teacher))
    assert distance() < 0.5 * before


@pytest.mark.parametrize(
    ("options", "words"),
    [({"share": 1.5}, "`share` must lie in"), ({"share": -0.1}, "got -0.1"), ({"temperature": 0.0}, "`temperature`")],
)
def test_bad_options_are_told(options, words):
    with raises_value_error(words):
        TaughtLoss(classifier(), **options)
