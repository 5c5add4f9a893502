# `make demo` and `make test` do everything on a fresh machine, the virtual environment in .venv included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without compiling all modules to bytecode, which takes longer than the rest: Python compiles what it imports, and
# must be able to keep the result, or each of the many processes that tests start compiles torch again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: demo test lint format docs clean

# What the demo needs: the core.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer: make PYTHON=python3.12 demo" if sys.version_info < (3, 11) else 0)'
	@echo "Shoal: creating a virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Shoal: installing Shoal and what it needs (torch is large, this may take minutes)"
	@$(INSTALL) -e .
	@touch $@

# What tests, linters and the documentation need on top of that. What is there already is kept.
$(VENV)/.installed: $(VENV)/.demo
	@echo "Shoal: installing what tests, linters and documentation need"
	@$(INSTALL) -e '.[dev]'
	@# A reference for tests, without what it depends on: nothing of that is called.
	@$(INSTALL) --no-deps wilds
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/shoal demo

test: lint
	$(BIN)/pytest -n auto --dist worksteal -m "not slow"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A site that loads nothing from anywhere: open site/index.html. The variable silences an announcement.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
