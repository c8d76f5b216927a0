# graft's door: `make demo` and `make test` do everything in a clean clone; `make help` lists the rest.
#
#   PYTHON=/path/to/python3   the Python to build with (default: the newest usable one, 3.11 or later)
#   VENV=folder               the virtual environment (default .venv); VENV=none uses PYTHON as it is,
#                             downloads nothing and builds into build/tree with CMake directly
#   TESTS="tests/grammar"   which tests to run;  PYTEST="-x -k name" passes options on, and
#                           GPU="--sections gaps --minutes 2" those of make gpu

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
# Compiled Python is kept, whatever the shell says: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
# Processes with whole files, one more than cores, for some tests wait; at most 9, where pytest-xdist
# is. PYTEST="-n 0" runs all in one.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PARALLEL = $(if $(shell $(PY) -c "import xdist" 2>&1),, \
  -n $(shell expr $(CORES) + 1) --maxprocesses 9 --dist loadfile --no-loadscope-reorder)
RUN_TESTS = $(PY) -m pytest $(TESTS)

BOOTSTRAP = @python=$$(sh tools/find_python.sh $(PYTHON)) && "$$python" tools/bootstrap.py $(VENV)

.PHONY: help setup packages native demo demo-llm test test-full test-sanitize soak test-cuda gpu lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## build .venv, the pinned packages and the native part (what is missing or changed)
ifeq ($(VENV),none)
	@$(PY) tools/tree.py --build
else
	$(BOOTSTRAP)
endif

packages: # the virtual environment without the native part
ifneq ($(VENV),none)
	$(BOOTSTRAP) --packages-only
endif

native: ## rebuild the native part in place, even when nothing changed
ifeq ($(VENV),none)
	@$(PY) tools/tree.py --build
else
	$(BOOTSTRAP) --force-native
endif

demo: setup ## guided, speculating generation of a batch of prompts, each with its own schema
	@$(if $(GRAFT_DEVICE),GRAFT_DEVICE=$(GRAFT_DEVICE)) $(PY) -m graft.tools.cli demo

demo-llm: setup ## the same with a language model that people know (fetches 93 MB once)
	@$(if $(GRAFT_DEVICE),GRAFT_DEVICE=$(GRAFT_DEVICE)) $(PY) -m graft.tools.cli demo --llm

test: setup ## every test of at most a minute, on the soft device; about 6 minutes on 2 cores
	@GRAFT_DEVICE=soft $(RUN_TESTS) $(PARALLEL) $(PYTEST)

test-full: setup ## also what takes longer
	@GRAFT_DEVICE=soft $(RUN_TESTS) --full -o faulthandler_timeout=3600 $(PYTEST)

soak: setup ## endurance runs only
	@GRAFT_DEVICE=soft $(RUN_TESTS) --soak -o faulthandler_timeout=0 $(PYTEST)

test-sanitize: setup ## stress tests of the native parts under address, undefined and thread sanitizers
	@GRAFT_DEVICE=soft $(PY) -m pytest tests/cudagraph/test_sanitize.py --full $(PYTEST)

test-cuda: setup ## every test on CUDA hardware (no network needed: PYTHON=python3 VENV=none)
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(RUN_TESTS) $(PYTEST)

gpu: setup ## what a GPU does in ten minutes beside what was predicted (PYTHON=python3 VENV=none)
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(PY) -m graft.tools.gpu_first $(GPU)

lint: packages ## check with ruff, mypy and clang-format
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) tools/tree.py
	@MYPYPATH=build/tree $(PY) -m mypy build/tree/graft
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -r $(CLANG_FORMAT) --dry-run --Werror

clean: ## remove what the targets made, the virtual environment included
	rm -rf build .pytest_cache .mypy_cache .ruff_cache $(if $(filter .venv,$(VENV)),.venv)
