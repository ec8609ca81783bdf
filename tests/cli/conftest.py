import contextlib
import io
import os
import sys
from unittest import mock

import pytest

from gblr.cli import main
from tests.shape_hook import shapes_unchecked

TINY = ("--data", "digits", "--max-train", 128, "--max-eval", 60, "--threads", 1)


class Ended:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


def run(*arguments):
    """Runs a command as a shell would, in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["gblr", *map(str, arguments)]),
        mock.patch.dict(os.environ, {"COLUMNS": "200"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        shapes_unchecked(),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Ended(code, out.getvalue(), err.getvalue())


@pytest.fixture
def gblr():
    return run


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run to look at, and how it ended."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    options = ("--cost", 0.3, "--train", 0.5, "--baseline", "low-rank", "--out", folder)
    ended = run("compress", "vit:digits", *TINY, *options)
    assert ended.code == 0, ended.err
    ended.folder = folder
    return ended
