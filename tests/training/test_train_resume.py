"""Stopped at any step and continued, a run ends with the bits of one that was not stopped."""

import dataclasses
import json
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import gblr
from gblr import atomic
from gblr.atomic import complete, replacing
from gblr.conversion.tensor_files import CheckpointError
from gblr.training.interrupts import Interrupts, obey
from gblr.training.loop import Run, train
from tests.shape_hook import shapes_unchecked
from tests.training.cases import make_config, make_data, make_net, without_seconds

TEST = make_data(50)


class Crash(Exception):
    pass


class Noisy(Dataset):
    """Random augmentation with every global generator, as torchvision's transforms and their like do it."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        x, y = make_noisy[index]
        return x + 0.1 * torch.randn(8) + 0.01 * random.random() + 0.01 * np.random.rand(), y


make_noisy = make_data()


def before_step(monkeypatch, step, act):
    """Calls `act` just before that step."""
    one_step = Run.one_step

    def patched(self, number, stream):
        if number == step:
            act()
        one_step(self, number, stream)

    monkeypatch.setattr(Run, "one_step", patched)


def crash():
    raise Crash


def run(out=None, seed=0, data=None, **changes):
    config = make_config(epochs=4, mixup=0.2, ema=0.9, checkpoint_every=0.4, **changes)
    net = make_net(dropout=0.1, seed=seed)
    result = train(net, data or Noisy(), TEST, config, out=out)
    return net.state_dict(), result


def assert_same_bits(one, other):
    assert without_seconds(one[1].history) == without_seconds(other[1].history)
    assert (one[1].best, one[1].relative_cost) == (other[1].best, other[1].relative_cost)
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Some forty runs: checking shapes takes longer than training, and test_train.py does it."""
    with shapes_unchecked():
        yield


@pytest.fixture(scope="module")
def uninterrupted():
    with shapes_unchecked():
        return run()


@pytest.mark.parametrize("crashes", [(2,), (3, 9, 17)])
def test_a_crash_at_any_step_changes_no_bit(crashes, uninterrupted, tmp_path, monkeypatch):
    """Mixup, dropout, augmentation, average and structure all go on as if nothing had happened."""
    for number, step in enumerate(crashes):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            before_step(patch, step, crash)
            run(tmp_path, seed=number)
    assert_same_bits(run(tmp_path, seed=9), uninterrupted)  # the seed of the model no longer matters
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert without_seconds(rows) == without_seconds(uninterrupted[1].history)


def partly_frozen():
    net = make_net()
    net.head.weight.requires_grad_(False)
    return net


def compiled_as_a_whole(net):
    return torch.compile(net, backend="eager")


def compiled_in_part(net):
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    return net


@pytest.mark.parametrize("wrap", [compiled_as_a_whole, compiled_in_part])
def test_models_that_are_compiled_already_resume_too(wrap, tmp_path, monkeypatch):
    """Their names have a mark, of which neither torch's states nor another process that continues knows."""
    config = make_config(epochs=2, ema=0.9, checkpoint_every=0.4)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 7, crash)
        train(wrap(partly_frozen()), make_data(), TEST, config, out=tmp_path)
    found = train(wrap(partly_frozen()), make_data(), TEST, config, out=tmp_path)
    expected = train(partly_frozen(), make_data(), TEST, config)
    assert without_seconds(found.history) == without_seconds(expected.history)


def test_workers_read_the_same_data(uninterrupted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 8, crash)
        run(tmp_path, num_workers=2)
    assert_same_bits(run(tmp_path), uninterrupted)


def test_accumulation_and_plain_batches_resume_too(tmp_path, monkeypatch):
    batches = [tuple(part) for part in zip(*(t.split(16) for t in make_data().tensors), strict=True)]
    options = {"data": batches, "batch_size": 16, "accumulate": 3}  # 10 batches: 3 steps in an epoch
    expected = run(**options)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 7, crash)
        run(tmp_path, **options)
    assert_same_bits(run(tmp_path, **options), expected)


def test_samplers_with_a_generator_of_their_own_resume_too(tmp_path, monkeypatch):
    def loader():
        generator = torch.Generator().manual_seed(5)
        sampler = WeightedRandomSampler(torch.ones(160), 160, generator=generator)
        return DataLoader(make_data(), batch_size=32, sampler=sampler)

    expected = run(data=loader())
    with monkeypatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 13, crash)
        run(tmp_path, data=loader())
    assert_same_bits(run(tmp_path, data=loader()), expected)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_save_and_say_how_to_go_on(number, ends, uninterrupted, tmp_path, monkeypatch, capsys):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch, pytest.raises(ends) as caught:
        before_step(patch, 11, lambda: os.kill(os.getpid(), number))
        run(tmp_path)
    assert number == signal.SIGINT or caught.value.code == 143
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    words = f"stopped at step 12 of 20: saved in {tmp_path / 'last'}; start it again as before to continue."
    assert words in capsys.readouterr().err
    assert_same_bits(run(tmp_path), uninterrupted)
    assert f"continuing {tmp_path} at step 12 of 20" in capsys.readouterr().err


def test_a_signal_without_a_folder_ends_the_run_at_once(monkeypatch, capsys):
    before_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        run()
    assert "stopped at step 4 of 20: nothing is saved." in capsys.readouterr().err


def test_a_second_signal_does_not_wait():
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit):
        obey(signal.SIGTERM)


def test_a_finished_run_is_not_run_again(uninterrupted, tmp_path, monkeypatch):
    first = run(tmp_path)
    before_step(monkeypatch, 0, crash)
    again = run(tmp_path, seed=4)
    assert_same_bits(first, again)
    assert_same_bits(first, uninterrupted)


