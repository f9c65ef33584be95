# Every target does its own set-up in .venv, made anew when the requirements change.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
# Pinned beside everything that needs torch, or pip may bring another build. On a CUDA machine: make setup TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml setup.py Makefile | sha256sum | cut -c1-16)-$(TORCH)

.PHONY: setup demo test lint format bench clean

setup: $(STAMP)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) setuptools -e ".[train,dev]"
	touch $@

demo: setup
	$(BIN)/deepspeed --num_accelerators 1 flowgrpo_fast/train.py --config configs/glyphs.yaml $(ARGS)

# Two workers of one thread each, a file to a worker: 2 cores are used well, and no test waits for another's threads.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m pytest benchmarks --benchmark-enable $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
