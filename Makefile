# The few commands a user needs. `make demo` does everything from a fresh clone.
#
# PYTHON: an interpreter of version 3.11 or 3.12 (found by itself).
# ARGS:   options for the command behind a target, e.g. `make demo ARGS="--port 31000"`.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
	&& { echo $$p; break; }; done)
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PIP := $(BIN)/python -m pip --disable-pip-version-check install
HALF := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
DEV := pytest|pytest-timeout|pytest-xdist|execnet|hypothesis|ruff|mypy|types-PyYAML

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test tutorial mutants lint types doctor clean

help:
	@echo 'make setup    virtual environment in .venv with everything pinned'
	@echo 'make demo     serve a small model with DSPARK and without, and compare (sets up first)'
	@echo 'make serve    serve it with DSPARK and leave the server up'
	@echo 'make doctor   what is installed, which patches took, what is wrong'
	@echo 'make test     the tests;   make lint types: the other checks;   make clean: remove .venv'
	@echo 'make tutorial the commands of docs/training.md: own prompts to a served drafter of your own'
	@echo 'make mutants  faults put into a copy of the source: which test kills each (ARGS="-k name")'

setup: $(STAMP)

$(STAMP): requirements/cpu.lock requirements/install.py pyproject.toml
	@test -n "$(PYTHON)" || { echo 'setup: no Python 3.11 or 3.12 found; name one: make setup PYTHON=...'; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(GPU),0)
	@$(BIN)/python requirements/install.py
else
	@echo 'setup: NVIDIA GPU found, installing SGLang with its own pins'
	@$(PIP) -e '.[cuda]' $$(grep -E '^($(DEV))==' requirements/cpu.lock)
endif
	@touch $@
	@echo 'setup: done'

demo: setup
	@$(BIN)/dspark demo $(ARGS)

serve: setup
	@exec $(BIN)/dspark demo --serve $(ARGS)

# Both halves, whatever the first says. Two processes of one compute thread each; tests that share
# servers stay in one of them.
test: setup
ifeq ($(ARGS),)
	@$(HALF) -m 'not server' || first=failed; \
	$(HALF) --dist loadgroup -m server || second=failed; \
	echo "test: without servers $${first:-passed}, with servers $${second:-passed}"; \
	test -z "$$first$$second"
else
	@$(BIN)/python -m pytest $(ARGS)
endif

tutorial: setup
	@$(BIN)/python tools/tutorial/run.py $(ARGS)

mutants: setup
	@$(BIN)/python -m tests.mutants $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

doctor: setup
	@$(BIN)/dspark doctor $(ARGS)

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
