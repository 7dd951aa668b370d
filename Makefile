# `make run` trains the headline experiment, `make test` checks everything; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test
run: .venv/run.done
	$(BIN)/python main.py
	$(BIN)/python main_plot.py

test: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2

# The stamp lies inside .venv, so deleting .venv installs again, and so does a changed list.
.venv/run.done: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.txt
	touch $@

.venv/dev.done: requirements-dev.txt .venv/run.done
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-dev.txt
	touch $@
