"""Results name the code that made them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gblr.experiments import provenance

FILE = Path(provenance.__file__)


def git(folder, *words):
    options = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *options, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of another project, with a copy of the file in it."""
    monkeypatch.delenv("GBLR_COMMIT", raising=False)
    (tmp_path / "readme").write_text("1")
    copy = Path(shutil.copy(FILE, tmp_path))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "readme")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(provenance, "_FILE", copy)
    return tmp_path


def test_the_commit_is_that_of_the_checkout_and_tells_of_changes(checkout):
    git(checkout, "add", "--all")
    git(checkout, "commit", "-qm", "second")
    commit = git(checkout, "rev-parse", "--short=7", "HEAD")
    assert provenance.code_commit() == commit
    (checkout / "readme").write_text("2")
    assert provenance.code_commit() == f"{commit}-dirty"


def test_a_checkout_that_does_not_hold_the_code_is_not_asked(checkout):
    assert provenance.code_commit() == ""


def test_the_variable_goes_first(checkout, monkeypatch):
    monkeypatch.setenv("GBLR_COMMIT", "abc")
    assert provenance.code_commit() == "abc"


def test_without_git_there_is_no_commit(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.code_commit() == ""
