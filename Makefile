# Everything happens in .venv; stamps make repeated calls quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.DEFAULT_GOAL := help
.PHONY: help demo demo-quick test test-slow lint format system-deps clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-all ## Install into .venv and run the main job from end to end
	$(BIN)/ssd demo

demo-quick: $(VENV)/.stamp-all ## The same with a shorter comparison
	$(BIN)/ssd demo --quick

test: $(VENV)/.stamp-dev ## Run every test but the slow ones (15 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.stamp-dev ## Run the slow tests
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.stamp-dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-dev ## Bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

system-deps: ## Install what comes from the system rather than from pip (apt)
	$(SUDO) apt-get update
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends redis-server chromium

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; ok = sys.version_info >= (3, 11); \
	  sys.exit(0 if ok else f"Python {sys.version.split()[0]} is too old: the pinned packages need 3.11 or newer. Run: make PYTHON=python3.11 ...")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[all]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.stamp-all
