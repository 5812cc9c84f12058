# Everything runs in a virtual environment in .venv, made on first use and refreshed when the dependencies change.
#   make demo       the main job: TPO beside GRPO and PPO, with a table, a figure and TensorBoard runs
#   make test       lint, types, and the tests that take seconds
#   make test-all   the same with the slow tests and the documentation's examples
# Another interpreter: make PYTHON=python3.12 ...; another place: make VENV=path ...; tests in parallel: make JOBS=8 ...

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS)
CODE := tpo_gym tests $(wildcard scripts)

.PHONY: demo test test-all lint type format docs bench install venv unit unit-all clean
.DEFAULT_GOAL := test

demo: $(VENV)/.installed-plots
	$(PY) -m tpo_gym.demo

test: lint type unit

test-all: lint type unit-all docs

unit: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

unit-all: $(VENV)/.installed-dev
	$(PYTEST)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)

type: $(VENV)/.installed-dev
	$(PY) -m mypy tpo_gym $(wildcard scripts)

format: $(VENV)/.installed-dev
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

# Runs the `>>>` examples of the docstrings, the README and docs/.
docs: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PY) -m pytest --doctest-modules --doctest-glob="*.md" tpo_gym README.md docs

bench: $(VENV)/.installed-dev
	$(PY) scripts/benchmark.py

install: $(VENV)/.installed-dev

venv: $(VENV)/bin/python

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-plots: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[plots]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[dev]"
	@touch $@ $(VENV)/.installed-plots

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find tpo_gym tests -name __pycache__ -type d -prune -exec rm -rf {} +
