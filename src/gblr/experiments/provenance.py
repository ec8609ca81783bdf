"""Which code makes a result."""

import os
import subprocess
from pathlib import Path

_FILE = Path(__file__).resolve()


def code_commit() -> str:
    """The variable GBLR_COMMIT if it is set; else the commit of the checkout that this code lies in, with "-dirty" if
    files differ from it; "" where there is neither. To be asked before a run: a checkout may move on while it lasts.
    """
    if "GBLR_COMMIT" in os.environ:
        return os.environ["GBLR_COMMIT"]
    if not _git("ls-files", "--error-unmatch", _FILE.name):
        return ""  # the checkout of another project, in which this code is installed
    return _git("describe", "--always", "--dirty", "--abbrev=7", "--exclude=*")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(_FILE.parent), *words], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
