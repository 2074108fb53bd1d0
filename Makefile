# make serve   set up and show it: a fleet, a dashboard    make test    set up and run the tests
# make check   format, lint, types, tidiness              make bench   measure, beside a peer where BATON_PEER_VLLM names one
# make test-gpu   the tests that need CUDA, with nothing installed   make bench-gpu   everything that is fast on a GPU, timed
# make fuzz    simulated clusters with faults for MINUTES=10, from seed FIRST_SEED=10000
# make chaos   a real fleet under load, of which instances are killed, stopped and drained, FAULTS=100 times
PYTHON ?= python3
PORT ?= 8000
MINUTES ?= 10
FIRST_SEED ?= 10000
FAULTS ?= 100
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve test test-all test-gpu check format bench bench-gpu fuzz chaos clean

serve: $(READY)
	$(BIN)/baton up --demo --router-port $(PORT)

# Two at a time: those that only compute, on one core, beside those that start processes and mostly wait for them.
COMPUTING := tests/contract tests/core tests/executor tests/kv tests/laws tests/mutations tests/parity tests/sim tests/wire

# Quick, for every change; test-all has the long ones too.
test: CHOSEN := -m "not slow"
test test-all: $(READY)
	@log=$$(mktemp); $(BIN)/python -m pytest $(CHOSEN) $(COMPUTING) >$$log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(CHOSEN) $(addprefix --ignore=,$(COMPUTING)); status=$$?; \
	wait $$beside || status=1; cat $$log; rm -f $$log; exit $$status

# On a machine whose own Python has torch with CUDA, triton and transformers: no set-up, which would bring other versions.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -c tests/gpu/pytest.ini tests/gpu

bench-gpu:
	PYTHONPATH=src $(PYTHON) -m baton.bench.gpu --json bench-results/gpu.json

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
	$(BIN)/baton bench tiers
	$(BIN)/baton bench passes
	$(BIN)/baton bench handover
	$(BIN)/baton bench store
	$(BIN)/baton bench predict
	-$(BIN)/baton bench chat-tiers                                    # needs a trace: BATON_TRACES
	-$(BIN)/baton bench policies --plot bench-results/policies.png   # needs a trace: BATON_TRACES

fuzz: $(READY)
	$(BIN)/baton sim fuzz --minutes $(MINUTES) --first-seed $(FIRST_SEED)

chaos: $(READY)
	$(BIN)/baton chaos --faults $(FAULTS)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plot,valkey]'
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mooncake]'  # not on every platform
	tools/mooncake-libraries.sh $(CURDIR)/$(VENV)
	tools/browser.sh
	touch $@

clean:
	rm -rf $(VENV)
