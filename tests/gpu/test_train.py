"""`gblr.train` on a CUDA device: mixed precision, compiled, captured, resumed, without waiting."""

import pytest
import torch

from gblr.training.loop import Run, train
from gblr.training.step_graphs import StepGraphs
from tests.shape_hook import shapes_unchecked
from tests.training.cases import make_config, make_data, make_net, without_seconds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEST = make_data(50)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_it_learns_and_meets_the_budget(precision):
    net = make_net()
    result = train(net, make_data(), TEST, make_config(epochs=16, precision=precision, ema=0.9, structure_lr=0.01))
    assert result.history[-1]["accuracy"] > 0.8 and result.relative_cost <= 0.3
    assert net.stem.weight.is_cuda and net.blocks[0].fc.width_frac.dtype == torch.float32


def test_a_compiled_model_trains_alike_and_is_given_back_uncompiled():
    nets = make_net(), make_net()
    with shapes_unchecked():
        plain, compiled = (
            train(net, make_data(), TEST, make_config(epochs=4, compile=compile))
            for net, compile in zip(nets, (False, True), strict=True)
        )
    assert plain.history[-1]["train_loss"] == pytest.approx(compiled.history[-1]["train_loss"], rel=1e-2)
    assert nets[1]._compiled_call_impl is None


def crash_once(run, monkeypatch):
    """In the middle of an epoch, after a checkpoint."""
    one_step = Run.one_step

    def crash(self, number, stream):
        if number == 13:
            raise RuntimeError("crash")
        one_step(self, number, stream)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="crash"):
        patch.setattr(Run, "one_step", crash)
        run()


def test_resuming_changes_no_bit(tmp_path, monkeypatch):
    torch.use_deterministic_algorithms(True, warn_only=True)

    def run(out=None):
        net = make_net(dropout=0.1)
        return net, train(
            net, make_data(), TEST, make_config(mixup=0.2, precision="fp16", checkpoint_every=0.4), out=out
        )

    expected, whole = run()
    crash_once(lambda: run(tmp_path), monkeypatch)
    net, result = run(tmp_path)
    assert without_seconds(result.history) == without_seconds(whole.history)
    for name, value in expected.state_dict().items():
        assert torch.equal(value, net.state_dict()[name]), name


def test_a_step_waits_for_nothing(monkeypatch):
    """Batches on the device; looking, reporting and saving may wait, steps may not."""
    one_step, waits = Run.one_step, []

    def strict(self, number, stream):
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
        try:
            one_step(self, number, stream)
        except RuntimeError as error:
            waits.append(str(error))
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Run, "one_step", strict)
    x, y = (tensor.cuda() for tensor in make_data().tensors)
    batches = [(a, b) for a, b in zip(x.split(32), y.split(32), strict=True)]
    train(make_net(), batches, None, make_config(precision="bf16", mixup=0.2, ema=0.9))
    assert not waits


# -- captured steps ----------------------------------------------------------------------------------------------------


def batches_of(*sizes):
    """Of several shapes, on the device."""
    x, y = (tensor.cuda() for tensor in make_data().tensors)
    return [(a, b) for size in sizes for a, b in zip(x.split(size), y.split(size), strict=True) if len(a) == size]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_captured_steps_do_what_plain_ones_do(precision):
    data = batches_of(32, 20)
    kept = [tensor.clone() for batch in data for tensor in batch]
    nets = make_net(), make_net()
    plain, captured = (
        train(net, data, None, make_config(precision=precision, ema=0.9, cuda_graphs=graphs))
        for net, graphs in zip(nets, (False, True), strict=True)
    )
    for number, (first, second) in enumerate(zip(plain.history, captured.history, strict=True)):
        # fused AdamW rounds otherwise, and once a width has been rounded to another whole number runs go apart
        assert second["train_loss"] == pytest.approx(first["train_loss"], rel=1e-3 if number < 3 else 0.1)
        assert second["lr"] == pytest.approx(first["lr"], rel=1e-5)
        assert second["relative_cost"] == pytest.approx(first["relative_cost"], abs=0.02)
    assert captured.relative_cost <= 0.3
    assert all(torch.equal(a, b) for a, b in zip(kept, (t for batch in data for t in batch), strict=True))


def test_each_shape_is_captured_once(monkeypatch):
    made, captured = [], StepGraphs._captured

    def counted(self, batch):
        made.append(len(batch[0]))
        return captured(self, batch)

    monkeypatch.setattr(StepGraphs, "_captured", counted)
    train(make_net(), batches_of(32, 20), None, make_config(cuda_graphs=True))
    assert sorted(made) == [20, 32]


def test_captured_runs_resume(tmp_path, monkeypatch):
    def run(out=None):
        net = make_net()
        return net, train(
            net, batches_of(32), None, make_config(precision="fp16", checkpoint_every=0.4, cuda_graphs=True), out=out
        )

    _, whole = run()
    crash_once(lambda: run(tmp_path), monkeypatch)
    _, result = run(tmp_path)
    for first, second in zip(whole.history, result.history, strict=True):
        assert second["train_loss"] == pytest.approx(first["train_loss"], rel=1e-3)
        assert second["lr"] == pytest.approx(first["lr"])
    assert result.relative_cost <= 0.3


def test_a_loss_that_waits_is_named():
    def loss(model, batch):
        found = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return found if found.item() > 0 else found * 0

    with pytest.raises(RuntimeError, match="waits for the device"):
        train(make_net(), batches_of(32), None, make_config(cuda_graphs=True), loss=loss)
