# Everything goes through these targets; `make` lists them.
#   PYTHON=python3.12       the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX=URL         where to take torch from. PyPI's torch for Linux brings several GB of CUDA along; without a
#                           GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu is a tenth of that.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup train test test-all long gloo matrix cluster soak check format gpu clean

PYTHON ?= python3
NPROC ?= 2
DATA ?=
FRESH ?=
ARGS ?=
TORCH_INDEX ?=

BIN := .venv/bin
READY := .venv/.ready
READY_TRAIN := .venv/.ready-train
# What fails is run again, alone, and told apart from what fails by chance (tests/harness/rerun.py).
PYTEST := $(BIN)/python -m tests.harness.rerun
# Two tests at a time, each with ranks of its own: one waits while the other computes.
WORKERS := --numprocesses 2 --dist worksteal
TORCH_PIN := $(shell grep '^torch==' requirements-dev.txt)
# pip names each package and its size as its download begins; the rest of what it writes is left out.
INSTALL := $(BIN)/python -m pip install --progress-bar off --no-color
SHOWN := | sed -u -n -E -e '/\.metadata/d' -e 's/^Installing collected packages.*/  installing them/p' \
	-e 's/^ *(Downloading|Using cached) ([^ -]+)-([^ -]+)-.*(\(.*\)).*/  \2 \3 \4/p'
define VENV
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12 ..."; \
	exit 1; }
@$(BIN)/python -m pip --version > /dev/null 2>&1 || { echo "Making .venv"; $(PYTHON) -m venv .venv; }
endef
define TORCH
@if [ -n "$(TORCH_INDEX)" ]; then \
	echo "torch comes from $(TORCH_INDEX)"; $(INSTALL) $(TORCH_PIN) --index-url $(TORCH_INDEX) $(SHOWN); \
elif ! $(BIN)/python -c 'import torch' 2> /dev/null; then \
	echo "PyPI's torch for Linux brings a CUDA build of several GB. Without a GPU, stop this and run"; \
	echo "  make $(MAKECMDGOALS) TORCH_INDEX=https://download.pytorch.org/whl/cpu"; \
fi
endef
TRAIN_ARGS = $(if $(DATA),--data "$(DATA)") $(if $(filter-out 0,$(FRESH)),--fresh) $(ARGS)

help:
	@echo "make train   train a small GPT on text with NPROC=2 processes; run again to resume."
	@echo "             FRESH=1 starts over, DATA=PATH takes your .txt/.jsonl files, ARGS= goes to the script"
	@echo "make test    check, then every feature and every rule once; with make cluster, what CI runs"
	@echo "make test-all  the same, and long, gloo, matrix and cluster, before a piece of work is called done"
	@echo "make long    further cells of matrices: pairs of methods, precisions, compiled models"
	@echo "make gloo    jobs whose numbers matter over gloo, in place of shared memory"
	@echo "make soak    properties with as many examples as are promised: 10,000 schedules, 5,000 requests;"
	@echo "             and the costliest further cells"
	@echo "make matrix  every checkpoint layout saved and loaded in every other"
	@echo "make cluster jobs on several hosts, made of network namespaces; as root"
	@echo "make check   format, lint, types, layers, surface"
	@echo "make format  format the code and mend what the linter can mend"
	@echo "make gpu     the tests that need an accelerator, then the benchmarks into benchmarks/results/"
	@echo "make setup   the environment in .venv; the other targets call it"
	@echo "make clean   remove caches and build outputs; .venv and runs/ stay"

setup: $(READY)

$(READY): requirements-dev.txt pyproject.toml
	$(VENV)
	@echo "Installing the development environment into .venv: $$(grep -c '^[a-zA-Z].*==' requirements-dev.txt) packages."
	$(TORCH)
	@$(INSTALL) -r requirements-dev.txt $(SHOWN)
	@$(INSTALL) -e . --no-deps $(SHOWN)
	@touch $@

# What `make train` imports, and what serves its model, in the versions of the development environment. Where that
# is installed, it is used.
$(READY_TRAIN): requirements-dev.txt pyproject.toml
	$(VENV)
	@echo "Installing what training and serving need into .venv: torch, transformers, fastapi, tensorboard, matplotlib"
	@echo "and what these need: 59 packages, 1.3 GB with a torch without CUDA."
	$(TORCH)
	@$(INSTALL) -e '.[hf,serve,tensorboard,plot]' -c requirements-dev.txt $(SHOWN)
	@touch $@

train: $(if $(wildcard $(READY)),$(READY),$(READY_TRAIN))
	$(BIN)/colossalai run --nproc_per_node $(NPROC) examples/gpt/train.py --config examples/gpt/config.py $(TRAIN_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo "$(BIN)/mypy, and beside it the tests of layers and surface"
	@log=$$(mktemp); types=0; rules=0; \
	$(BIN)/mypy > "$$log" 2>&1 & job=$$!; \
	$(PYTEST) -m "not long" tests/layers tests/surface || rules=$$?; \
	wait "$$job" || types=$$?; \
	cat "$$log"; rm "$$log"; \
	exit $$((rules != 0 ? rules : types))

test: check
	@$(BIN)/python -m compileall -q colossalai tests
	$(PYTEST) $(WORKERS) -m "not cluster and not long" --ignore=tests/checkpoint_io/test_matrix.py \
		--ignore=tests/layers --ignore=tests/surface

long: setup
	$(PYTEST) $(WORKERS) -m long --ignore=tests/checkpoint_io/test_matrix.py

test-all: test long gloo matrix cluster

# Jobs of tests talk through shared memory; here those whose numbers matter talk over gloo.
gloo: setup
	TESTS_BACKEND=gloo $(PYTEST) $(WORKERS) -m "dist and not cluster and not long" tests/parity \
		tests/zero/test_*.py tests/compat/test_{zero,gemini}_wrappers.py tests/communication/test_*.py tests/pipeline/execution tests/nn/layer

soak: setup
	SOAK=1 PYTEST_ADDOPTS="-o faulthandler_timeout=10800" $(PYTEST) --silence=14400 $(WORKERS) -m soak
	$(BIN)/python benchmarks/soak.py

matrix: setup
	FULL_MATRIX=1 $(PYTEST) $(WORKERS) tests/checkpoint_io/test_matrix.py tests/checkpoint_io/test_experts.py

# To collect all others takes 15 s.
cluster: setup
	$(PYTEST) -m cluster -rs $$(grep -rl 'mark\.cluster' tests --include='test_*.py' | sort)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without an accelerator the tests skip themselves and say why. One process for each accelerator runs the benchmarks.
gpu: setup
	$(BIN)/python -m pytest -m gpu -rs
	@mkdir -p benchmarks/results
	@devices=$$($(BIN)/python -c 'import torch; print(torch.accelerator.device_count())'); \
	if [ "$$devices" = 0 ]; then \
		echo "benchmarks skipped: torch.accelerator.device_count() is 0"; \
	else \
		for script in benchmarks/*.py; do \
			$(BIN)/colossalai run --nproc_per_node $$devices $$script --json benchmarks/results/$$(basename $$script .py).json; \
		done; \
	fi

clean:
	rm -rf build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
