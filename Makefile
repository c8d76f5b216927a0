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
#   GPU="--sections features --out FOLDER"
#                             options for `make gpu`

PYTHON ?=
VENV ?= .venv
TESTS ?= tests
PYTEST ?=
GRAFT_DEVICE ?=

ifeq ($(VENV),none)
  PY := $(if $(PYTHON),$(PYTHON),python3)
  CLANG_FORMAT := clang-format
  CMAKE := cmake
  GENERATOR = $(if $(shell command -v ninja),-G Ninja)
  export PYTHONPATH := $(CURDIR)/build/tree$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  CMAKE := $(VENV)/bin/cmake
  GENERATOR = -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja
endif
INTERPRETER = $(shell $(PY) -c "import sys; print(sys.executable)")
# Let Python write bytecode files even if the environment disables that, because the tests start
# hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
# If pytest-xdist is installed, run the tests in parallel: with two processes more than there are
# cores, because many tests wait for processes, servers and deadlines, but with at most 9 processes.
# The tests of a file run in one process. PYTEST="-n 0" runs all tests in one process.
CORES := $(shell getconf _NPROCESSORS_ONLN)
FIND_XDIST = from importlib.util import find_spec; print(find_spec("xdist") and "found" or "")
PARALLEL = $(if $(shell $(PY) -c '$(FIND_XDIST)' 2>/dev/null), \
  -n $(shell expr $(CORES) + 2) --maxprocesses 9 --dist loadfile --no-loadscope-reorder)
RUN_TESTS = $(PY) -m pytest $(TESTS)

.PHONY: help setup tree demo demo-llm docs charts test test-full test-sanitize soak test-cuda gpu \
  lint clean test-ptx test-strict native

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: install-test ## create .venv, build the C++ part and install what the tests need

# The targets install-* install graft itself (install-graft) or an extra of pyproject.toml.
ifeq ($(VENV),none)

configure: tree
	@$(CMAKE) -S native -B build/cuda $(GENERATOR) --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE=$(INTERPRETER)

install-%: configure
	@$(CMAKE) --build build/cuda --parallel $(CORES)
	@$(CMAKE) --install build/cuda --prefix build/tree > build/cuda/install.log

native: configure # build the native module alone, which is all that a GPU needs
	@$(CMAKE) --build build/cuda --parallel $(CORES) --target _native
	@$(CMAKE) --install build/cuda --component native --prefix build/tree > build/cuda/install.log

else

# Each step creates a file after it has succeeded, and is repeated when a file that it depends on is
# newer. Concurrent runs of make wait for each other.
install-%:
	@mkdir -p build && flock build/setup.lock $(MAKE) --silent $(VENV)/.$@

# $(call pip,ARGUMENTS) runs `pip install`, and prints the end of its output if it fails. With
# --no-compile, Python compiles only those modules that are used, when they are first imported.
pip = @$(PY) -m pip install --quiet --disable-pip-version-check --no-compile \
  --constraint constraints.txt $(1) \
  > build/pip.log 2>&1 || { tail -n 40 build/pip.log >&2; \
  echo "graft: pip failed (without network access, set VENV=none)" >&2; exit 1; }
NATIVE_SOURCES := $(shell find native -name "*.cpp" -o -name "*.h" -o -name "*.hpp" -o -name "*.S" \
  -o -name "*.txt" -o -name "*.cmake" -o -name "*.in")

$(VENV)/.create:
	@python=$$(sh tools/check_requirements.sh $(PYTHON)) && "$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.install-graft: pyproject.toml constraints.txt $(NATIVE_SOURCES) | $(VENV)/.create
	@echo "[graft] installing graft and building its C++ part (takes minutes the first time)"
	$(call pip,cmake ninja nanobind scikit-build-core)
	$(call pip,--no-build-isolation --editable .)
	@$(MAKE) --silent tree  # type checkers and editors find the packages there
	@touch $@

# XGrammar is installed without its dependencies, because its wheel depends on torch, transformers and
# triton, which graft does not use.
$(VENV)/.install-%: pyproject.toml constraints.txt | $(VENV)/.install-graft
	@echo "[graft] installing the packages of the extra '$*'"
	$(call pip,"graft-cuda[$*]")
	$(if $(filter test,$*),$(call pip,--no-deps xgrammar))
	@touch $@

endif

