# From a clean clone: `make demo` runs the example program, `make test` the tests. Both make a virtual
# environment first; a second run starts at once. Needs Python 3.11 or newer.

VENV   ?= .venv
# The first of these that is new enough; `make demo PYTHON=/path/to/python` takes another.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
            $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
# The arguments of `pip install` that bring torch; `make demo TORCH="torch==2.14.1"` brings another.
TORCH  ?= --constraint constraints.txt torch

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
# Two processes, each with one thread: what a test computes is too small for several.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal
# Laid again by every target once `make dev` was used: its links know only the files they were made for.
LINKS   := $(wildcard $(VENV)/links.stamp)

.PHONY: help demo test test-fast test-gpu lint types format bench dev clean

help:      ## show this list
	@grep -E '^[a-z-]+: .*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(VENV)/run.stamp $(LINKS)  ## run the example program on the default model
	$(BIN)/stemma demo

test: $(VENV)/dev.stamp $(LINKS)  ## all tests; those for a GPU skip themselves where there is none
	$(PYTEST)

test-fast: $(VENV)/dev.stamp $(LINKS)  ## the tests that need no model
	$(PYTEST) -m "not slow and not gpu"

test-gpu: $(VENV)/dev.stamp $(LINKS)  ## the tests for a GPU, and only those
	$(BIN)/pytest -m gpu

lint: types  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy looks for packages in folders and knows nothing of package-dir: it gets the installed layout.
types: $(VENV)/dev.stamp  ## mypy
	rm -rf build/types && mkdir -p build/types/stemma
	ln -s $(addprefix $(CURDIR)/,lang interpreter backend $(wildcard stemma/*)) build/types/stemma/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

format: $(VENV)/dev.stamp  ## repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# `make bench SUITE="--quick --llama-cpp-python ..."` passes options to the suite.
bench: $(VENV)/bench.stamp $(LINKS)  ## all benchmarks, each printing its table; the suite of workloads first
	$(BIN)/python benchmarks/suite $(SUITE)
	set -e; for file in benchmarks/*.py; do $(BIN)/python $$file; done

dev: $(VENV)/links.stamp  ## install so that editors and type checkers follow
	$(BIN)/pre-commit install

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/torch.stamp: constraints.txt
	@test -n "$(PYTHON)" || { echo "Stemma needs Python 3.11 or newer; none was found. Say which: make demo PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	touch $@

$(VENV)/run.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install --editable .
	touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install --editable '.[dev]'
	touch $(VENV)/run.stamp $@

$(VENV)/bench.stamp: $(VENV)/dev.stamp
	$(PIP) install --editable '.[bench]'
	touch $@

$(VENV)/links.stamp: $(VENV)/dev.stamp $(shell find stemma interpreter backend lang -type d -not -name __pycache__)
	$(PIP) install --no-deps --no-build-isolation --editable . --config-settings editable_mode=strict
	touch $@
