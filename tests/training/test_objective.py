"""What evaluation reports: means over the samples and labels that count, whatever the precision of the model."""

import types

import pytest
import torch
from torch import nn

from gblr.training.objective import Objective, default_sums, mean_metrics
from gblr.training.train_config import TrainConfig

NO_LABEL = -100


def evaluated(model, batches, custom=None):
    parts = [(batch, len(next(iter(batch.values() if isinstance(batch, dict) else batch)))) for batch in batches]
    return mean_metrics(model, parts, default_sums(custom))


def classifier(num_classes=10, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(16, num_classes).to(dtype)


class OwnLoss(nn.Module):
    """Computes its loss in its precision, as classifiers of transformers do."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x, labels):
        logits = self.head(x)
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["pairs", "mappings", "loss of one's own"])
def test_a_model_in_half_precision_is_given_its_true_loss(dtype, kind, generator):
    """The sum is some 20000 * 5: float16 ends at 65504, and bfloat16 has no odd number above 256."""
    model = classifier(dtype=dtype)
    x = (4 * torch.randn(20000, 16, generator=generator)).to(dtype)
    labels = torch.randint(10, (20000,), generator=generator)
    pairs = list(zip(x.split(64), labels.split(64), strict=True))
    with torch.no_grad():
        logits = model(x).float()
    loss = nn.functional.cross_entropy(logits, labels).item()
    if kind == "pairs":
        found, precision = evaluated(model, pairs), 1e-6
        assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    elif kind == "mappings":
        batches = [{"x": inputs, "labels": target} for inputs, target in pairs]
        found, precision = evaluated(OwnLoss(model), batches), 5e-3  # the mean of a batch is in half precision
    else:
        custom = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        found, precision = evaluated(model, pairs, custom), 5e-3
    assert loss > 3.5 and found["loss"] == pytest.approx(loss, rel=precision)


def test_a_model_in_double_precision_is_evaluated_in_it(generator):
    model = classifier(dtype=torch.float64)
    x, labels = torch.randn(50, 16, generator=generator).double(), torch.randint(10, (50,), generator=generator)
    expected = nn.functional.cross_entropy(model(x), labels).item()
    assert evaluated(model, [(x, labels)])["loss"] == pytest.approx(expected, rel=1e-14)


# -- which labels count -----------------------------------------------------------------------------------------------


def test_samples_without_a_label_do_not_count(generator):
    model, x = classifier(), torch.randn(64, 16, generator=generator)
    with torch.no_grad():
        labels = model(x).argmax(1)
    labels[:48] = NO_LABEL
    found = evaluated(model, [(x[:32], labels[:32]), (x[32:], labels[32:])])
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), labels).item(), rel=1e-6)
    assert found["accuracy"] == 1.0


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["pairs", "mappings"])
def test_a_training_batch_without_a_label_has_a_loss_and_gradients_of_0(kind, label_smoothing, generator):
    """The mean over no label is NaN, and a run with such a loss would end."""
    head, x, none = classifier(), torch.randn(8, 16, generator=generator), torch.full((8,), NO_LABEL)
    own = kind == "mappings"
    objective = Objective(TrainConfig(label_smoothing=0.0 if own else label_smoothing))
    loss = objective(OwnLoss(head) if own else head, {"x": x, "labels": none} if own else (x, none), 0)
    loss.backward()
    assert loss == 0 and not head.weight.grad.any()
    assert objective(head, (x.fill_(torch.nan), none.fill_(1)), 0).isnan()  # a loss that went wrong is told


def test_a_text_with_but_the_first_label_trains_nothing(generator):
    pytest.importorskip("transformers")
    model, _ = language_model("causal")
    ids = torch.randint(50, (2, 6), generator=generator)
    labels = torch.full_like(ids, NO_LABEL)
    labels[:, 0] = 3
    assert Objective(TrainConfig())(model, {"input_ids": ids, "labels": labels}, 0) == 0


@pytest.mark.parametrize("num_classes", [10, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_labels_may_be_probabilities(num_classes, dtype, generator):
    """Batches of 16: as many samples as classes are no reason to compare the two."""
    model, x = classifier(num_classes, dtype), torch.randn(32, 16, generator=generator).to(dtype)
    labels = torch.randn(32, num_classes, generator=generator).softmax(1)
    with torch.no_grad():
        logits = model(x).float()
    labels[:8] = nn.functional.one_hot(logits.argmax(1), num_classes)[:8].float()  # some that are met
    found = evaluated(model, zip(x.split(16), labels.split(16), strict=True))
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-6)
    accuracy = (logits.argmax(1) == labels.argmax(1)).float().mean().item()
    assert found["accuracy"] == pytest.approx(accuracy) and accuracy >= 0.25


def test_classes_of_positions_lie_along_axis_1(generator):
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 5, 1), torch.randn(4, 3, 5, 5, generator=generator)  # as high as there are classes
    labels = torch.randint(5, (4, 5, 5), generator=generator)
    labels[0, 0] = NO_LABEL
    found = evaluated(model, [(x[:1], labels[:1]), (x[1:], labels[1:])])
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), labels).item(), rel=1e-6)
    hits = (model(x).argmax(1) == labels)[labels != NO_LABEL]
    assert found["accuracy"] == pytest.approx(hits.float().mean().item())


# -- language models --------------------------------------------------------------------------------------------------


def language_model(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "causal":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        sizes = {"vocab_size": 50, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)), 1
    if kind == "masked":
        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=32)), 0
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), 0


@pytest.mark.parametrize("kind", ["causal", "masked", "encoder and decoder"])
@pytest.mark.parametrize("first", ["labelled", "not labelled"])
def test_a_language_model_is_evaluated_over_the_labels_that_it_predicts(kind, first, generator):
    """Batches of very different lengths: causal models do not predict the first label of a sequence."""
    model, shift = language_model(kind)
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.mul_(30)  # else all labels cost alike
    batches = []
    for length in (3, 2, 40):
        ids = torch.randint(50, (4, length), generator=generator)
        labels = ids.clone()
        if first == "not labelled" and length == 3:  # what the first batch has must not decide
            labels[:, 0] = NO_LABEL
        batches.append({"input_ids": ids, "labels": labels})
    found = evaluated(model, batches)
    total = count = 0
    for batch in batches:
        with torch.no_grad():
            logits = model.eval()(**batch).logits
        logits, labels = logits[:, : logits.shape[1] - shift].flatten(0, 1), batch["labels"][:, shift:].flatten()
        total += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += (labels != NO_LABEL).sum().item()
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)


def test_what_a_model_predicts_is_found_out_once(generator):
    model, _ = language_model("causal")
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.randint(50, (2, 8), generator=generator)
    sums_of = default_sums(None)
    for _ in range(2):
        mean_metrics(model, [({"input_ids": ids, "labels": ids}, 2)] * 3, sums_of)
    assert len(calls) == 2 * 3 + 1
