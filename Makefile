# Every target sets up what it needs. PYTHON is only used to make the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup check format settings docs test test-all test-fast demo bench peers clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(READY) ## make the environment in .venv

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("driftpoint needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[deepspeed,demo,dev]'
	@touch $@

check: $(READY) ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

settings: $(READY) ## write the settings' page and schema anew, from the models
	$(BIN)/python -m tests.support.settings_page

docs: $(READY) ## the documentation, as web pages in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: $(READY) ## every guarantee at least once; at most 12 minutes on two cores
	$(BIN)/python -m tests

test-all: $(READY) ## every test; SKIP_CORE=1 leaves out what `make test` runs
	$(BIN)/python -m tests --all $(if $(SKIP_CORE),--skip-core)

test-fast: $(READY) ## the tests that take seconds
	$(BIN)/python -m pytest -q -m 'not slow and not distributed' -n logical

demo: $(READY) ## train, kill a rank, watch the job resume; under five minutes
	$(BIN)/python -m examples.demo

bench: $(READY) ## the benchmarks, each against its goal
	$(BIN)/python benchmarks/save.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/recover.py
	$(BIN)/python benchmarks/drift.py
	$(BIN)/python benchmarks/merge.py
	$(BIN)/python benchmarks/encoding.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/scaling.py

peers: $(READY) ## others beside Driftpoint, each in an environment of its own; writes docs/benchmarks/peers.md
	$(BIN)/python benchmarks/peers.py --page docs/benchmarks/peers.md

clean: ## remove the environment and what demos and tests left
	rm -rf $(VENV) .venv-peers site demo-output driftpoint-checkpoints .mypy_cache .ruff_cache .pytest_cache .hypothesis
