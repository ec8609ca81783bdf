"""The learner in four training loops, none of which knows of it: plain, Accelerate, Hugging Face Trainer, Lightning."""

import copy
import warnings

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from gblr.conversion.convert import convert_
from gblr.conversion.cost import cost
from gblr.conversion.harden import harden_
from gblr.fitting.config import GaudiConfig
from gblr.training.budget import Budget
from gblr.training.learner import StructureLearner
from gblr.training.schedules import SigmaSchedule
from tests.training.models import adamw, mlp, snapshot

STEPS = 8
X = torch.linspace(0, 20, 32 * 12).sin().view(32, 12)
Y = X[:, :8] * X[:, 1:9]
BUDGET = Budget(relative_cost=0.3)


def learner_for(model: nn.Module, optimizer) -> StructureLearner:
    return StructureLearner(model, optimizer, BUDGET, SigmaSchedule(1.0, 20.0), total_steps=STEPS)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))


def error(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(X) - Y).square().mean())


def assert_learned(learner: StructureLearner, model: nn.Module, *inputs, **kwargs) -> None:
    """All steps counted, budget met, and the hardened model costs what the learner says."""
    assert learner.step == STEPS
    model = copy.deepcopy(model).eval()
    harden_(model)
    assert learner.relative_cost == pytest.approx(cost(model, *inputs, **kwargs).relative_cost)
    assert 0.2 < learner.relative_cost <= 0.3


def test_a_plain_loop_with_gradient_accumulation():
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    learner = learner_for(model, optimizer)
    before = error(model)
    for _ in range(2):
        for i, (x, y) in enumerate(loader()):
            ((model(x) - y).square().mean() / 2).backward()
            if i % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    assert_learned(learner, model, X)
    assert error(model) < before


@pytest.mark.parametrize("prepared_first", [True, False])
def test_accelerate(prepared_first, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = mlp()
    optimizer = adamw(bare)
    before = error(bare)
    learner = None if prepared_first else learner_for(bare, optimizer)
    model, optimizer, batches = accelerator.prepare(bare, optimizer, loader())
    learner = learner or learner_for(model, optimizer)
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert_learned(learner, bare, X)
    assert error(bare) < before

    accelerator.save_state(tmp_path)
    learner.load_state_dict(learner.state_dict() | {"step": 0})
    accelerator.load_state(tmp_path)
    assert learner.step == STEPS


def classifier() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=30,
        max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    convert_(model, GaudiConfig(relative_cost=1.0, init="scratch"))
    return model


SENTENCES = [{"input_ids": torch.arange(i, i + 6) % 30, "labels": i % 2} for i in range(32)]


def hugging_face(folder) -> tuple[Trainer, StructureLearner]:
    model = classifier()
    optimizer = adamw(model)
    learner = learner_for(model, optimizer)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=5,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    trainer = Trainer(model, arguments, train_dataset=SENTENCES, optimizers=(optimizer, schedule))
    return trainer, learner


def test_hugging_face_trainer_learns_and_resumes_from_its_checkpoint(tmp_path):
    """The state of the learner is in the file of the optimizer: the Trainer knows nothing of it."""
    trainer, learner = hugging_face(tmp_path)
    trainer.train()
    ids = torch.stack([sentence["input_ids"] for sentence in SENTENCES])
    assert_learned(learner, trainer.model, input_ids=ids)

    again, resumed = hugging_face(tmp_path)
    assert resumed.step == 0
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.state_dict() == learner.state_dict()
    straight = snapshot(trainer.model)
    for name, value in snapshot(again.model).items():
        assert torch.equal(value, straight[name]), name


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def configure_optimizers(self):
        optimizer = adamw(self.net)
        self.learner = learner_for(self.net, optimizer)
        return optimizer

    def training_step(self, batch):
        x, y = batch
        return (self.net(x) - y).square().mean()


def fit(module: Lit, steps: int, checkpoint=None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders without workers
        trainer.fit(module, loader(), ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    return trainer


def test_lightning_learns_and_resumes_from_its_checkpoint(tmp_path):
    module = Lit()
    before = error(module.net)
    fit(module, STEPS)
    assert_learned(module.learner, module.net, X)
    assert error(module.net) < before

    fit(Lit(), 5).save_checkpoint(tmp_path / "checkpoint")
    resumed = Lit()
    fit(resumed, STEPS, tmp_path / "checkpoint")
    assert_learned(resumed.learner, resumed.net, X)
    assert resumed.learner.state_dict() == module.learner.state_dict()