def test_starting_anew_removes_what_was_there(tmp_path):
    run(tmp_path)
    config = make_config(epochs=1, eval_every=2.0)
    result = train(make_net(), make_data(), None, config, out=tmp_path, resume=False)
    assert [row["step"] for row in result.history] == [5]
    assert not (tmp_path / "best").exists()  # no evaluation, no best
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 1


def test_another_config_is_refused_by_the_names_of_its_fields(tmp_path):
    train(make_net(), make_data(), None, make_config(epochs=1), out=tmp_path)
    changes = {"lr": 0.5, "budget": gblr.Budget(relative_cost=0.2), "num_workers": 1}
    with pytest.raises(CheckpointError) as caught:
        train(make_net(), make_data(), None, make_config(epochs=1, **changes), out=tmp_path)
    text = str(caught.value)
    assert "`lr` was 0.01 and is 0.5" in text and "`budget`" in text and "resume=False" in text
    assert "num_workers" not in text and "`epochs`" not in text


def test_other_data_and_another_model_are_refused(tmp_path):
    config = make_config(epochs=1)
    train(make_net(), make_data(), None, config, out=tmp_path)
    with pytest.raises(CheckpointError, match="the data had 5 batches in an epoch and has 3"):
        train(make_net(), make_data(100), None, config, out=tmp_path)
    other = make_net()
    other.head, other.extra = torch.nn.Linear(16, 5), torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError) as caught:
        train(other, make_data(), None, config, out=tmp_path)
    assert "'head.weight': the model has shape (5, 16) float32, the checkpoint shape (4, 16) float32" in str(
        caught.value
    )
    assert "'extra.weight' of the model is missing" in str(caught.value)


@pytest.mark.parametrize("file", ["trainer.pt", "model.safetensors", "gblr.json"])
def test_a_damaged_checkpoint_is_no_checkpoint(file, tmp_path):
    config = make_config(epochs=1)
    train(make_net(), make_data(), None, config, out=tmp_path)
    path = tmp_path / "last" / file
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        train(make_net(), make_data(), None, config, out=tmp_path)


def test_parameters_that_never_had_a_gradient_are_no_obstacle(tmp_path, monkeypatch):
    def make():
        net = make_net()
        net.unused = torch.nn.Linear(3, 3)
        return net

    expected = make()
    train(expected, make_data(), None, make_config(epochs=2))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 7, crash)
        train(make(), make_data(), None, make_config(epochs=2), out=tmp_path)
    net = make()
    train(net, make_data(), None, make_config(epochs=2), out=tmp_path)
    for name, value in expected.state_dict().items():
        assert torch.equal(value, net.state_dict()[name]), name


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path, monkeypatch):
    def make():
        net = make_net()
        net.blocks[1].norm.weight = net.blocks[0].norm.weight
        return net

    expected = make()
    train(expected, make_data(), None, make_config(epochs=2))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 7, crash)
        train(make(), make_data(), None, make_config(epochs=2), out=tmp_path)
    net = make()
    train(net, make_data(), None, make_config(epochs=2), out=tmp_path)
    assert net.blocks[1].norm.weight is net.blocks[0].norm.weight
    for name, value in expected.state_dict().items():
        assert torch.equal(value, net.state_dict()[name]), name


# -- the folder -------------------------------------------------------------------------------------------------------


def write(folder, text):
    with replacing(folder) as new:
        (new / "a").write_text(text)


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for text in ("one", "two"):
        write(tmp_path / "last", text)
    assert (tmp_path / "last" / "a").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_failure_while_writing_leaves_the_old_one(tmp_path):
    write(tmp_path / "last", "one")
    with pytest.raises(Crash), replacing(tmp_path / "last") as new:
        (new / "a").write_text("half")
        raise Crash
    assert (tmp_path / "last" / "a").read_text() == "one"


@pytest.mark.parametrize("survived", [0, 1])
def test_a_crash_at_a_rename_leaves_a_complete_folder(survived, tmp_path, monkeypatch):
    """Before the first rename the old one is in place, between the two it is beside it; then all goes on."""
    write(tmp_path / "last", "one")
    renames = []

    def rename(source, target):
        if len(renames) == survived:
            raise Crash
        renames.append(os.replace(source, target))

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(atomic.os, "rename", rename)
        write(tmp_path / "last", "two")
    assert (complete(tmp_path / "last") / "a").read_text() == "one"
    write(tmp_path / "last", "three")
    assert (complete(tmp_path / "last") / "a").read_text() == "three"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_no_folder_is_no_checkpoint(tmp_path):
    assert complete(tmp_path / "last") is None


def test_a_run_that_crashes_between_the_renames_continues(uninterrupted, tmp_path, monkeypatch):
    calls = []
    rename = os.rename

    def failing(source, target):
        calls.append(target)
        if str(target).endswith("/last") and len([c for c in calls if str(c).endswith("/last")]) == 4:
            raise Crash
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(atomic.os, "rename", failing)
        run(tmp_path)
    assert not (tmp_path / "last").exists() and (tmp_path / ".last.old").exists()
    assert_same_bits(run(tmp_path), uninterrupted)


def test_settings_that_change_nothing_may_change(tmp_path, uninterrupted, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 12, crash)
        run(tmp_path)
    config = make_config(epochs=4, mixup=0.2, ema=0.9, checkpoint_every=3.0, parallel="fsdp", find_unused=True)
    net = make_net(dropout=0.1)
    result = train(net, Noisy(), TEST, dataclasses.replace(config), out=tmp_path)
    assert_same_bits((net.state_dict(), result), uninterrupted)
