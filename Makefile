# Every target sets up what it needs. PYTHON is only used to make the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup check format settings docs test test-all test-fast demo bench peers gpu gpu-wheels clean

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

demo: $(READY) ## train, kill a rank, watch the job resume; under three minutes
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
	$(BIN)/python benchmarks/boxes.py

peers: $(READY) ## others beside Driftpoint, each in an environment of its own; writes docs/benchmarks/peers.md
	$(BIN)/python benchmarks/peers.py --page docs/benchmarks/peers.md

# On such a machine there is no .venv: the Python that has torch is the machine's own.
gpu: ## on a machine with a GPU: prove and measure the CUDA paths, in nine minutes, without a network
	$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py --json gpu.json $(GPU)

gpu-wheels: $(READY) ## on a machine with a network: fill .gpu-wheels, which `make gpu` installs; under 60 MiB
	rm -rf .gpu-wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --dest .gpu-wheels --constraint constraints.txt \
	    --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
	    $(foreach glibc,2_5 2_12 2_17 2_24 2_26 2_27 2_28 2_34,--platform manylinux_$(glibc)_x86_64) \
	    --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 \
	    --requirement benchmarks/gpu-wheels.txt
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --wheel-dir .gpu-wheels --constraint constraints.txt \
	    --no-deps deepspeed
	@du -sh --apparent-size .gpu-wheels
	@test $$(du -sm --apparent-size .gpu-wheels | cut -f1) -le 60

clean: ## remove the environment and what demos and tests left
	rm -rf $(VENV) .venv-peers .gpu-wheels .gpu-site gpu.json site demo-output driftpoint-checkpoints .mypy_cache .ruff_cache .pytest_cache .hypothesis
