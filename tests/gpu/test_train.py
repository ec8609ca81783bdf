"""`gblr.train` on a CUDA device: mixed precision with and without scaling, compiled, resumed, without waiting."""

import pytest
import torch

from gblr.training.loop import Run, train
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
    plain, compiled = (
        train(net, make_data(), TEST, make_config(epochs=4, compile=compile))
        for net, compile in zip(nets, (False, True), strict=True)
    )
    assert plain.history[-1]["train_loss"] == pytest.approx(compiled.history[-1]["train_loss"], rel=1e-2)
    assert nets[1]._compiled_call_impl is None


def test_resuming_changes_no_bit(tmp_path, monkeypatch):
    torch.use_deterministic_algorithms(True, warn_only=True)

    def run(out=None):
        net = make_net(dropout=0.1)
        return net, train(
            net, make_data(), TEST, make_config(mixup=0.2, precision="fp16", checkpoint_every=0.4), out=out
        )

    expected, whole = run()
    one_step = Run.one_step

    def crash(self, number, stream):
        if number == 13:
            raise RuntimeError("crash")
        one_step(self, number, stream)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="crash"):
        patch.setattr(Run, "one_step", crash)
        run(tmp_path)
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
