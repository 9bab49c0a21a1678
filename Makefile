# make            what can be made
# make PYTHON=python3.12 demo      with another Python
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# How many processes the tests and the notebooks are divided among, by file: 0 for none but this. One more than two
# cores, since tests wait a third of their time: for browsers, kernels, and processes that start.
JOBS ?= 3
# A folder with Fashion-MNIST's four idx files; without it the demo trains on scikit-learn's digits.
DATA ?=

BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# Some machines forbid Python to keep compiled modules: then each of hundreds of processes compiles mirror_nb anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test chaos leaks lint lab clean

help:
	@echo "make demo    train a network on handwritten digits, on all GPUs or two CPU replicas; leaves demo.png"
	@echo "             (make demo DATA=folder: Fashion-MNIST's four idx files instead)"
	@echo "make lab     open the tutorials in JupyterLab"
	@echo "make test    lint, types, tests, and the notebooks against their saved output"
	@echo "make chaos   faults at random, ROUNDS of them drawn from SEED; the report goes to benchmarks/results/chaos.txt"
	@echo "make leaks   200 starts and 10,000 cells, with memory, descriptors and threads watched"
	@echo "make lint    ruff and mypy alone"
	@echo "make clean   remove $(VENV) and what the tools left"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: make PYTHON=... with Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"mirror_nb needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of extras: installed once, and again when what is to be installed has changed.
$(VENV)/.has-demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.has-lab: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[demo,lab]'
	@touch $@

$(VENV)/.has-test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[test]'
	@touch $@

demo: $(VENV)/.has-demo
	$(BIN)/python -m mirror_nb demo $(if $(DATA),--data '$(DATA)')

lab: $(VENV)/.has-lab
	$(BIN)/jupyter lab notebooks/00_index.ipynb

lint: $(VENV)/.has-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) --no-loadscope-reorder --nbval --nbval-sanitize-with notebooks/sanitize.cfg --nbval-cell-timeout=120 \
	  notebooks tests

ROUNDS ?= 500
SEED ?= 1

chaos: $(VENV)/.has-test
	$(BIN)/python tests/faults/chaos.py --rounds $(ROUNDS) --seed $(SEED) --log build/chaos.jsonl \
	  --report benchmarks/results/chaos.txt

leaks: $(VENV)/.has-test
	MIRROR_NB_LEAKS=long $(BIN)/python -m pytest tests/test_leaks.py --timeout 7200 -o faulthandler_timeout=7200 -q

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
