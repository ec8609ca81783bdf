"""Every command line in README and docs works: blocks marked `<!-- runnable -->` are run, all others are checked
against the programs that exist, with their options.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from gblr.cli import commands, main
from gblr.cli.app import app
from gblr.cli.reproduce import RECIPES
from tests.shape_hook import shapes_unchecked

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"^<!-- runnable -->$", re.MULTILINE)
BLOCK = re.compile(r"^(<!-- runnable -->\n)?```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:gblr|make|python|torchrun|pip) [^`\n]+)`(?!`)")
FILE_BLOCK = re.compile(r'^```python title="([\w./]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PLAIN_PROGRAMS = {".", "cd", "git"}  # nothing of ours to check
TORCHRUN_OPTIONS = {"--standalone", "--nproc_per_node", "--no-python"}

commands.register()
GBLR = get_command(app)


@dataclass(frozen=True)
class Line:
    """A command of a page; `whole` if it can be pasted, else a mention in the text."""

    words: tuple[str, ...]
    whole: bool = True
    runnable: bool = False
    output: str = ""

    def __str__(self) -> str:
        return shlex.join(self.words)


def lines_of(text: str) -> list[Line]:
    found = []
    for runnable, language, block in BLOCK.findall(text):
        for source in block.replace("\\\n", " ").splitlines():
            if language == "sh" or source.startswith("gblr "):
                found += _lines(source, whole=True, runnable=bool(runnable))
    for mention in INLINE.findall(text):
        found += _lines(mention, whole=False)
    return found


def _lines(source: str, whole: bool, runnable: bool = False) -> Iterator[Line]:
    words: list[str] = []
    for word in [*shlex.split(source, comments=True), "&&"]:
        if word not in ("&&", ";", "|"):
            words.append(word)
            continue
        words = words[next((i for i, w in enumerate(words) if not re.match(r"\w+=", w)), len(words)) :]
        if words:
            cut = words.index(">") if ">" in words else len(words)
            yield Line(tuple(words[:cut]), whole, runnable, "".join(words[cut + 1 :]))
        words = []


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- every command exists ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_of_a_page_exist_with_their_options(page):
    text = page.read_text()
    files = {name for name, _ in FILE_BLOCK.findall(text)}
    for line in lines_of(text):
        program = Path(line.words[0]).name if line.words[0] != "." else "."
        if program in PLAIN_PROGRAMS:
            continue
        assert program in CHECKS, f"{ids(page)}: `{line}` is no program that this test knows"
        problem = CHECKS[program](line, files)
        assert not problem, f"{ids(page)}: `{line}`: {problem}"


def check_gblr(line: Line, files: set[str]) -> str:
    name, *rest = line.words[1:] or [""]
    if name.startswith("-"):
        return "" if name in options_of(GBLR) else f"gblr has no option {name}"
    if name not in GBLR.commands:
        return f"there is no command {name!r}"
    command = GBLR.commands[name]
    wrong = [word for word in names_in(rest) if word not in options_of(command)]
    if name == "reproduce" and rest and wrong:
        module = RECIPES[rest[0]][0]
        wrong = [word for word in wrong if word not in script_options(module_file(module))]
    if wrong or not line.whole:
        return f"no such option: {', '.join(wrong)}" if wrong else ""
    try:
        command.make_context(name, list(rest))  # as the shell would call it: types, missing arguments
    except Exception as error:  # click's; typer may bring its own copy of click
        return error.format_message() if hasattr(error, "format_message") else repr(error)
    return ""


def options_of(command) -> set[str]:
    names = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return {name for name in names if name.startswith("-")} | {"--help", "-h"}


def names_in(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)]


def check_python(line: Line, files: set[str]) -> str:
    script, *rest = line.words[1:]
    if script == "-m":
        module, *rest = rest
        if module.split(".")[0] != "gblr":
            return ""
        script = module_file(module)
    if script in files:
        return ""
    file = ROOT / script
    if not file.is_file():
        return f"{script} is not there"
    wrong = [word for word in names_in(rest) if word not in script_options(file)]
    return f"no such option: {', '.join(wrong)}" if wrong else ""


def module_file(module: str) -> Path:
    place = ROOT / "src" / module.replace(".", "/")
    return place / "__main__.py" if place.is_dir() else place.with_suffix(".py")


def script_options(file: Path) -> set[str]:
    """Options that `argparse` is told of; recipes share those of their sweep, publications theirs."""
    text = Path(file).read_text()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    added = [call.args for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    shared = {
        "gblr.experiments.sweep": r"from gblr\.experiments\.\w+ import main",
        "gblr.experiments.publishing": r"from gblr\.experiments\.publishing import",
    }
    used = (module for module, imported in shared.items() if re.search(imported, text))
    more = {option for module in used for option in script_options(module_file(module))}
    return {arg.value for args in added for arg in args if isinstance(arg, ast.Constant)} | {"--help"} | more


def check_make(line: Line, files: set[str]) -> str:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = set(line.words[1:]) - targets
    return f"no such target: {', '.join(missing)}" if missing else ""


def check_torchrun(line: Line, files: set[str]) -> str:
    if "gblr" in line.words:  # torchrun --no-python gblr ...
        cut = line.words.index("gblr")
        own = check_torchrun(Line(line.words[:cut], whole=False), files)
        return own or check_gblr(Line(line.words[cut:], line.whole), files)
    wrong = set(names_in(list(line.words[1:]))) - TORCHRUN_OPTIONS
    if wrong:
        return f"options that are not tested: {', '.join(wrong)}"
    return "" if not line.whole or line.words[-1] in files else f"{line.words[-1]} is no file of this page"


def check_pip(line: Line, files: set[str]) -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for word in line.words for part in re.findall(r"\[(.+)\]", word) for extra in part.split(",")}
    return f"no such extra: {', '.join(named - set(extras))}" if named - set(extras) else ""


CHECKS = {
    "gblr": check_gblr, "python": check_python, "make": check_make, "torchrun": check_torchrun, "pip": check_pip,
}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("gblr compress vit:digits --data digits --cost 0.3", ""),
        ("gblr compress vit:digits --data digits --price 0.3", "--price"),
        ("gblr compress vit:digits", "data"),
        ("gblr compress vit:digits --data digits --cost little", "--cost"),
        ("gblr conpress vit:digits", "conpress"),
        ("gblr reproduce cifar10-learning --smoke", ""),
        ("gblr reproduce cifar10-learning --smoky", "--smoky"),
        ("gblr --versions", "--versions"),
        ("python examples/learn_digits.py --seeds 3", ""),
        ("python examples/learn_digits.py --sides 3", "--sides"),
        ("python examples/unlearn_digits.py", "unlearn"),
        ("python -m gblr.experiments.cifar10_learning --date x", "--date"),
        ("make demo", ""),
        ("make tea", "tea"),
        ("pip install 'gblr[onyx]'", "onyx"),
        ("torchrun --nproc_per_node 2 other.py", "other.py"),
        ("torchrun --nproc_per_node 2 --no-python gblr compress x --data y --stream", ""),
        ("torchrun --nproc_per_node 2 --no-python gblr compress x --data y --steam", "--steam"),
    ],
)
def test_a_wrong_command_is_found(source, problem):
    (line,) = lines_of(f"text\n\n```sh\n{source}  # why\n```\n")
    found = CHECKS[line.words[0]](line, set())
    assert (problem in found and found) if problem else not found


def test_continued_lines_comments_variables_and_redirections_are_read():
    text = "<!-- runnable -->\n```sh\n# a comment\nA=1 gblr inspect x \\\n    --json > y.json\ncd x && make demo\n```\n"
    first, second, third = lines_of(text)
    assert first == Line(("gblr", "inspect", "x", "--json"), True, True, "y.json")
    assert (second.words, third.words) == (("cd", "x"), ("make", "demo"))
    assert lines_of("see `gblr bench RUN`.") == [Line(("gblr", "bench", "RUN"), whole=False)]


# -- the page of the command line is complete --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GBLR.commands))
def test_the_page_of_the_command_line_has_every_option(name):
    text = (ROOT / "docs" / "cli.md").read_text()
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    prose = BLOCK.sub("", section)
    shown = set(re.findall(r"--[a-z][a-z-]*", prose))
    known = {option for option in options_of(GBLR.commands[name]) if option.startswith("--")} - {"--help"}
    assert known - shown == set(), "options that the page lacks"
    assert shown - known == set(), "options that do not exist"


# -- runnable blocks run -----------------------------------------------------------------------------------------------


RUNNABLE = [page for page in PAGES if MARK.search(page.read_text())]


@pytest.mark.parametrize("page", RUNNABLE, ids=ids)
def test_runnable_commands_run(page, tmp_path, monkeypatch, capfd):
    """All of a page in one folder, one after the other; `python title="x.py"` blocks are files there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = page.read_text()
    files = dict(FILE_BLOCK.findall(text))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    lines = [line for line in lines_of(text) if line.runnable]
    assert lines, "the mark must stand right above a ```sh block"
    try:
        for line in lines:
            code = run(line, tmp_path, monkeypatch)
            assert code == 0, f"`{line}` ended with {code}:\n{capfd.readouterr().err[-3000:]}"
    finally:
        for name in files:
            sys.modules.pop(Path(name).stem, None)
    for name in files:
        used = any(Path(name).stem in str(line) for line in lines)
        assert used, f"{name} is used by no runnable command of its page, so nothing tests it"


def run(line: Line, folder: Path, monkeypatch) -> int:
    program, *rest = line.words
    if program == "gblr":  # in this process: importing torch anew would take longer than most commands
        return run_gblr(list(line.words), folder / (line.output or os.devnull), monkeypatch)
    starts = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
    assert program in starts, f"`{line}` cannot be marked runnable"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([*starts[program], *rest], env=environment, cwd=folder, timeout=300).returncode


def run_gblr(words: list[str], output: Path, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", words)
    with shapes_unchecked(), output.open("w") as stream, redirect_stdout(stream):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_marks_stand_above_a_block_of_commands(page):
    text = page.read_text()
    assert len(MARK.findall(text)) == sum(bool(mark) for mark, _, _ in BLOCK.findall(text))
