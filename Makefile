# Every target that runs something first makes .venv and installs the tested set into it; when
# neither pyproject.toml nor constraints.txt changed since, that step is skipped.

PYTHON   ?= python3
# Extra arguments for pip. On Linux, pip's default torch brings the CUDA libraries along; where you
# have an index of CPU builds, name it here: make demo PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
# Test processes; each uses one thread, so the number of cores to use.
WORKERS  ?= 2
PYTEST_ARGS ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := smollm2-135m

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint clean

help: ## what can be made
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: PYTHON=python3.12  PIP_ARGS='...'  WORKERS=2  PYTEST_ARGS='...'"

demo: $(STAMP) ## pull the small model, then answer prompts with and without Domino
	$(BIN)/knockon models pull $(MODEL)
	$(BIN)/python -m knockon.bench.demo

test: lint ## lint, types and every test that this machine can run
	@$(BIN)/knockon models pull $(MODEL) || \
		echo "make: $(MODEL) could not be pulled (see above); tests that need it are skipped"
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-full: $(STAMP) ## the longest comparisons on the real model, which `make test` shortens
	$(BIN)/knockon models pull $(MODEL)
	$(BIN)/python -m pytest -m full $(PYTEST_ARGS) tests/engine/test_real_model.py

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and every build output; the pulled models stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), Knockon needs 3.11 or newer; say PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@touch $@
