"""Installing where there is no C++ compiler: gblr comes without its CPU kernels, says so, and works."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FALSE = shutil.which("false")
NO_COMPILER = os.environ | {"CC": str(FALSE), "CXX": str(FALSE), "LDSHARED": str(FALSE), "OMP_NUM_THREADS": "1"}
needs_false = pytest.mark.skipif(FALSE is None, reason="no program `false` to stand for a compiler that fails")

# A small model is converted and hardened; forms, how far outputs moved, warnings, and where gblr and its libraries are.
USE = """
import json, warnings
from pathlib import Path
import torch
import gblr
from gblr.ops.native import cpu_kernels

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.GELU(), torch.nn.Linear(60, 20)).eval()
    gblr.convert_(model, gblr.GaudiConfig(0.5, steps=2))
    x = torch.randn(5, 40)
    with torch.no_grad():
        expected = model(x)
        report = gblr.harden_(model, x)
        error = float((model(x) - expected).norm() / expected.norm())
folder = Path(gblr.__file__).parent
print(json.dumps({
    "forms": sorted({form for row in report.rows for form in row.form_seconds}),
    "error": error,
    "warnings": [str(w.message) for w in caught if "gblr" in str(w.message)],
    "kernels": cpu_kernels(),
    "folder": str(folder),
    "libraries": sorted(file.name for file in (folder / "ops" / "native").glob("cpu_*")),
}))
"""


def run(*command: object, cwd: Path, env: dict[str, str], timeout: int = 60) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@needs_false
def test_a_compiler_that_fails_stops_no_installation(tmp_path):
    libraries, objects = tmp_path / "lib", tmp_path / "temp"
    folders = ("--build-lib", libraries, "--build-temp", objects)
    said = run(sys.executable, "setup.py", "build_ext", *folders, cwd=ROOT, env=NO_COMPILER)
    assert not [file for folder in (libraries, objects) for file in folder.rglob("*") if file.is_file()]
    for name in ("avx2", "avx512"):
        assert f'building extension "gblr.ops.native.cpu_{name}" failed' in said


def install(tmp_path: Path, env: dict[str, str]) -> dict:
    """What `USE` prints with a gblr that was installed from a copy of this tree, without any compiled file."""
    tree, target = tmp_path / "tree", tmp_path / "installed"
    without = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=without)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        target,
    )
    run(*pip, ".", cwd=tree, env=env, timeout=600)
    used = run(sys.executable, "-c", USE, cwd=tmp_path, env=env | {"PYTHONPATH": str(target)}, timeout=120)
    found = json.loads(used.splitlines()[-1])
    assert Path(found["folder"]).is_relative_to(target) and found["error"] < 1e-5
    return found


@pytest.mark.slow
@needs_false
def test_gblr_installed_without_a_compiler_works_and_says_what_it_misses(tmp_path):
    found = install(tmp_path, NO_COMPILER)
    assert found["libraries"] == [] and found["forms"] == ["dense", "factors"]
    (message,) = found["warnings"]
    assert "runs without its compiled CPU kernels" in message and "not built when gblr was installed" in message
    assert found["kernels"].startswith("none: they were not built")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_gblr_installed_with_a_compiler_has_its_kernels(tmp_path):
    found = install(tmp_path, os.environ | {"OMP_NUM_THREADS": "1"})
    assert len(found["libraries"]) == 2 and found["warnings"] == []
    assert found["kernels"] in ("avx2", "avx512") and "packed" in found["forms"]
