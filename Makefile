# Every target sets up .venv by itself: Python 3.10 or newer and a C++ compiler are all it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help check test demo bench sanitize clean

help:
	@echo "make check     lint, types and tests: what CI runs"
	@echo "make test      the tests alone"
	@echo "make demo      a patch, then a trainer and two followers: in half a minute"
	@echo "make bench     sizes and speeds on this machine; ARGS='--quick' for a short one"
	@echo "make sanitize  the hostile inputs again, under address and undefined-behaviour sanitizers"
	@echo "make clean     remove everything that was made"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n auto --dist worksteal

test: $(INSTALLED)
	$(BIN)/pytest -q -n auto --dist worksteal

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

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
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@
