# make demo: fine-tune a real language model. make check, make test, make bench-smoke: what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
JOBS ?= 2
# tests run in a random order: another one for each commit, the same one each time for that commit
SEED ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 1)
PYTEST := WHET_OFFLINE=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --randomly-seed=$(SEED) --durations=15

.PHONY: demo test test-slow bench-smoke check format clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed-dev
	$(BIN)/whet pull smollm2-135m-instruct
	$(PYTEST) -m "not slow" -n $(JOBS)

test-slow: $(VENV)/installed-dev
	$(BIN)/whet pull smollm2-135m-instruct
	$(PYTEST) -m slow

bench-smoke: $(VENV)/installed-dev
	$(BIN)/whet pull smollm2-135m-instruct
	WHET_OFFLINE=1 HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.cpu --smoke

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing whet into $(VENV) (about a minute)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the tools for tests and checks into $(VENV)"
	@$(PIP) --editable ".[dev]"
	@touch $@
