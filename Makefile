# `make demo` and `make test` set up everything they need in a clean clone. `make help` lists the
# other targets.
#
#   PYTHON=/path/to/python3   Python to build with (default: the newest usable one, 3.11 or later)
#   VENV=folder               virtual environment (default .venv); VENV=none uses PYTHON directly,
#                             downloads nothing and builds into build/tree with CMake
#   TESTS="tests/grammar"     tests to run
#   PYTEST="-x -k name"       options for pytest
#   GPU="--sections gaps --minutes 2"   options for `make gpu`

PYTHON ?=
VENV ?= .venv
TESTS ?= tests
PYTEST ?=
GRAFT_DEVICE ?=

ifeq ($(VENV),none)
  PY := $(if $(PYTHON),$(PYTHON),python3)
  CLANG_FORMAT := clang-format
  export PYTHONPATH := $(CURDIR)/build/tree$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
endif
# Keep bytecode, whatever the environment says: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
# With pytest-xdist, one process more than cores, because some tests wait, but at most 9. Each
# process runs whole files. PYTEST="-n 0" runs all tests in one process.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PARALLEL = $(if $(shell $(PY) -c "import xdist" 2>&1),, \
  -n $(shell expr $(CORES) + 1) --maxprocesses 9 --dist loadfile --no-loadscope-reorder)
RUN_TESTS = $(PY) -m pytest $(TESTS)

BOOTSTRAP = @python=$$(sh tools/find_python.sh $(PYTHON)) && "$$python" tools/bootstrap.py $(VENV)

.PHONY: help setup packages native demo demo-llm docs test test-full test-sanitize soak test-cuda \
  gpu lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## create .venv, install the pinned packages and build the C++ part, as far as out of date
ifeq ($(VENV),none)
	@$(PY) tools/tree.py --build
else
	$(BOOTSTRAP)
endif

packages: # the virtual environment without the C++ part
ifneq ($(VENV),none)
	$(BOOTSTRAP) --packages-only
endif

native: ## rebuild the C++ part in place, even if nothing changed
ifeq ($(VENV),none)
	@$(PY) tools/tree.py --build
else
	$(BOOTSTRAP) --force-native
endif

demo: setup ## generate ten outputs in one batch, each with a different grammar, and verify them
	@$(if $(GRAFT_DEVICE),GRAFT_DEVICE=$(GRAFT_DEVICE)) $(PY) -m graft.tools.cli demo

demo-llm: setup ## the same with SmolLM2-135M-Instruct (downloads 93 MB once)
	@$(if $(GRAFT_DEVICE),GRAFT_DEVICE=$(GRAFT_DEVICE)) $(PY) -m graft.tools.cli demo --llm

docs: setup ## write the API reference as HTML to build/docs
	@GRAFT_DEVICE=soft $(PY) -m graft.tools.docs

test: setup ## run all tests that take at most a minute, on the soft device; 6 minutes on 2 cores
	@GRAFT_DEVICE=soft $(RUN_TESTS) $(PARALLEL) $(PYTEST)

test-full: setup ## run the longer tests too
	@GRAFT_DEVICE=soft $(RUN_TESTS) --full -o faulthandler_timeout=3600 $(PYTEST)

soak: setup ## run the endurance tests only
	@GRAFT_DEVICE=soft $(RUN_TESTS) --soak -o faulthandler_timeout=0 $(PYTEST)

test-sanitize: setup ## stress the C++ part under address, undefined-behavior and thread sanitizers
	@GRAFT_DEVICE=soft $(PY) -m pytest tests/cudagraph/test_sanitize.py --full $(PYTEST)

test-cuda: setup ## run all tests on a GPU (without a network: PYTHON=python3 VENV=none)
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(RUN_TESTS) $(PYTEST)

gpu: setup ## measure a GPU for ten minutes and compare with predictions (PYTHON=python3 VENV=none)
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(PY) -m graft.tools.gpu_first $(GPU)

lint: packages ## check with ruff, mypy and clang-format
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) tools/tree.py
	@MYPYPATH=build/tree $(PY) -m mypy build/tree/graft
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -r $(CLANG_FORMAT) --dry-run --Werror

clean: ## remove everything that the targets created, including .venv
	rm -rf build .pytest_cache .mypy_cache .ruff_cache $(if $(filter .venv,$(VENV)),.venv)
