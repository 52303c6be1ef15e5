# make demo      from a fresh clone to the results table
# make test      the tests of every day        make test-slow  those that need minutes
# make check     ruff, mypy, import-linter
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow check

demo: $(VENV)/.installed
	$(BIN)/dynamo-rl run configs/quickstart.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m slow

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(INSTALL) --editable '.[dev]'
	@touch $@
