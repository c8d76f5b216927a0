# `make demo` and `make test` work in a clean clone: they first create a virtual environment, install
# the pinned packages and build the C++ part. `make help` lists the other targets. Variables:
#
#   PYTHON=/path/to/python3   Python interpreter (default: the newest usable one, 3.11 or later)
#   VENV=folder               virtual environment (default .venv). VENV=none uses PYTHON without a
#                             virtual environment, downloads nothing, and builds the C++ part with
#                             CMake into build/tree
#   TESTS="tests/grammar"     folder or file of the tests to run (default: all tests)
#   PYTEST="-x -k name"       additional options for pytest
#   GRAFT_DEVICE=auto|cuda|soft
#                             device of the targets demo and demo-llm (default auto), test-cuda and
#                             gpu (default cuda)
#   GPU="--sections gaps --out FOLDER"
#                             options for `make gpu`

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
# Let Python write bytecode files even if the environment disables that, because the tests start
# hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
# If pytest-xdist is installed, run the tests in parallel: with one process more than there are cores,
# because some tests wait, but with at most 9 processes. The tests of a file run in one process.
# PYTEST="-n 0" runs all tests in one process.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PARALLEL = $(if $(shell $(PY) -c "import xdist" 2>&1),, \
  -n $(shell expr $(CORES) + 1) --maxprocesses 9 --dist loadfile --no-loadscope-reorder)
RUN_TESTS = $(PY) -m pytest $(TESTS)

BOOTSTRAP = @python=$$(sh tools/find_python.sh $(PYTHON)) && "$$python" tools/bootstrap.py $(VENV)

.PHONY: help setup packages native demo demo-llm docs test test-full test-sanitize soak test-cuda \
  gpu lint clean test-ptx

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## create .venv, install the pinned packages and build the C++ part, where out of date
ifeq ($(VENV),none)
	@$(PY) tools/tree.py --build
else
	$(BOOTSTRAP)
endif

packages: # create the virtual environment without building the C++ part
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

demo-llm: setup ## run the demo with SmolLM2-135M-Instruct (downloads 93 MB once)
	@$(if $(GRAFT_DEVICE),GRAFT_DEVICE=$(GRAFT_DEVICE)) $(PY) -m graft.tools.cli demo --llm

docs: setup ## write the API reference as HTML to build/docs
	@GRAFT_DEVICE=soft $(PY) -m graft.tools.docs

test: setup ## run the tests of at most a minute each, on the soft device; 7 minutes on 2 cores, 10 the first time
	@GRAFT_DEVICE=soft $(RUN_TESTS) $(PARALLEL) $(PYTEST)

test-full: setup ## run all tests but the endurance tests, on the soft device
	@GRAFT_DEVICE=soft $(RUN_TESTS) --full -o faulthandler_timeout=3600 $(PYTEST)

soak: setup ## run the endurance tests, on the soft device
	@GRAFT_DEVICE=soft $(RUN_TESTS) --soak -o faulthandler_timeout=0 $(PYTEST)

test-sanitize: setup ## stress the C++ part under address, undefined-behavior and thread sanitizers
	@GRAFT_DEVICE=soft $(PY) -m pytest tests/cudagraph/test_sanitize.py --full $(PYTEST)

# Tests that run kernels, for each architecture for which NVRTC compiles them. The warps run in a
# random order, and races are detected.
PTX_TESTS = $(addprefix tests/models/test_, kernel_library.py attention.py fp8.py llama.py eagle3.py \
  dflash.py mtp.py tensor_core_rounds.py row_invariance.py programmatic.py draft_row_assignment.py) \
  $(addprefix tests/sampling/test_, mask_apply.py adjust.py draft.py target.py verify.py tree.py \
  parts.py) $(addprefix tests/cudagraph/test_, mailbox.py conditional.py) \
  tests/grammar/test_device_automata.py
# Tests that need not run for each architecture: incorrect kernels, bits, other compilers, engines.
PTX_ONCE = $(wildcard tests/softcuda/test_ptx*.py) tests/models/test_engine_ptx.py
PTX_ARCHITECTURES ?= 80 90 100
PTX_OPTIONS = --ptx -o faulthandler_timeout=900 \
  -k "not (any_blocks_per_row and (128256 or 49152))" $(PARALLEL) $(PYTEST)

test-ptx: setup ## run the tests of kernels on the PTX that NVRTC generates, on the soft device
	@for arch in $(PTX_ARCHITECTURES); do \
	  echo "compute_$$arch"; \
	  GRAFT_DEVICE=soft GRAFT_CODE=ptx GRAFT_PTX_ARCH=$$arch SOFTCUDA_PTX_SEED=1 \
	    SOFTCUDA_RACECHECK=1 $(PY) -m pytest $(PTX_TESTS) $(PTX_OPTIONS) || exit 1; \
	done
	@GRAFT_DEVICE=soft $(PY) -m pytest $(PTX_ONCE) $(PTX_OPTIONS)

test-cuda: setup ## run the tests on a GPU (on a machine without network: VENV=none)
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(RUN_TESTS) $(PYTEST)

gpu: setup ## check and measure a GPU in at most 8.3 minutes; GPU="--sections suite" runs the tests instead
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(PY) -m graft.tools.gpu_first $(GPU)

lint: packages ## check the code with ruff, mypy and clang-format
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) tools/tree.py
	@MYPYPATH=build/tree $(PY) -m mypy build/tree/graft
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -r $(CLANG_FORMAT) --dry-run --Werror

clean: ## remove everything that the targets created, including .venv
	rm -rf build .pytest_cache .mypy_cache .ruff_cache $(if $(filter .venv,$(VENV)),.venv)
