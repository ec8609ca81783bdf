"""Matrices of a batch shared out among threads: the same outcome in the same order, and an end when one fails."""

import _thread
import threading
import time

import pytest
import torch
from torch.testing import assert_close

from gblr.fitting.config import GaudiConfig
from gblr.fitting.fit import fit_batch, num_ticks, prepare_gram
from gblr.fitting.threads import few_threads, shared_out

WEIGHTS = torch.zeros(5, 256, 256)


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def numbers(share, tick):
    time.sleep(0.01)
    return [(i, threading.get_ident(), torch.get_num_threads()) for i in range(share.start, share.stop)]


def test_outcomes_come_in_order_from_as_many_threads_as_there_are():
    with few_threads(WEIGHTS[:, :8]):  # lowers the number for steps, not for shares
        found = shared_out(numbers, WEIGHTS)
    assert [i for i, _, _ in found] == list(range(5))
    assert len({thread for _, thread, _ in found}) == 3 and {count for _, _, count in found} == {1}


@pytest.mark.parametrize("weights", [WEIGHTS[:1], WEIGHTS[:, :64], torch.zeros(5, 256, 256, device="meta")])
def test_one_matrix_small_ones_and_other_devices_stay_in_one_thread(weights):
    found = shared_out(numbers, weights)
    assert [i for i, _, _ in found] == list(range(len(weights)))
    assert {thread for _, thread, _ in found} == {threading.get_ident()}


def test_modes_are_those_of_the_caller():
    def modes(share, tick):
        return [(torch.is_grad_enabled(), torch.is_inference_mode_enabled())]

    with torch.no_grad():
        assert set(shared_out(modes, WEIGHTS)) == {(False, False)}
    with torch.inference_mode():
        assert set(shared_out(modes, WEIGHTS)) == {(False, True)}
    assert set(shared_out(modes, WEIGHTS)) == {(True, False)}


def test_when_one_share_fails_the_others_stop_at_their_next_tick():
    ticks = []

    def fails(share, tick):
        if share.start == 0:
            raise ValueError("the first")
        for _ in range(1000):
            time.sleep(0.005)
            tick()
            ticks.append(share.start)

    with pytest.raises(ValueError, match="the first"):
        shared_out(fails, WEIGHTS)
    assert len(ticks) < 1000


def test_fits_in_threads_are_those_of_one(generator):
    weight = torch.randn(3, 256, 256, generator=generator)
    inputs = torch.randn(512, 256, generator=generator) * torch.linspace(0.1, 2, 256)
    gram = prepare_gram((inputs.T @ inputs).expand(3, -1, -1))
    config, budget, ticks = GaudiConfig(0.4, block_rank=16, steps=2), torch.full((3,), 0.4 * 256**2), []
    together = fit_batch(config, weight, gram, budget, lambda: ticks.append(1))
    assert len(ticks) == num_ticks(config)
    torch.set_num_threads(1)
    alone = fit_batch(config, weight, gram, budget)
    torch.set_num_threads(3)
    for ours, theirs in zip(together, alone, strict=True):
        assert_close(ours.to_dense(), theirs.to_dense(), atol=1e-3, rtol=1e-3)


def test_an_interrupt_does_not_wait_for_the_shares():
    """Ctrl-C in the middle of a long fit: what still runs ends at its next tick."""
    ended = threading.Event()

    def slow(share, tick):
        if share.start == 0:
            _thread.interrupt_main()
        try:
            while True:
                time.sleep(2)
                tick()
        finally:
            ended.set()

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        shared_out(slow, WEIGHTS)
    assert time.monotonic() - begin < 1.5
    assert ended.wait(20)
