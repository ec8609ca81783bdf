"""Imports point one way: ops <- matrices <- fitting, layers <- conversion <- training <- workflows <- ... <- cli."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "gblr"
CHAIN = [{"progress", "atomic"}, {"ops"}, {"matrices"}, {"fitting", "layers"}, {"conversion"}]
CHAIN += [{"training"}, {"workflows"}, {"experiments"}, {"cli"}]
ASIDE = {"models", "data", "reports"}  # they know nothing of the rest; workflows and what is right of them use them
LEFT_OF = {layer: set().union(*CHAIN[:rank]) for rank, layers in enumerate(CHAIN) for layer in layers}
ALLOWED = {
    **{layer: left | {layer} for layer, left in LEFT_OF.items()},
    **{layer: {layer} for layer in ASIDE},
    "workflows": LEFT_OF["workflows"] | ASIDE | {"workflows"},
    "experiments": LEFT_OF["experiments"] | ASIDE | {"experiments"},
    "cli": LEFT_OF["cli"] | ASIDE | {"cli"},
    "__main__": {"cli"},
    "__init__": set().union(*CHAIN, ASIDE) - {"workflows", "experiments", "cli"},  # the public names
}
FILES = sorted(SRC.rglob("*.py"))


def layer_of(file: Path, root: Path = SRC) -> str:
    first = file.relative_to(root).parts[0]
    return first.removesuffix(".py")


def modules_imported_by(file: Path, root: Path = SRC) -> set[str]:
    """Full names; `from a import b` counts as both `a` and `a.b`, as b may be a module."""
    package = ["gblr", *file.relative_to(root).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def layers_imported_by(file: Path, root: Path = SRC) -> set[str]:
    """Folders of gblr; "__init__" stands for the package's own front door."""
    layers = set(ALLOWED) - {"__init__"}
    parts = [name.split(".") for name in modules_imported_by(file, root) if name.split(".")[0] == "gblr"]
    inside = {p[1] for p in parts if len(p) > 1 and p[1] in layers}
    if any(len(p) == 2 and p[1] not in layers for p in parts) or (["gblr"] in parts and len(parts) == 1):
        inside.add("__init__")  # `import gblr` or `from gblr import GBLRMatrix`: import from the defining file
    return inside


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_imports_point_left(file):
    assert layer_of(file) in ALLOWED, f"{file}: a folder that the layout does not know"
    for there in layers_imported_by(file):
        assert there in ALLOWED[layer_of(file)], f"{file}: must not import `{there}`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_triton_is_imported_in_files_of_that_name_only(file):
    roots = {name.split(".")[0] for name in modules_imported_by(file)}
    assert "triton" not in roots or file.name == "triton.py"


@pytest.mark.parametrize("file", [f for f in FILES if layer_of(f) in ("ops", "matrices")], ids=lambda file: file.name)
def test_the_mathematics_needs_torch_and_nothing_else(file):
    standard = {
        "math",
        "functools",
        "itertools",
        "importlib",
        "types",
        "warnings",
        "dataclasses",
        "json",
        "typing",
        "abc",
        "collections",
        "contextlib",
        "ctypes",
        "pathlib",
        "os",
        "platform",
    }
    roots = {name.split(".")[0] for name in modules_imported_by(file)}
    assert roots <= {"torch", "jaxtyping", "gblr", "triton"} | standard


def test_reports_do_without_torch():
    for file in FILES:
        if layer_of(file) == "reports":
            assert "torch" not in {name.split(".")[0] for name in modules_imported_by(file)}, file


@pytest.mark.parametrize(
    ("code", "layers"),
    [
        ("from gblr.layers.gaudi import GaudiLinear", {"layers"}),
        ("from gblr import layers", {"layers"}),
        ("import gblr.layers.gaudi", {"layers"}),
        ("from ..layers import gaudi", {"layers"}),
        ("from .. import layers", {"layers"}),
        ("from . import masks", {"ops"}),
        ("def f():\n    from gblr.cli import main", {"cli"}),
        ("import gblr", {"__init__"}),
        ("from gblr import GBLRMatrix", {"__init__"}),
        ("import torch, math", set()),
    ],
)
def test_the_checker_sees_every_way_to_import(code, layers, tmp_path):
    file = tmp_path / "ops" / "example.py"
    file.parent.mkdir()
    file.write_text(code)
    assert layers_imported_by(file, tmp_path) == layers
