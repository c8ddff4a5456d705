# Everyday commands; each one sets up what it needs in .venv first. `make train` and `make test` are the ones to remember.
#
#   make train [ARGS="--steps 500"]   train a small GPT through this package
#   make test  [ARGS="-k varlen"]     run the test suite
#   make test-quick                   one test per feature, on the CPU: about 40 seconds on two cores
#   make bench-all [ARGS=--quick]     run every experiment; make bench-flash and make bench-matmul run one
#   make report                       write a page of their results
#   make emulator                     build the backend ascend-emulator (make test does, too)
#   make bench-ascend                 model the run time of the Ascend C kernels on the emulator
#   make docs                         build the site of the documentation into build/site
#   make bench-cpu, make lint, make format, make develop (build after a change), make clean
#
# PYTHON is the interpreter that .venv is made from. If it has a usable torch, .venv uses it instead of installing one.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin/python
RESULTS := runs/experiments
CPP_SOURCES := $(shell find csrc -name "*.h" -o -name "*.cpp" -o -name "*.cuh" -o -name "*.cu")
SOURCES := $(CPP_SOURCES) csrc/call/options.def csrc/cuda/table/stages.def csrc/sources.py
FORMATTED := $(CPP_SOURCES) $(shell find ascend_c tests/ascend tests/kernels tests/npu tools -name "*.h" -o -name "*.cpp")
PYTHON_SOURCES := csrc examples flashattn_ext flashattn_ext_lab tests tools setup.py
HAS_TORCH := import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))

ifeq ($(origin CXX),default)
CXX := c++
endif

