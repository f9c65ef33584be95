# Every target does its own set-up in .venv, made anew when the requirements change.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
# Pinned beside everything that needs torch, or pip may bring another build. On a CUDA machine: make setup TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
# Bytecode is written when a module is first imported: compiling all of what is installed would take a minute of set-up. So it must be written:
unexport PYTHONDONTWRITEBYTECODE
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := $(shell cat pyproject.toml Makefile | sha256sum | cut -c1-16)-$(TORCH)
TORCH_STAMP := $(VENV)/.torch-$(REQUIREMENTS)
STAMP := $(VENV)/.ready-$(REQUIREMENTS)
BUILT := $(VENV)/.built-$(shell cat setup.py csrc/* | sha256sum | cut -c1-16)-$(TORCH)

# The environment of rollout servers: vllm-omni pins other versions of diffusers than the trainer has.
ROLLOUT_VENV := .venv-rollout
ROLLOUT_PYTHON := $(CURDIR)/$(ROLLOUT_VENV)/bin/python
ROLLOUT_REQUIREMENTS := flowgrpo_fast/rollout/vllm_omni/requirements-cpu.txt
ROLLOUT_PACKAGES := $(ROLLOUT_VENV)/.packages-$(shell cat Makefile $(ROLLOUT_REQUIREMENTS) | sha256sum | cut -c1-16)
ROLLOUT_STAMP := $(ROLLOUT_VENV)/.ready-$(shell cat pyproject.toml Makefile $(ROLLOUT_REQUIREMENTS) | sha256sum | cut -c1-16)
VLLM := vllm==0.30.0 vllm-omni==0.30.0

.PHONY: setup setup-vllm extension deepspeed-ops browser demo test test-vllm docs lint format bench bench-quick clean

setup: $(STAMP) $(BUILT)

# torch first: under -j, as in `make test`, the kernels are compiled against it while the rest is downloaded.
$(TORCH_STAMP):
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) $(TORCH) "numpy>=2" setuptools ninja
	touch $@

# An interrupted set-up begins anew: what pip has left half written is not built upon.
$(STAMP): | $(TORCH_STAMP)
	rm -f $(TORCH_STAMP)
	FLOWGRPO_BUILD_EXT=0 $(BIN)/python -m pip install $(PIP_OPTIONS) --no-build-isolation $(TORCH) -e ".[train,dev]"
	touch $(TORCH_STAMP) $@

extension: $(BUILT)

# The compiled kernels, in place. Optional: without a compiler this says so in one line and everything else goes on.
$(BUILT): | $(TORCH_STAMP)
	rm -f flowgrpo_fast/_C*.so
	MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

setup-vllm: $(ROLLOUT_STAMP)

# With a GPU, what vllm asks for. Without, its CUDA-only requirements are left out: they would be 7 GB that nothing can use.
$(ROLLOUT_PACKAGES):
	rm -rf $(ROLLOUT_VENV)
	$(PYTHON) -m venv $(ROLLOUT_VENV)
	if command -v nvidia-smi >/dev/null; then \
	    $(ROLLOUT_PYTHON) -m pip install $(PIP_OPTIONS) setuptools $(VLLM); \
	else \
	    $(ROLLOUT_PYTHON) -m pip install $(PIP_OPTIONS) torch==2.13.0 setuptools && \
	    $(ROLLOUT_PYTHON) -m pip install $(PIP_OPTIONS) --no-deps $(VLLM) torchvision==0.28.0 && \
	    $(ROLLOUT_PYTHON) -m pip install $(PIP_OPTIONS) torch==2.13.0 -r $(ROLLOUT_REQUIREMENTS); \
	fi
	touch $@

# This package, after the trainer's environment has it: two editable installs at once would write the same metadata.
$(ROLLOUT_STAMP): $(ROLLOUT_PACKAGES) | $(STAMP)
	FLOWGRPO_BUILD_EXT=0 $(ROLLOUT_PYTHON) -m pip install $(PIP_OPTIONS) --no-build-isolation torch==2.13.0 -e ".[rollout]"
	touch $@

demo: setup
	$(BIN)/deepspeed --num_accelerators 1 flowgrpo_fast/train.py --config configs/glyphs.yaml $(ARGS)

# DeepSpeed compiles its optimizer for CPUs at its first use. For the tests, and with their compiler (tests/conftest.py): while the second environment is downloaded.
deepspeed-ops: $(STAMP)
	CXX=$(CURDIR)/tests/quick_g++ TORCH_EXTENSIONS_DIR=$(CURDIR)/build/torch_extensions DS_ACCELERATOR=cpu $(BIN)/python -c "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('CPUAdamBuilder').load()" >/dev/null

# The pages are tested in a real browser, found by the names of tests/browser.py. Without root or apt the tests that need it fail and say so.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "apt-get install chromium"; \
	    apt-get update -qq >/dev/null; DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null && exit 0; \
	fi; echo "chromium is not installed: tests of pages will fail" >&2

# Two workers of one thread each, a file to a worker: 2 cores are used well, and no test waits for another's threads.
# The two environments are made side by side, too.
test:
	$(MAKE) --no-print-directory -j5 browser lint extension deepspeed-ops setup-vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-vllm: setup setup-vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_vllm_omni*.py $(ARGS)

# The manual: site/index.html. Strict: a dead link is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tables and plots of benchmarks/results. Nothing else may run beside it: about two hours on two cores, a good part of it the 39 runs of `algorithms`.
bench: setup setup-vllm
	for table in kernels training_step advantages exchange roofline rollout step loading algorithms plot; do $(BIN)/python -m benchmarks.$$table || exit 1; done

bench-quick: setup
	$(BIN)/python -m pytest benchmarks --benchmark-enable $(ARGS)

clean:
	rm -rf $(VENV) $(ROLLOUT_VENV) build site .pytest_cache .ruff_cache .mypy_cache flowgrpo_fast/_C*.so
