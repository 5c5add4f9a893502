# `make demo` and `make test` do everything on a fresh machine, the environment included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	# A reference for tests, without what it depends on: nothing of that is called.
	$(BIN)/pip install --quiet -c constraints.txt --no-deps wilds
	touch $@

demo: $(VENV)/.installed
	$(BIN)/shoal demo

test: lint
	$(BIN)/pytest -n auto --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
