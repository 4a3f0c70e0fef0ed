# Every target sets up what it needs; stamp files make repeated calls cost nothing.
#   make demo      run the main job          make test      C++ and Python tests
#   make demo-offload  train under a memory cap, state on NVMe
#   make demo-long  train on windows of 16,384 bytes under a memory cap, by sparse attention
#   make demo-compressed  train over two simulated nodes with and without compressed communication
#   make demo-3d   train with pipelines, tensor parallelism and ZeRO, compared with one process
#   make test-integrations  with the real transformers, DeepSpeed, Lightning, Ray and others, and the examples
#   make test-oldest-transformers  the Trainer's tests with the oldest release of transformers that is supported
#   make zoo       train models that nobody tuned to the library, compared with plain torch; a table in build/zoo.md
#   make bench     measure against peers, what has no fresh result; hours. make bench-quick: ten minutes of it
#   make sanitize  C++ tests under ASan+UBSan and TSan
#   make arm-check cross-compile the C++ tests for 64-bit Arm and run them in an emulator
#   make lint      what CI checks            make format    rewrite files to the house style
#   make cuda-check  compile the CUDA kernels; needs nvcc, no GPU
#   make gpu-check  build, test and measure on a GPU machine with $(PYTHON), which has torch; sets up nothing
#   make gpu-wheels  the packages that such a machine lacks, to carry there
#   make docs      the documentation as pages, in build/site; a broken link is an error
#   make wheel     dist/*.whl                make clean     remove what builds leave behind
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)
# Every test process imports the package and its tests: without these files each compiles them again.
export PYTHONDONTWRITEBYTECODE :=
# Ranks wait for each other much of the time, so two workers a core; each holds a pool of ranks.
TEST_WORKERS ?= $(shell jobs=$(JOBS); echo $$((jobs < 4 ? 2 * jobs : 8)))
# Spinning threads of OpenMP are slow when other processes use the cores. Files with few tests would come last, and
# those that run a page of docs/ or an example take minutes on one core.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadscope \
  --no-loadscope-reorder --durations=20

CORE_SOURCES := $(shell find csrc/core -name "*.cpp" | sort)
OP_SOURCES := $(shell find csrc/ops -name "*.cpp" | sort)
TEST_SOURCES := $(shell find csrc/tests -name "*.cpp" | sort)
HEADERS := $(shell find csrc -name "*.h" | sort)
SWAP_STORAGE_SOURCES := $(wildcard csrc/swap_storage/*.cpp)
CUDA_FILES := $(shell find csrc/cuda -name "*.cpp" -o -name "*.cu" -o -name "*.cuh" | sort)
CPP_FILES := $(CORE_SOURCES) $(OP_SOURCES) $(SWAP_STORAGE_SOURCES) $(TEST_SOURCES) $(HEADERS) $(CUDA_FILES)

SYSTEM := $(VENV)/.stamp-system
DEPENDENCIES := $(VENV)/.stamp-dependencies
EXTENSION := $(VENV)/.stamp-extension
BENCHMARK_PEERS := $(VENV)/.stamp-benchmark-peers
INTEGRATIONS := $(VENV)/.stamp-integrations
OLDEST_TRANSFORMERS := build/transformers-oldest
BITSANDBYTES := build/bitsandbytes
BROWSER := $(VENV)/.stamp-browser
DISASSEMBLER := $(VENV)/.stamp-disassembler
DOCUMENTATION := $(VENV)/.stamp-documentation
ARM := $(VENV)/.stamp-arm

.PHONY: setup test test-cpp test-python test-integrations test-oldest-transformers demo demo-offload demo-long demo-compressed demo-3d zoo bench bench-quick sanitize arm-check cuda-check gpu-check gpu-wheels lint format \
        docs wheel clean

setup: $(EXTENSION)

$(SYSTEM): scripts/system_packages.sh
	scripts/system_packages.sh $(PYTHON)
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	touch $@

$(DEPENDENCIES): $(SYSTEM) requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-dev.txt
	touch $@

$(EXTENSION): $(DEPENDENCIES) setup.py pyproject.toml zero_ext/ops/jit/toolchain.py \
              $(CORE_SOURCES) $(OP_SOURCES) $(HEADERS) $(CUDA_FILES)
	MAX_JOBS=$(JOBS) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install \
	  --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	touch $@

$(BENCHMARK_PEERS): $(EXTENSION) benchmarks/requirements-bench.txt benchmarks/requirements-8bit.txt
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --disable-pip-version-check -q \
	  --no-build-isolation -r benchmarks/requirements-bench.txt -r benchmarks/requirements-8bit.txt
	touch $@

$(INTEGRATIONS): $(EXTENSION) requirements-integrations.txt benchmarks/requirements-bench.txt
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --disable-pip-version-check -q \
	  --no-build-isolation -r requirements-integrations.txt
	touch $@

test: test-cpp test-python

test-python: setup
	$(PYTEST)

# The pages that the program writes are looked at in a browser.
$(BROWSER): scripts/system_packages.sh
	scripts/system_packages.sh $(PYTHON) chromium
	touch $@

# Not in .venv, because transformers and peft import it wherever they find it. That takes over two seconds in each
# script that a test starts with paths of its own.
$(BITSANDBYTES)/.stamp: $(EXTENSION) benchmarks/requirements-8bit.txt
	rm -rf $(BITSANDBYTES)
	$(BIN)/python -m pip install --disable-pip-version-check -q --target $(BITSANDBYTES) --no-deps \
	  -r benchmarks/requirements-8bit.txt
	touch $@

# The files right in the folder need no third-party packages: they are among the other tests.
test-integrations: $(INTEGRATIONS) $(BROWSER) $(BITSANDBYTES)/.stamp
	PYTHONPATH=$(CURDIR)/$(BITSANDBYTES) $(PYTEST) $(sort $(dir $(wildcard tests/integrations/*/*.py)))

