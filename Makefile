# Everyday commands; each one sets up what it needs in .venv first. `make train` and `make test` are the ones to remember.
#
#   make train [ARGS="--steps 500"]   train a small GPT through this package
#   make test  [ARGS="-k varlen"]     run the test suite
#   make bench-all [ARGS=--quick]     run every experiment; make bench-flash and make bench-matmul run one
#   make report                       a page of their results
#   make emulator                     build the backend ascend-emulator (make test does, too)
#   make emulator-tilings             other tilings of its forward, which the experiment `tiles` compares
#   make bench-ascend                 what the emulator's time model says about the Ascend C kernels
#   make bench-cpu, make lint, make format, make develop (build after a change), make clean
#
# PYTHON is the interpreter that .venv is made from. If it has a usable torch, .venv takes that one and installs no other.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin/python
RESULTS := runs/experiments
CPP_SOURCES := $(shell find csrc -name "*.h" -o -name "*.cpp" -o -name "*.cuh" -o -name "*.cu")
SOURCES := $(CPP_SOURCES) csrc/sources.py
FORMATTED := $(CPP_SOURCES) $(shell find ascend_c tests/ascend tests/npu tools -name "*.h" -o -name "*.cpp")
PYTHON_SOURCES := csrc examples flashattn_ext tests tools setup.py
HAS_TORCH := import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))

ifeq ($(origin CXX),default)
CXX := c++
endif

# The Ascend C kernels on the emulator: one library, without torch. No contraction: products and sums round as on the hardware.
EMULATOR := flashattn_ext/_ascend_emulator.so
EMULATOR_SOURCES := $(wildcard ascend_c/*.cpp ascend_c/inst/*.cpp ascend_c/emulator/*.cpp)
EMULATOR_OBJECTS := $(EMULATOR_SOURCES:%.cpp=build/emulator/%.o)
EMULATOR_HEADERS := $(shell find ascend_c csrc -name "*.h")
EMULATOR_OPTIMISE ?= -O2 -ftree-vectorize
EMULATOR_FLAGS := -std=c++17 $(EMULATOR_OPTIMISE) -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Wextra -Iascend_c/emulator/include

# The forward in fp16 with other tilings (rows x keys, ascend_c/tiles.h), a library each. Whatever includes tiles.h is compiled for
# each; the machine itself is the same.
TILINGS := 64x64 64x512 64x1024 128x64 128x128 128x256
TILING_LIBRARIES := $(TILINGS:%=build/tilings/_ascend_emulator_%.so)
TILING_SOURCES := ascend_c/dispatch.cpp ascend_c/inst/forward_fp16.cpp ascend_c/emulator/backend.cpp tools/other_tiling.cpp
EMULATOR_MACHINE := build/emulator/ascend_c/emulator/machine.o build/emulator/ascend_c/emulator/scheduler.o

INSTALL := -m pip install --no-build-isolation -e ".[cli,hf,test]"
REBUILD := setup.py build_ext --inplace

# PyTorch's threads spin while they wait for each other. Where other programs want the cores too, that makes small models and
# tests several times slower than sleeping does (8x seen). Benchmarks keep the default.
train test: export OMP_WAIT_POLICY ?= passive
# Processes that the tests are shared out to, a file at a time. Each holds a torch of its own: more than a few fill the memory.
WORKERS ?= 2

.PHONY: train test bench-cpu bench-flash bench-matmul bench-all bench-ascend report lint format develop emulator emulator-tilings clean

train: $(VENV)/built
	$(BIN) -m flashattn_ext train $(ARGS)

test: $(VENV)/built $(EMULATOR)
	$(BIN) -m pytest -q -n $(WORKERS) --dist loadfile tests $(ARGS)

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

lint: $(VENV)/built
	$(BIN) -m ruff check $(PYTHON_SOURCES)
	$(BIN) -m ruff format --check $(PYTHON_SOURCES)
	$(BIN) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)

format: $(VENV)/built
	$(BIN) -m ruff check --fix $(PYTHON_SOURCES)
	$(BIN) -m ruff format $(PYTHON_SOURCES)
	$(VENV)/bin/clang-format -i $(FORMATTED)

develop: $(VENV)/built

emulator: $(EMULATOR)

emulator-tilings: $(EMULATOR) $(TILING_LIBRARIES)

$(EMULATOR): $(EMULATOR_OBJECTS)
	$(CXX) -shared $^ -o $@

build/emulator/%.o: %.cpp $(EMULATOR_HEADERS)
	mkdir -p $(@D)
	$(CXX) $(EMULATOR_FLAGS) -c $< -o $@

# $(1): rows x keys
define TILING_RULES
build/tilings/_ascend_emulator_$(1).so: $(TILING_SOURCES:%.cpp=build/tilings/$(1)/%.o) $(EMULATOR_MACHINE)
	$$(CXX) -shared $$^ -o $$@

build/tilings/$(1)/%.o: %.cpp $(EMULATOR_HEADERS)
	mkdir -p $$(@D)
	$$(CXX) $(EMULATOR_FLAGS) -DFLASHATTN_EXT_ASCEND_ROWS=$(word 1,$(subst x, ,$(1))) \
	  -DFLASHATTN_EXT_ASCEND_KEYS=$(word 2,$(subst x, ,$(1))) -c $$< -o $$@
endef
$(foreach tiling,$(TILINGS),$(eval $(call TILING_RULES,$(tiling))))

clean:
	rm -rf $(VENV) build dist *.egg-info flashattn_ext/_*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The environment gets no pip of its own from ensurepip, which Debian leaves out of its Python: the pip of $(PYTHON) installs
# one from outside. A $(PYTHON) without pip falls back to ensurepip.
$(VENV)/created:
	rm -rf $(VENV)
	$(PYTHON) -m venv --without-pip $$($(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null && echo --system-site-packages) $(VENV)
	$(PYTHON) -m pip --python $(BIN) install -q pip || $(BIN) -m ensurepip
	$(BIN) -m pip install -q "setuptools>=64" wheel ninja
	$(BIN) -c '$(HAS_TORCH)' 2>/dev/null || $(BIN) -m pip install $(TORCH)
	touch $@

# The first time and when the packaging changes, a whole installation; after a change of sources, only what changed.
$(VENV)/built: $(VENV)/created setup.py pyproject.toml $(SOURCES)
	$(BIN) $(if $(filter-out $(SOURCES),$?),$(INSTALL),$(REBUILD))
	touch $@
