# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALL_INPUTS := pyproject.toml setup.py constraints.txt $(shell find src/gblr/ops -name "*.cpp" -o -name "*.h")

.PHONY: demo test lint docs bench clean

demo: $(VENV)/.demo
	$(BIN)/python examples/paper_figures.py --out runs/demo

test: $(VENV)/.test
	$(BIN)/python -m pytest --quiet

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir runs/site

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/bench_masks.py

clean:
	rm -rf $(VENV) runs build

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "Installing gblr into $(VENV) (the first time takes a minute or two) ..."
	$(PIP) --editable '.[report,demo]'
	@touch $@

$(VENV)/.test: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "Installing gblr with all extras into $(VENV) (the first time takes some minutes) ..."
	$(PIP) --editable '.[report,demo,hf,onnx,docs,dev]'
	@touch $@