# All else that the tests import is in .venv. This release needs an older hub and older tokenizers.
$(OLDEST_TRANSFORMERS)/.stamp: $(INTEGRATIONS)
	rm -rf $(OLDEST_TRANSFORMERS)
	$(BIN)/python -m pip install --disable-pip-version-check -q --target $(OLDEST_TRANSFORMERS) --no-deps \
	  transformers==5.3.0 huggingface_hub==1.33.0 tokenizers==0.22.2
	touch $@

test-oldest-transformers: $(OLDEST_TRANSFORMERS)/.stamp
	PYTHONPATH=$(CURDIR)/$(OLDEST_TRANSFORMERS) $(PYTEST) $(addprefix tests/integrations/transformers/test_, \
	  batch_size_search.py private_methods.py trainer_checkpoints.py training.py)

zoo: $(INTEGRATIONS)
	$(BIN)/python -m tests.zoo --report build/zoo.md

demo: setup
	$(BIN)/python examples/demo.py

demo-offload: setup
	$(BIN)/python examples/demo_offload.py

demo-long: setup
	$(BIN)/python examples/demo_long.py

demo-compressed: setup
	$(BIN)/python examples/demo_compressed.py

demo-3d: setup
	$(BIN)/python examples/demo_3d.py

bench: $(BENCHMARK_PEERS)
	$(BIN)/python -m benchmarks run

bench-quick: $(BENCHMARK_PEERS)
	$(BIN)/python -m benchmarks run --quick

# --- C++ tests, without torch: plain and under sanitizers -------------------------------------------

CPP_FLAGS := -std=c++20 -ffp-contract=off -Wall -Wextra
FLAGS_plain := -O2
# Kernels of CUDA on the host: compiling takes far longer than running them.
build/cpp/plain/tests/cuda/%.o: FLAGS_plain := -O1
FLAGS_address := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FLAGS_thread := -O1 -g -fsanitize=thread -fno-omit-frame-pointer
GTEST_SOURCES := /usr/src/googletest/googletest
GTEST_OBJECTS := build/cpp/arm/googletest/gtest-all.o build/cpp/arm/googletest/gtest_main.o
FLAGS_arm := -O2 -isystem $(GTEST_SOURCES)/include
CXX_arm := aarch64-linux-gnu-g++
TEST_OBJECTS := $(patsubst csrc/%.cpp,%.o,$(CORE_SOURCES) $(TEST_SOURCES))
# CUDA kernels are compared on the host with the CPU's, which have the same bits on Arm: not once more there.
OBJECTS_arm := $(filter-out tests/cuda/%,$(TEST_OBJECTS))

