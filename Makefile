# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles what is imported, at its first import; compiling all that is installed takes long.
# It must be allowed to keep that: otherwise each process that a test starts compiles transformers anew, for 12 s.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
INSTALL_INPUTS := pyproject.toml setup.py constraints.txt $(shell find src/gblr/ops -name "*.cpp" -o -name "*.h")

.PHONY: demo test lint docs bench clean

demo: $(VENV)/.demo
	rm -rf runs/demo
	$(BIN)/gblr train vit:digits --data digits --epochs 40 --threads 1 --out runs/demo/dense
	$(BIN)/gblr compress runs/demo/dense --data digits --cost 0.2 --train 40 --lr 0.001 \
		--baseline low-rank --baseline monarch --threads 1 --out runs/demo/small
	$(BIN)/gblr report runs/demo/small --out runs/demo/report.html

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet -n 2 --dist worksteal

lint: $(VENV)/.test
	$(BIN)/ruff format --check . docs/_build/*.py
	$(BIN)/ruff check . docs/_build/*.py
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
	$(PIP) --editable '.[report,demo,hf]'
	@touch $@

$(VENV)/.test: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "Installing gblr with all extras into $(VENV) (the first time takes some minutes) ..."
	$(PIP) --editable '.[report,demo,hf,onnx,docs,dev]'
	@touch $@
