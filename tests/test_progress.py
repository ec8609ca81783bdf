import pytest

from gblr import progress as module
from gblr.progress import progress


class Clock:
    """Time that passes by command."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_short_work_is_quiet(clock, capsys):
    with progress("fitting", total=3) as tick:
        for _ in range(3):
            clock.now += 0.5
            tick()
    assert capsys.readouterr() == ("", "")


def test_long_work_without_a_terminal_writes_plain_lines_with_an_estimate(clock, capsys):
    with progress("fitting 8 weights", total=10) as tick:
        for _ in range(10):
            clock.now += 15
            tick()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "fitting 8 weights: 2 of 10, about 120 s left"
    assert lines[-1] == "fitting 8 weights: 10 of 10, about 0 s left"
    assert len(lines) == 5  # one for every 20 s and more


def test_long_work_on_a_terminal_shows_a_bar_and_clears_it(clock, capsys, monkeypatch):
    real = module.Console
    monkeypatch.setattr(module, "Console", lambda stderr: real(stderr=stderr, force_terminal=True, width=80))
    with progress("fitting", total=4) as tick:
        for _ in range(4):
            clock.now += 3
            tick()
    out, err = capsys.readouterr()
    assert out == "" and "fitting" in err and "/4" in err


def test_the_bar_stops_when_the_work_fails(clock, capsys, monkeypatch):
    real, bars = module.Progress, []
    console = module.Console
    monkeypatch.setattr(module, "Console", lambda stderr: console(stderr=stderr, force_terminal=True, width=80))
    monkeypatch.setattr(module, "Progress", lambda *args, **kwargs: bars.append(real(*args, **kwargs)) or bars[-1])
    with pytest.raises(RuntimeError, match="broken"), progress("fitting", total=4) as tick:
        clock.now += 5
        tick()
        assert bars[0].live.is_started
        raise RuntimeError("broken")
    assert not bars[0].live.is_started


def test_an_unknown_total_is_no_trouble(clock, capsys):
    with progress("calibrating", total=0) as tick:
        for _ in range(3):
            clock.now += 30
            tick()
    assert "calibrating: 1 of" in capsys.readouterr().err


def test_notes_stand_beside_the_count_and_the_estimate_counts_from_where_work_began(clock, capsys):
    with progress("training", total=100, done=90) as tick:
        for loss in (3, 2, 1):
            clock.now += 30
            tick(f"loss {loss}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: 91 of 100, loss 3, about 270 s left"
    assert lines[-1] == "training: 93 of 100, loss 1, about 210 s left"


def test_lines_are_said_at_once_and_nothing_is_if_it_is_not_shown(clock, capsys):
    for shown in (True, False):
        with progress("training", total=2, shown=shown) as tick:
            tick.say("epoch 1")
            clock.now += 60
            tick()
    assert capsys.readouterr().err.splitlines() == ["epoch 1", "training: 1 of 2, about 60 s left"]


def test_lines_stay_above_the_bar_of_a_terminal(clock, capsys, monkeypatch):
    real = module.Console
    monkeypatch.setattr(module, "Console", lambda stderr: real(stderr=stderr, force_terminal=True, width=80))
    with progress("training", total=3) as tick:
        clock.now += 5
        tick("loss 0.5")
        tick.say("epoch 1: [accuracy] 0.9")
        tick()
    err = capsys.readouterr().err
    assert "epoch 1: [accuracy] 0.9" in err and "loss 0.5" in err