define cpp_variant
build/cpp/$(1)/%.o: csrc/%.cpp $(if $(CXX_$(1)),$(ARM),$(SYSTEM))
	@mkdir -p $$(@D)
	$(or $(CXX_$(1)),$(CXX)) $(CPP_FLAGS) $$(FLAGS_$(1)) -MMD -MP -c $$< -o $$@

build/cpp/$(1)/run-tests: $(addprefix build/cpp/$(1)/,$(or $(OBJECTS_$(1)),$(TEST_OBJECTS))) $(if $(CXX_$(1)),$(GTEST_OBJECTS))
	$(or $(CXX_$(1)),$(CXX)) $(FLAGS_$(1)) $$^ $(if $(CXX_$(1)),,-lgtest -lgtest_main) -lpthread -o $$@

-include $(patsubst %.o,build/cpp/$(1)/%.d,$(TEST_OBJECTS))
endef
$(foreach variant,plain address thread arm,$(eval $(call cpp_variant,$(variant))))

test-cpp: $(SYSTEM)
	$(MAKE) --no-print-directory -s -j$(JOBS) build/cpp/plain/run-tests
	seq 0 $$(($(JOBS) - 1)) | GTEST_TOTAL_SHARDS=$(JOBS) xargs -P $(JOBS) -I{} \
	  env GTEST_SHARD_INDEX={} build/cpp/plain/run-tests --gtest_brief=1

# The thread sanitizer needs its address ranges free, which address randomisation may take.
sanitize: $(SYSTEM)
	$(MAKE) --no-print-directory -s -j$(JOBS) build/cpp/address/run-tests build/cpp/thread/run-tests
	build/cpp/address/run-tests --gtest_brief=1
	if setarch -R true 2>/dev/null; then wrap="setarch -R"; else wrap=""; fi; \
	$$wrap build/cpp/thread/run-tests --gtest_brief=1

$(ARM): $(SYSTEM) scripts/system_packages.sh
	scripts/system_packages.sh $(PYTHON) $(CXX_arm) qemu-aarch64
	touch $@

build/cpp/arm/googletest/%.o: $(ARM)
	@mkdir -p $(@D)
	$(CXX_arm) $(FLAGS_arm) -I$(GTEST_SOURCES) -c $(GTEST_SOURCES)/src/$*.cc -o $@

# The emulator lacks seccomp, process_vm_readv and the alignment of direct transfers, which these tests need.
NOT_EMULATED := AioBackends.*:AioFile.DirectTransfers*:CrossProcessTransport.*:HostExchangeLifetime.*

arm-check: $(ARM)
	$(MAKE) --no-print-directory -s -j$(JOBS) build/cpp/arm/run-tests
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/cpp/arm/run-tests --gtest_brief=1 --gtest_filter='-$(NOT_EMULATED)'

# The toolkit's disassembler, which wheels of nvcc leave out.
$(DISASSEMBLER): $(DEPENDENCIES)
	$(BIN)/python -m pip install --disable-pip-version-check -q nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	touch $@

cuda-check: $(DISASSEMBLER)
	$(BIN)/python -m scripts.cuda_check

# GPU_CHECK holds options: make gpu-check GPU_CHECK="--suite speed --budget 500"
gpu-check:
	$(PYTHON) -m scripts.gpu_check $(GPU_CHECK)

# What a GPU machine without network lacks, as wheels for its Python, in a folder that git ignores.
GPU_PYTHON ?= 3.12
GPU_PACKAGES ?= pydantic
GPU_WHEELS := build/gpu_wheels
gpu-wheels: $(DEPENDENCIES)
	rm -rf $(GPU_WHEELS)
	$(BIN)/python -m pip download --disable-pip-version-check -q -d $(GPU_WHEELS) --only-binary=:all: \
	  --implementation cp --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $(GPU_PACKAGES)
	@echo 'Install them there with:'
	@echo '  python3 -m pip install -q --no-index --no-deps --target /tmp/site $(GPU_WHEELS)/*.whl && export PYTHONPATH=/tmp/site'

# --- Style ------------------------------------------------------------------------------------------

lint: $(DEPENDENCIES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: $(DEPENDENCIES)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP_FILES)

$(DOCUMENTATION): $(DEPENDENCIES) requirements-docs.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-docs.txt
	touch $@

docs: $(DOCUMENTATION)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: $(DEPENDENCIES)
	MAX_JOBS=$(JOBS) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel \
	  --disable-pip-version-check -q --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist *.egg-info zero_ext/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(EXTENSION)