# The Ascend C kernels on the emulator: one library, without torch. No FMA contraction: products and sums round separately, as
# on the hardware. All kernels of a stage and a type are compiled as one source, in a third of the time: they share most templates.
EMULATOR := flashattn_ext/_ascend_emulator.so
EMULATOR_SOURCES := $(wildcard ascend_c/*.cpp ascend_c/emulator/*.cpp)
EMULATOR_KERNELS := $(wildcard ascend_c/inst/*.cpp)
EMULATOR_GROUPS := $(sort $(foreach words,$(subst _,:,$(basename $(notdir $(EMULATOR_KERNELS)))),\
  $(firstword $(subst :, ,$(words)))_$(lastword $(subst :, ,$(words)))))
EMULATOR_OBJECTS := $(EMULATOR_SOURCES:%.cpp=build/emulator/%.o) $(EMULATOR_GROUPS:%=build/emulator/kernels/%.o)
EMULATOR_HEADERS := $(shell find ascend_c csrc -name "*.h")
EMULATOR_OPTIMISE ?= -O2 -ftree-vectorize
EMULATOR_FLAGS := -std=c++17 $(EMULATOR_OPTIMISE) -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Wextra -Iascend_c/emulator/include -Icsrc

INSTALL := -m pip install --no-build-isolation -e ".[cli,docs,hf,test]"
REBUILD := setup.py build_ext --inplace

# PyTorch's OpenMP threads spin at barriers. If other programs compete for the cores, spinning makes small models and tests
# several times slower than sleeping (up to 8x measured). Benchmarks keep the default.
train test test-quick: export OMP_WAIT_POLICY ?= passive
# tests/poison.py poisons torch's allocations; this makes the C library poison the others (std::vector, the emulator's memory).
test test-quick: export MALLOC_PERTURB_ ?= 129
# Workspaces stay in the heap when they are freed: a tenth of the processor time was the kernel's, which gave them pages again and
# again. The first is the largest value that the C library would choose itself.
test test-quick: export MALLOC_MMAP_THRESHOLD_ ?= 33554432
test test-quick: export MALLOC_TRIM_THRESHOLD_ ?= 536870912
# Parallel test processes, which take one file at a time. Each loads its own torch: more than a few exhaust the memory. A process
# that crashes ends the run, because pytest-xdist may wait forever for the tests of a crashed one.
WORKERS ?= 2
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

.PHONY: train test test-quick bench-cpu bench-flash bench-matmul bench-all bench-ascend report docs lint format develop emulator emulator-objects clean

train: $(VENV)/built
	$(BIN) -m flashattn_ext train $(ARGS)

test: $(VENV)/built $(EMULATOR)
	$(BIN) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 tests $(ARGS)

test-quick: $(VENV)/built
	$(BIN) -m pytest -q -n $(WORKERS) --dist loadfile --device cpu @tests/quick.txt $(ARGS)

bench-cpu: $(VENV)/built
	$(BIN) -m flashattn_ext bench cpu $(ARGS)

bench-flash: $(VENV)/built
	$(BIN) -m flashattn_ext experiments scaling --out $(RESULTS) $(ARGS)

bench-matmul: $(VENV)/built
	$(BIN) -m flashattn_ext experiments matmul --out $(RESULTS) $(ARGS)

bench-all: $(VENV)/built
	$(BIN) -m flashattn_ext experiments all --out $(RESULTS) $(ARGS)

report: $(VENV)/built
	$(BIN) -m flashattn_ext report $(RESULTS)

bench-ascend: $(VENV)/built $(EMULATOR)
	$(BIN) -m flashattn_ext bench ascend-emulator $(ARGS)

# mkdocs is strict: it fails at broken links and anchors, pages missing in the navigation, and documented arguments that do
# not exist.
docs: $(VENV)/built
	$(BIN) tools/check_reference.py
	$(BIN) tools/draw_masks.py
	NO_MKDOCS_2_WARNING=1 $(BIN) -m mkdocs build

lint: $(VENV)/built
	$(BIN) -m ruff check $(PYTHON_SOURCES)
	$(BIN) -m ruff format --check $(PYTHON_SOURCES)
	$(BIN) -m mypy
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)

format: $(VENV)/built
	$(BIN) -m ruff check --fix $(PYTHON_SOURCES)
	$(BIN) -m ruff format $(PYTHON_SOURCES)
	$(VENV)/bin/clang-format -i $(FORMATTED)

develop: $(VENV)/built

emulator: $(EMULATOR)

# It compiles on all cores, also if make itself was called without -j.
$(EMULATOR): $(EMULATOR_SOURCES) $(EMULATOR_KERNELS) $(EMULATOR_HEADERS)
	$(MAKE) $(if $(findstring -j,$(MAKEFLAGS)),,-j $(JOBS)) emulator-objects
	$(CXX) -shared $(EMULATOR_OBJECTS) -o $@

emulator-objects: $(EMULATOR_OBJECTS)

build/emulator/%.o: %.cpp $(EMULATOR_HEADERS)
	mkdir -p $(@D)
	$(CXX) $(EMULATOR_FLAGS) -c $< -o $@

# forward_bf16, say: forward_bf16.cpp, forward_mask_bf16.cpp, ...
build/emulator/kernels/%.o: $(EMULATOR_KERNELS) $(EMULATOR_HEADERS)
	mkdir -p $(@D)
	printf '#include "%s"\n' $(wildcard ascend_c/inst/$(subst _,*_,$*).cpp) | $(CXX) $(EMULATOR_FLAGS) -I. -x c++ -c - -o $@

clean:
	rm -rf $(VENV) build dist *.egg-info flashattn_ext/_*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Debian's Python lacks ensurepip, so the pip of $(PYTHON) installs pip into the environment. A $(PYTHON) without pip falls
# back to ensurepip.
$(VENV)/created:
	rm -rf $(VENV)
	$(PYTHON) -m venv --without-pip $$($(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null && echo --system-site-packages) $(VENV)
	$(PYTHON) -m pip --python $(BIN) install -q pip || $(BIN) -m ensurepip
	$(BIN) -m pip install -q "setuptools>=64" wheel ninja
	$(BIN) -c '$(HAS_TORCH)' 2>/dev/null || $(BIN) -m pip install $(TORCH)
	touch $@

# A full installation at first and after changes of the packaging; an incremental build after changes of sources.
$(VENV)/built: $(VENV)/created setup.py pyproject.toml $(SOURCES)
	$(BIN) $(if $(filter-out $(SOURCES),$?),$(INSTALL),$(REBUILD))
	touch $@
