"""The scripts of examples/ in smoke mode, and the notebook."""

import json
import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.models.tiny_models import sentences, write_encoder
from tests.shape_hook import shapes_unchecked

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def write_texts(folder):
    """As examples/compress_minilm.py wants them: as many as it draws, of random words."""
    texts = sentences(600)
    pairs = {"sentence1": texts[:300], "sentence2": texts[300:], "similarity_score": [i % 6 for i in range(300)]}
    parts = {"stsb/train": pairs, "stsb/test": pairs, "imdb/unsupervised": {"text": texts}}
    for name, content in parts.items():
        file = folder / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return str(folder)


def more_options(script, folder):
    if script != "compress_minilm.py":
        return []
    return ["--model", write_encoder(folder / "model"), "--data", write_texts(folder / "data"), "--device", "cpu"]


@pytest.mark.parametrize("script", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_the_example_runs(script, tmp_path, monkeypatch):
    arguments = [script, "--smoke", "--out", str(tmp_path / "out"), *more_options(script, tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with shapes_unchecked():
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code
    assert any(file.stat().st_size > 100 for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("script", sorted(file.name for file in EXAMPLES.glob("*.py")))
def test_the_example_says_how_to_call_it(script):
    text = (EXAMPLES / script).read_text()
    assert f"    python examples/{script}" in text.split('"""')[1]


def executed(notebook):
    client = NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def test_the_notebook_runs():
    """By a Jupyter kernel, one epoch instead of all of them."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "\nEPOCHS = " in cell.source]
    cell.source = re.sub(r"EPOCHS = \d+", "EPOCHS = 1", cell.source)
    assert "of the converted layers" in executed(notebook)


@pytest.mark.slow
def test_the_notebook_keeps_most_of_the_accuracy():
    printed = executed(nbformat.read(NOTEBOOK, as_version=4))
    dense, learned = (float(value) for value in re.findall(r"accuracy ([\d.]+)", printed))
    assert learned > dense - 0.05


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_the_timed_commands_are_those_of_the_demo():
    """benchmarks/bench_commands.py stores what README shows of `make demo`."""
    root = EXAMPLES.parent
    makefile = (root / "Makefile").read_text().replace("\\\n", " ")
    recipe = " ".join(makefile.split())
    options = re.search(r'^DEMO = "(.+)"$', (root / "benchmarks" / "bench_commands.py").read_text(), re.MULTILINE)[1]
    assert f"gblr compress runs/demo/dense --data digits --cost 0.2 {options} --out" in recipe
    assert "gblr train vit:digits --data digits --epochs 40 --threads 1 --out" in recipe
