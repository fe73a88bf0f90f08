# Targets of this tree; `make` alone lists them. All work from a clean clone.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# Extra arguments for every pip install, e.g. PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu' for
# torch's smaller CPU build.
PIP_ARGS ?=
PYTEST_ARGS ?=
# Tests of one file share servers, so a file stays in one process. Four of them hold eight servers of a tiny model.
PARALLEL ?= -n logical --maxprocesses 4 --dist loadfile
# gpu: SGLang with its CUDA torch. cpu: torch, and SGLang without its CUDA dependencies.
RECIPE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
CPU_PLATFORM := sglang_dsv4x/engine/cpu_platform
STAMP := $(VENV)/.installed-$(RECIPE)
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: help venv demo test lint gpu-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) (3.10 or newer), RECIPE=$(RECIPE) (cpu or gpu), PIP_ARGS=, PYTEST_ARGS=, PARALLEL= (one process)"

venv: $(STAMP) ## make .venv with everything installed, for the GPU if there is one

demo: $(STAMP) ## replay a trace with the tier off and on, compare every output bit (a tiny model, no GPU)
	$(TEST_ENV) $(BIN)/sglang-dsv4x demo

test: lint ## lint, and all tests that need no GPU
	$(TEST_ENV) $(BIN)/python -m pytest -m "not gpu" $(PARALLEL) $(PYTEST_ARGS)

gpu-test: $(STAMP) ## the tests that need a CUDA device
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

clean: ## remove the venv, caches and build results
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache $(CPU_PLATFORM)/dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- install -----------------------------------------------------------------------------------------------------

ifeq ($(RECIPE),gpu)
define INSTALL
$(PIP) -e '.[gpu,test]'
endef
else ifeq ($(RECIPE),cpu)
define INSTALL
$(PIP) -r .ci/requirements-cpu.txt
$(PIP) --no-deps -r .ci/requirements-cpu-no-deps.txt
$(PIP) -e '.[test]'
$(PIP) --no-deps --force-reinstall ./$(CPU_PLATFORM)
endef
else
$(error RECIPE is '$(RECIPE)'; it must be cpu or gpu)
endif

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: '$(PYTHON)' is missing or older than Python 3.10 ($$($(PYTHON) --version 2>&1 || true));" \
	    "name another with PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml $(wildcard .ci/requirements-*.txt) $(shell find $(CPU_PLATFORM) -type f -not -path '*/__pycache__/*') | $(BIN)/python
	$(INSTALL)
	touch $@

# --- lint --------------------------------------------------------------------------------------------------------

# Both distributions as they are installed, made of links, since mypy does not know setuptools' package-dir.
TYPED := .cache/mypy/src
SUBPACKAGES := $(patsubst %/__init__.py,%,$(wildcard sglang_dsv4x/*/__init__.py)) hicache jit_kernels configs

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/sglang_dsv4x
	ln -s $(addprefix $(CURDIR)/,$(wildcard sglang_dsv4x/*.py) $(SUBPACKAGES)) $(TYPED)/sglang_dsv4x
	ln -s $(CURDIR)/$(CPU_PLATFORM)/dsv4x_cpu_platform $(TYPED)
	MYPYPATH=$(TYPED) $(BIN)/python -m mypy -p sglang_dsv4x -p dsv4x_cpu_platform
