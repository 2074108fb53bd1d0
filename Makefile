# make serve   set up and serve the built-in model        make test    set up and run the tests
# make check   format, lint, types, tidiness              make bench   measure, beside a peer where BATON_PEER_VLLM names one
PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve test check format bench clean

serve: $(READY)
	$(BIN)/baton serve --port $(PORT)

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/tidy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/baton bench compare
	$(BIN)/baton bench scheduler --sweep
	$(BIN)/baton bench scheduler --preempting
	$(BIN)/baton bench pressure
	-$(BIN)/baton bench policies --plot bench-results/policies.png   # needs a trace: BATON_TRACES

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plot]'
	touch $@

clean:
	rm -rf $(VENV)
