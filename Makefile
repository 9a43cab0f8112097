# Every target sets up .venv by itself: Python 3.10 or newer and a C++ compiler are all it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INTEGRATIONS := $(VENV)/.integrations

LIGHT_TESTS := $(BIN)/pytest -q -n auto --dist worksteal --ignore=tests/integrations
# One after another: each engine wants the machine for itself. Cut off from the network: some of
# what they start listens on every interface.
INTEGRATION_TESTS := $(BIN)/python tests/loopback_only.py $(BIN)/pytest -q --durations 10 \
  tests/integrations
# What `make check` leaves to `make test`; pytest says how many those are.
NOT_LONG := -m 'not long'
# Bytecode is made when it is first needed, and kept: most of what these packages hold never is.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

.PHONY: help check test test-light test-integrations demo bench sanitize clean

help:
	@echo "make check     lint, types and all tests but the longest: what CI runs"
	@echo "make test      all tests; test-light, test-integrations: a part of them"
	@echo "make demo      a real RL run: one trainer, two rollout workers, every version proven"
	@echo "make bench     sizes and speeds on this machine; ARGS='--quick' for a short one"
	@echo "make sanitize  the hostile inputs again, under address and undefined-behaviour sanitizers"
	@echo "make clean     remove everything that was made"

check: $(INTEGRATIONS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(LIGHT_TESTS) $(NOT_LONG)
	$(INTEGRATION_TESTS) $(NOT_LONG)

test: $(INTEGRATIONS)
	$(LIGHT_TESTS)
	$(INTEGRATION_TESTS)

test-light: $(INSTALLED)
	$(LIGHT_TESTS)

test-integrations: $(INTEGRATIONS)
	$(INTEGRATION_TESTS)

demo: $(INSTALLED)
	$(BIN)/weightwire demo $(ARGS)

bench: $(INSTALLED)
	$(BIN)/weightwire bench codec $(ARGS)

sanitize:
	PYTHON=$(PYTHON) sh attacks/sanitize.sh

clean:
	rm -rf $(VENV) build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests attacks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

# Editable, so that Python changes count at once; changed native sources are built anew.
$(INSTALLED): pyproject.toml CMakeLists.txt $(wildcard native/*.h native/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Weightwire needs Python 3.10 or newer: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

# Real trainers and engines, into the same environment. vLLM names three packages it only needs for
# pictures and sound; their builds for the CPU do not fit its torch, and are taken out again.
$(INTEGRATIONS): $(wildcard requirements/*.txt) $(INSTALLED)
	$(PIP_INSTALL) -r requirements/integrations.txt
	$(PIP_INSTALL) --no-deps -r requirements/verl.txt
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@
