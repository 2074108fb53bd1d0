# make serve   set up what serves and show it: a fleet, a dashboard; TORCH=any takes a CUDA build though there is no GPU
# make test    set up what tests need too, and run them; T="PATH …" only those       make setup   only set up
# make test-long   what takes long: slow tests, then WORLDS=2000 simulated clusters, then RANDOM_WORLDS=500 from a random seed
# make test-all    both
# make check   format, lint, types, tidiness              make bench   measure, beside a peer where BATON_PEER_VLLM names one
# make test-gpu   the tests that need CUDA, with little installed   make bench-gpu   everything that is fast on a GPU, timed
# make dist    the wheel and the source archive, in dist/   make try-wheel   serve from that wheel alone, in a new environment
# make fuzz    simulated clusters with faults from a random seed, which it prints: SEEDS=2000, FIRST=random, or for MINUTES=60
# make chaos   a real fleet under load, of which instances are killed, stopped and drained, FAULTS=100 times; gaps of streams
#               are at most a second at p99
# make docs    the documentation as a site, in build/docs
PYTHON ?= python3
PORT ?= 8000
MINUTES ?=
SEEDS ?= 2000
FIRST ?= random
FAULTS ?= 100
WORLDS ?= 2000
RANDOM_WORLDS ?= 500
T ?=
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
READY_TO_SERVE := $(VENV)/.ready-serve
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Where the environment forbids bytecode, each of the hundreds of processes that tests start would compile all of Baton anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup serve dist try-wheel test test-long test-all test-gpu check format bench bench-gpu fuzz chaos clean

setup: $(READY)

serve: $(READY_TO_SERVE)
	$(BIN)/baton up --demo --router-port $(PORT)

dist: $(READY_TO_SERVE)
	rm -rf dist
	PYTHONPATH=src:. $(BIN)/python tools/build_kernels.py build/kernels
	WHEEL_KERNELS=$(CURDIR)/build/kernels $(BIN)/python -m hatchling build

try-wheel: $(READY_TO_SERVE)
	$(BIN)/python tools/try_wheel.py --python $(PYTHON)

# Three at a time, of about as many seconds each. Those that start processes mostly wait for them, and what they wait for has
# time limits: they go first. The others only compute, and take what is left of two cores.
LAWS := tests/bench tests/benchmarks tests/cli tests/core tests/fuzz tests/laws tests/mutations tests/sim tests/wire
ENGINES := tests/contract tests/docs tests/executor tests/kv tests/parity tests/surface
ELSEWHERE := tests/tidy

# Quick, for every change. T names files, folders or tests; a test that is named itself is run though it be slow.
CHOSEN := -m "not slow"
# Threads of torch that wait for each other keep both cores busy for nothing.
test: export OMP_NUM_THREADS := 1
ifneq ($(T),)
test: $(READY)
	$(BIN)/python -m pytest $(if $(findstring ::,$(T)),,$(CHOSEN)) $(T)
else
test: $(READY)
	@logs=$$(mktemp -d); status=0; \
	nice $(BIN)/python -m pytest $(CHOSEN) $(LAWS) >$$logs/laws 2>&1 & laws=$$!; \
	nice $(BIN)/python -m pytest $(CHOSEN) $(ENGINES) >$$logs/engines 2>&1 & engines=$$!; \
	$(BIN)/python -m pytest $(CHOSEN) $(addprefix --ignore=,$(LAWS) $(ENGINES) $(ELSEWHERE)) || status=1; \
	wait $$laws || status=1; wait $$engines || status=1; \
	cat $$logs/laws $$logs/engines; rm -rf $$logs; exit $$status
endif

# First, with nothing beside it, what asserts that little time passes. Then two at a time: those that start processes and mostly
# wait for them, and those that compute or install. Then worlds, which take all cores themselves.
TIMED := tests/bench tests/e2e
COMPUTING := tests/api tests/contract tests/core tests/executor tests/fuzz tests/kv tests/laws tests/mutations tests/parity \
	tests/setup tests/sim tests/wire
LONG := -m "slow and not timed" --durations=20
test-long: export OMP_NUM_THREADS := 1
test-long: $(READY)
	$(BIN)/python -m pytest -m "slow and timed" --durations=20 $(TIMED)
	@log=$$(mktemp); status=0; \
	nice $(BIN)/python -m pytest $(LONG) $(COMPUTING) >$$log 2>&1 & computing=$$!; \
	$(BIN)/python -m pytest $(LONG) $(addprefix --ignore=,$(COMPUTING)) || status=1; \
	wait $$computing || status=1; \
	cat $$log; rm -f $$log; exit $$status
	$(BIN)/baton sim fuzz --seeds $(WORLDS)
	$(BIN)/baton sim fuzz --first-seed random --seeds $(RANDOM_WORLDS)

test-all:
	$(MAKE) test
	$(MAKE) test-long

# On a machine whose own Python has torch with CUDA, triton and transformers: no set-up, which would bring other versions.
# Both need msgspec; where it is missing: pip install --target gpu-libs msgspec
test-gpu:
	PYTHONPATH=src:gpu-libs $(PYTHON) -m pytest -c tests/gpu/pytest.ini tests/gpu

bench-gpu:
	PYTHONPATH=src:gpu-libs $(PYTHON) -m baton.bench.gpu --json bench-results/gpu.json

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/tidy tests/surface/test_reference.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

BENCH := $(BIN)/python -m benchmarks

bench: $(READY)
	$(BENCH) compare
	$(BENCH) scheduler --sweep
	$(BENCH) scheduler --preempting
	$(BENCH) pressure
	$(BENCH) tiers
	$(BENCH) passes
	$(BENCH) handover
	$(BENCH) store
	$(BENCH) predict
	-$(BENCH) chat-tiers                                    # needs a trace: BATON_TRACES
	-$(BENCH) policies --plot bench-results/policies.png   # needs a trace: BATON_TRACES

fuzz: $(READY)
	$(BIN)/baton sim fuzz --first-seed $(FIRST) $(if $(MINUTES),--minutes $(MINUTES),--seeds $(SEEDS))

chaos: $(READY)
	$(BIN)/baton chaos --faults $(FAULTS) --gap-max 1

# torch first: where only a CUDA build is on offer and no GPU is here, the set-up ends before anything large is fetched. Then
# everything by its hash, and nothing that would have to be built; then what this torch needs besides, whose file differs by
# registry; then Baton itself, built by what was installed.
LOCKED := $(INSTALL) --no-deps --only-binary=:all: --require-hashes
COMPILED := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
$(READY_TO_SERVE): pyproject.toml constraints.txt requirements-serve.lock
	$(PYTHON) -m venv $(VENV)
	PYTHONPATH=src $(BIN)/python tools/torch_setup.py $(TORCH)
	$(LOCKED) -r requirements-serve.lock
	$(INSTALL) torch
	$(INSTALL) --no-deps --no-build-isolation -e .
	$(COMPILED) src || true  # pip would on one core; a few files are not meant to compile
	touch $@

$(READY): $(READY_TO_SERVE) requirements-test.lock
	$(LOCKED) -r requirements-test.lock
	$(COMPILED) || true
	tools/mooncake-libraries.sh $(CURDIR)/$(VENV)
	tools/browser.sh
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV)

# The network is needed once, for an environment of its own. To look at the site, with its search:
# python -m http.server --directory build/docs --bind 127.0.0.1
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
.PHONY: docs
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_READY)
	$(DOCS_VENV)/bin/mkdocs build --quiet --strict
	$(PYTHON) tools/docs/check_site.py build/docs

$(DOCS_READY): tools/docs/requirements.lock
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes -r $<
	touch $@