tree: # link the packages in build/tree, where they have the names that they have after an installation
	@mkdir -p build/tree/graft/native && find build/tree -xtype l -delete
	@ln -sfn $(addprefix ../../../,cudagraph sampling grammar models tools) build/tree/graft
	@ln -sfn $(addprefix ../../../../,$(filter-out %/__pycache__,$(patsubst %/,%,$(wildcard native/*/ \
	  native/*.py native/py.typed)))) build/tree/graft/native

demo: install-graft ## generate ten outputs in one batch, nine of them with different grammars, and verify them
	@$(if $(GRAFT_DEVICE),GRAFT_DEVICE=$(GRAFT_DEVICE)) $(PY) -m graft.tools.cli demo

demo-llm: install-graft ## run the demo with SmolLM2-135M-Instruct (downloads 93 MB once)
	@$(if $(GRAFT_DEVICE),GRAFT_DEVICE=$(GRAFT_DEVICE)) $(PY) -m graft.tools.cli demo --llm

docs: install-docs ## write the API reference as HTML to build/docs
	@GRAFT_DEVICE=soft $(PY) -m graft.tools.docs

test: setup ## run the tests of at most a minute each, on the soft device; about 5 minutes on 2 cores
	@GRAFT_DEVICE=soft $(RUN_TESTS) $(PARALLEL) $(PYTEST)

test-full: setup install-kernels install-docs install-charts install-lint ## run all tests but the endurance tests, on the soft device
	@GRAFT_DEVICE=soft $(RUN_TESTS) --full -o faulthandler_timeout=3600 $(PYTEST)

charts: install-charts ## draw the charts of the recorded results again
	@$(PY) results/plots.py

soak: setup ## run the endurance tests, on the soft device
	@GRAFT_DEVICE=soft $(RUN_TESTS) --soak -o faulthandler_timeout=0 $(PYTEST)

test-sanitize: setup ## stress the C++ part under address, undefined-behavior and thread sanitizers
	@GRAFT_DEVICE=soft $(PY) -m pytest tests/cudagraph/test_sanitize.py --full $(PYTEST)

# Tests that run kernels, for each architecture for which NVRTC compiles them. The warps run in a
# random order, and races are detected.
PTX_TESTS = $(addprefix tests/models/test_, kernel_library.py product_shares.py attention.py fp8.py \
  llama.py eagle3.py dflash.py mtp.py tensor_core_rounds.py row_invariance.py programmatic.py \
  draft_row_assignment.py) \
  $(addprefix tests/sampling/test_, mask_apply.py adjust.py draft.py target.py verify.py tree.py \
  parts.py) $(addprefix tests/cudagraph/test_, mailbox.py conditional.py) \
  tests/grammar/test_device_automata.py
# Tests that need not run for each architecture: incorrect kernels, bits, other compilers, engines,
# and the memory traffic and the machine code of the kernels.
PTX_ONCE = $(wildcard tests/softcuda/test_ptx*.py) tests/softcuda/test_nvrtc_wrapper.py \
  tests/softcuda/test_programs.py tests/cudagraph/test_load_image.py \
  tests/models/test_engine_ptx.py tests/models/test_attention_counts.py \
  tests/models/test_product_counts.py tests/sampling/test_kernel_counts.py \
  tests/cudagraph/test_nvrtc.py tests/models/test_machine_code.py
PTX_ARCHITECTURES ?= 80 90 100
PTX_OPTIONS = --ptx -o faulthandler_timeout=3600 \
  -k "not (any_blocks_per_row and (128256 or 49152))" $(PARALLEL) $(PYTEST)

test-ptx: setup install-kernels ## compile the kernels with NVRTC, and run their tests as PTX on the soft device
	@for arch in $(PTX_ARCHITECTURES); do \
	  echo "compute_$$arch"; \
	  GRAFT_DEVICE=soft GRAFT_CODE=ptx GRAFT_PTX_ARCH=$$arch SOFTCUDA_PTX_SEED=1 \
	    SOFTCUDA_RACECHECK=1 $(PY) -m pytest $(PTX_TESTS) $(PTX_OPTIONS) || exit 1; \
	done
	@GRAFT_DEVICE=soft $(PY) -m pytest $(PTX_ONCE) $(PTX_OPTIONS)

# What a GPU's driver may do and the soft device does not do by default; native/softcuda/FIDELITY.md
# describes the settings. The tests of cudagraph run with each setting, and all tests of cudagraph,
# grammar and models with two combinations.
STRICT_SETTINGS = SOFTCUDA_LAUNCH_BLOCKING=1 SOFTCUDA_FREE=immediate SOFTCUDA_LOCK_MODEL=24 \
  SOFTCUDA_BODY=serial SOFTCUDA_BODY=reverse SOFTCUDA_QUEUES=1 SOFTCUDA_ATTRIBUTE_17=20
STRICT_COMBINATIONS = \
  "SOFTCUDA_FREE=immediate SOFTCUDA_BODY=reverse SOFTCUDA_QUEUES=1 SOFTCUDA_ATTRIBUTE_17=20" \
  "SOFTCUDA_LAUNCH_BLOCKING=1 SOFTCUDA_LOCK_MODEL=24 SOFTCUDA_BODY=serial SOFTCUDA_QUEUES=1"
STRICT_OPTIONS = --ignore=tests/cudagraph/test_sanitize.py $(PARALLEL) $(PYTEST)

test-strict: setup ## run tests on a stricter soft device; about 15 minutes on 2 cores
	@for setting in $(STRICT_SETTINGS); do \
	  echo "$$setting"; \
	  env GRAFT_DEVICE=soft $$setting $(PY) -m pytest tests/cudagraph $(STRICT_OPTIONS) || exit 1; \
	done
	@for settings in $(STRICT_COMBINATIONS); do \
	  echo "$$settings"; \
	  env GRAFT_DEVICE=soft $$settings $(PY) -m pytest tests/cudagraph tests/grammar tests/models \
	    $(STRICT_OPTIONS) || exit 1; \
	done

test-cuda: setup ## run the tests on a GPU, one process per file (on a machine without network: VENV=none)
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(PY) -m graft.tools.gpu_first.runner $(TESTS) -- $(PYTEST)

gpu: $(if $(filter none,$(VENV)),tree,setup) ## check and measure a GPU in at most 9 minutes
	@GRAFT_DEVICE=$(or $(GRAFT_DEVICE),cuda) $(PY) -m graft.tools.gpu_first $(GPU)

lint: install-lint tree ## check the code with ruff, mypy, clang-format and the warnings of the C++ compiler
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy build/tree/graft
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -r $(CLANG_FORMAT) --dry-run --Werror
	@$(CMAKE) -S native -B build/lint $(GENERATOR) --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE=$(INTERPRETER) -DGRAFT_WARNINGS_ARE_ERRORS=ON
	@$(CMAKE) --build build/lint --parallel $(CORES) > build/lint/build.log || \
	  { cat build/lint/build.log >&2; exit 1; }

clean: ## remove everything that the targets created, including .venv
	rm -rf build .pytest_cache .mypy_cache .ruff_cache $(if $(filter .venv,$(VENV)),.venv)
