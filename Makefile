# With Python 3.11, 3.12 or 3.13, a C++ compiler and make, `make serve` and `make test` are the whole set-up.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := 2.13.0
MODEL ?= smollm2-135m-instruct
TEST_MODELS := smollm2-135m-instruct gemma3-270m
# Sanitized kernels take minutes to compile; name avx512 and amx too where the processor runs them.
SANITIZED_ISAS ?= portable;avx2
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(shell find csrc -type f)

.PHONY: help serve test check static sanitize sanitize-threads docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

serve: $(VENV)/.installed-serve  ## pull MODEL and serve it; ARGS="--port 9000 ..." are passed on
	$(BIN)/octavo pull $(MODEL)
	exec $(BIN)/octavo serve $(MODEL) $(ARGS)

test: static  ## everything that CI runs: checks, all tests, the black-box suite
	$(BIN)/octavo pull $(TEST_MODELS)
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: static  ## format, lint, types and the tests that need no model
	$(BIN)/python -m pytest -m "not model" $(PYTEST_ARGS)

static: $(VENV)/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# In an environment of its own, with the sanitizer's library loaded first, and the C++ one so that exceptions are seen.
sanitize: $(VENV)/.created  ## the extension's tests under the address and undefined-behaviour sanitizers
	$(PYTHON) -m venv build/sanitize
	build/sanitize/bin/python -m pip install --quiet --disable-pip-version-check \
	  --config-settings build-dir=build/sanitized --config-settings cmake.define.OCTAVO_SANITIZE=address,undefined \
	  --config-settings 'cmake.define.OCTAVO_ISAS=$(SANITIZED_ISAS)' \
	  --config-settings 'cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1' \
	  . pytest pytest-asyncio pytest-timeout safetensors
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	  build/sanitize/bin/python -m pytest tests/backends/native

# Two C++ programs over the team and a plan; the kernels are the portable ones.
sanitize-threads:  ## the thread team and the plan under the thread sanitizer
	mkdir -p build/threads
	for program in team plan; do \
	  $(CXX) -std=c++20 -O1 -g -fsanitize=thread -ffp-contract=off -pthread -Icsrc -DOCTAVO_ISA=portable -DOCTAVO_BUILDS_portable \
	    tests/native/$${program}_test.cpp csrc/core/team.cpp \
	    $$([ $$program = team ] || echo csrc/plan/*.cpp csrc/kernels.cpp csrc/cpu_features.cpp csrc/ops/*.cpp) \
	    -o build/threads/$${program}_test && build/threads/$${program}_test; \
	done

docs: $(VENV)/.installed-dev  ## write the generated pages and build the site
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove what was built, the virtual environment included
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# The exact pin goes first: resolved together with an open range, the newest build and its GPU libraries come along.
$(VENV)/.installed-torch-$(TORCH): $(VENV)/.created
	$(PIP) "torch==$(TORCH)"
	touch $@

# Editable: only the extension and the dependencies need another installation.
$(VENV)/.installed-serve: $(VENV)/.created $(BUILD_INPUTS)
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch-$(TORCH) $(BUILD_INPUTS)
	$(PIP) --editable '.[dev]'
	touch $@
