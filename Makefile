# Everything runs in .venv, which is made and kept up to date by the targets themselves. Needs Python >= 3.11 with venv, git, and no root.
#
#   make test    checks (ruff, mypy, import contracts, buf) and all tests
#   make demo    a daemon and an engine on this machine, in a minute
#   make lint    the checks alone
#   make proto   regenerate offloadd/v1 from protos/
#   make bench   every benchmark
#   make torture tests of promises with the counts of a night, hours; PROMISES="P6 P11" runs some, SHARE=0.1 a tenth of the counts
#   make report  bench/results/report.html of what `make bench` wrote
#   make clean   remove what was built and cached; `make distclean` removes .venv as well
#
# PYTHON=python3.12 chooses the interpreter, PYTEST_ARGS="-k name" narrows the tests.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The first one that is new enough: `python3` of an older release often has newer ones installed beside it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PYTEST_ARGS ?=
PROMISES ?=
SHARE ?= 1
PROTOS := $(wildcard protos/offloadd/v1/*.proto)
BENCHES = $(basename $(notdir $(shell grep -l 'with benchmark(' bench/*.py 2>/dev/null)))

EXTRAS_run :=
EXTRAS_test := [test]
EXTRAS_bench := [bench]
TAKES_run := less than a minute
TAKES_test := some minutes the first time: PyTorch alone is 0.2 to 3 GB, depending on the build that is offered
TAKES_bench := less than a minute

.PHONY: help test torture demo lint pytest proto bench report clean distclean

help:
	@sed -n '3,12s/^# \{0,1\}//p' Makefile

# Sub-makes, so that the checks fail before the long part starts, also under -j.
test:
	@$(MAKE) lint
	@$(MAKE) pytest

pytest: $(VENV)/.installed-test
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

torture: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -v --torture "$(SHARE)" --promises "$(PROMISES)" $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	@echo "checks: ruff, mypy --strict, import contracts, buf"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "ruff format would change files: run $(BIN)/ruff format" >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@out=$$($(BIN)/lint-imports 2>&1) || { echo "$$out" >&2; exit 1; }
	@$(BIN)/buf lint protos

demo: $(VENV)/.installed-run
	@$(BIN)/offloadd demo

proto: $(VENV)/.installed-test
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

bench: $(VENV)/.installed-bench
	@test -n "$(BENCHES)" || { echo "bench/ holds no benchmark" >&2; exit 1; }
	@for name in $(BENCHES); do echo "== $$name"; $(BIN)/python -m bench.$$name; done

report: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.html bench/results/*.json -o bench/results/report.html

clean:
	@rm -rf build dist .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) *.egg-info

# One stamp a set of extras. It is older than pyproject.toml or constraints.txt when a dependency changed, and than a C source when that is to be built again.
$(VENV)/.installed-%: pyproject.toml setup.py $(wildcard offloadd/transfer/*.c) constraints.txt tests/standin/requirements.txt | $(BIN)/pip
	@echo "installing offloadd$(EXTRAS_$*) into $(VENV): $(TAKES_$*)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS_$*)'
	@test $* != test || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/standin/requirements.txt
	@touch $@

# Debian and Ubuntu split ensurepip off into a package of its own. Without it a pip of the system can fill the environment.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "offloadd needs Python 3.11 or newer: sudo apt-get install python3 python3-venv, or make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(f"offloadd needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}" if sys.version_info < (3, 11) else 0)'
	@echo "making $(VENV) with $$("$(PYTHON)" --version): a few seconds"
	@rm -rf $(VENV)
	@if "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null; then \
		"$(PYTHON)" -m venv $(VENV); \
	elif "$(PYTHON)" -m pip --version >/dev/null 2>&1 && "$(PYTHON)" -m venv --without-pip $(VENV) 2>/dev/null; then \
		"$(PYTHON)" -m pip --quiet --disable-pip-version-check --python $(BIN)/python install pip; \
	else \
		package=$$("$(PYTHON)" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
		echo "$(PYTHON) can't make virtual environments: sudo apt-get install $$package" >&2; exit 1; \
	fi
