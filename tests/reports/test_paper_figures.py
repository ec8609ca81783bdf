"""The script that draws the figures of the paper, from its command line to its files."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "paper_figures.py"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_draws_the_figures_and_says_where(tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "folder"
    run(monkeypatch, "--out", str(out), "--dpi", "30")
    printed = capsys.readouterr().out
    for figure in ("figure1", "figure2", "figure3", "figure7"):
        (path,) = out.glob(f"{figure}_*.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"{path}\n    Fig. {figure[-1]}: " in printed


@pytest.mark.parametrize("arguments", [["--out", ""], ["--out", "{file}"], ["--out", "{file}/below"], ["--dpi", "0"]])
def test_an_odd_request_is_refused_in_one_line(arguments, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *(argument.format(file=file) for argument in arguments))
    assert stop.value.code == 2
    assert f"error: {arguments[0]} must" in capsys.readouterr().err


def test_help_shows_the_command(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "--help")
    assert stop.value.code == 0
    assert "python examples/paper_figures.py --out runs/figures" in capsys.readouterr().out
