# `make demo` and `make test` do everything on a fresh machine, the environment included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	# A reference for tests, without what it depends on: nothing of that is called.
	$(BIN)/pip install --quiet -c constraints.txt --no-deps wilds
	touch $@

demo: $(VENV)/.installed
	$(BIN)/shoal demo

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
