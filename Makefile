# make demo: fine-tune a real language model. CI runs make check, make test and make bench-smoke.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
JOBS ?= 2
# tests run in a random order that depends on the commit only
SEED ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 1)
PYTEST := WHET_OFFLINE=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --randomly-seed=$(SEED) --durations=15

# an older transformers, which vLLM and others still pin: slow tests load whet's exports with it
V4 := .venv-transformers4

.PHONY: demo test test-fast test-slow test-gpu bench-smoke check format docs extras compat clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed-dev
	$(BIN)/whet pull smollm2-135m-instruct
	$(PYTEST) -m "not slow" -n $(JOBS)

# the core, in about two minutes: numerics, data, objectives, every objective kind, structure
FAST := tests/ops tests/objectives tests/config tests/models tests/adapters tests/invariants/test_exactness.py \
	tests/recipes/test_every_kind.py tests/training/test_trainer_without_config.py tests/test_layers.py \
	tests/test_docstrings.py tests/test_site.py tests/test_api.py
test-fast: $(VENV)/installed-dev
	$(PYTEST) -m "not slow" -n $(JOBS) $(FAST)

test-slow: $(VENV)/installed-evals $(VENV)/installed-llama-cpp extras compat
	$(BIN)/whet pull smollm2-135m-instruct
	WHET_TRANSFORMERS4=$(CURDIR)/$(V4)/bin/python $(PYTEST) -m slow

# needs a GPU: kernels, and every fast path against plain torch
test-gpu: $(VENV)/installed-dev
	$(PYTEST) tests/gpu tests/invariants/test_reference_path.py

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

# check that each extra of pyproject.toml, and all of them together, resolve with constraints.txt
extras: $(VENV)/installed-dev
	@extras=$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])') && \
	for extra in $$extras "$$(echo $$extras | tr ' ' ',')"; do \
		echo "resolving whet[$$extra]"; $(PIP) --dry-run ".[$$extra]" || exit 1; \
	done

# the documentation site, in build/site; a warning is an error
docs: $(VENV)/installed-docs
	$(BIN)/python -m tools.reference --check
	$(BIN)/zensical build --strict --clean

compat: $(V4)/installed

clean:
	rm -rf $(VENV) $(V4) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

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

$(VENV)/installed-docs: $(VENV)/installed
	@echo "installing the tools for the documentation into $(VENV)"
	@$(PIP) --editable ".[docs]"
	@touch $@

# for the slow tests of benchmark tasks, which are skipped without it
$(VENV)/installed-evals: $(VENV)/installed-dev
	@echo "installing lm-evaluation-harness into $(VENV)"
	@$(PIP) --editable ".[evals]"
	@touch $@

# for the slow tests of GGUF files, which are skipped without it; there is no wheel, and compiling takes minutes
$(VENV)/installed-llama-cpp: $(VENV)/installed-dev
	@echo "compiling llama.cpp into $(VENV) (about 10 minutes on two cores)"
	@$(PIP) --editable ".[llama-cpp]"
	@touch $@

$(V4)/installed: constraints-transformers4.txt
	@echo "installing transformers 4 into $(V4)"
	@$(PYTHON) -m venv $(V4)
	@$(V4)/bin/python -m pip --disable-pip-version-check install --quiet --requirement constraints-transformers4.txt
	@touch $@
