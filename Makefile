# Commands for users. `make demo` sets up and serves from a fresh clone.
#
# PYTHON:    an interpreter of version 3.11 or 3.12 (default: detected).
# INSTALLER: pip, or uv if it is installed: `make setup INSTALLER=uv`.
# GPU:       number of NVIDIA GPUs (default: detected); GPU=0 sets up for the CPU in spite of GPUs.
# ARGS:      options for the command of a target, e.g. `make demo ARGS="--port 31000"`.

SUITS = -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python; do \
	$$p $(SUITS) 2>/dev/null && { echo $$p; break; }; done)
INSTALLER ?= pip
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
VENV_pip = $(PYTHON) -m venv
VENV_uv = uv venv --quiet --seed --allow-existing --python $(PYTHON)
HALF := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test tutorial figures mutants fuzz lint types docs docs-reference doctor clean

help:
	@echo 'make setup    virtual environment in .venv with everything pinned'
	@echo 'make demo     serve a small model with DSPARK and without, and compare (sets up first)'
	@echo 'make serve    serve it with DSPARK and leave the server up'
	@echo 'make doctor   what is installed, which patches took, what is wrong'
	@echo 'make test     the tests;   make lint types: the other checks;   make clean: remove .venv'
	@echo 'make docs     the pages of docs/ as a site in site/;   make docs-reference: its generated pages'
	@echo 'make tutorial the commands of docs/training.md: own prompts to a served drafter of your own'
	@echo 'make figures  figures of README and pages, of this commit: hours, idle machine (ARGS="load")'
	@echo 'make mutants  faults put into a copy of the source: which test kills each (ARGS="-k name")'
	@echo 'make fuzz     50,000 generated files, cut-off writes and requests (ARGS="--cases 9000")'

setup: $(STAMP)

# The stamp is removed first and written last: an interrupted setup is never treated as complete.
$(STAMP): requirements/cpu.lock requirements/install.py pyproject.toml
	@rm -f $@
	@case $(INSTALLER) in pip) ;; uv) command -v uv >/dev/null;; *) false;; esac || { \
		echo 'setup: no installer $(INSTALLER) here; take INSTALLER=pip, or install uv'; exit 1; }
	@{ $(BIN)/python $(SUITS) && $(BIN)/python -m pip --version; } >/dev/null 2>&1 || { \
		test -n "$(PYTHON)" && $(PYTHON) $(SUITS) || { \
			echo 'setup: no Python 3.11 or 3.12$(PYTHON:%= in %) found; name one: make setup PYTHON=...'; \
			exit 1; }; \
		rm -f $(BIN)/python $(BIN)/python3*; $(VENV_$(INSTALLER)) $(VENV); }
	@$(BIN)/python requirements/install.py --installer $(INSTALLER) $(if $(filter-out 0,$(GPU)),--cuda)
	@touch $@
	@echo 'setup: done'

demo: setup
	@$(BIN)/dspark demo $(ARGS)

serve: setup
	@exec $(BIN)/dspark demo --serve $(ARGS)

# Both halves run, even if the first fails. Each process has one compute thread. A third one runs the
# load tests, which mostly wait; tests that share servers run in the same process.
test: setup
ifeq ($(ARGS),)
	@$(HALF) -n 3 -m 'not server' || first=failed; \
	$(HALF) -n 2 -m server || second=failed; \
	echo "test: without servers $${first:-passed}, with servers $${second:-passed}"; \
	test -z "$$first$$second"
else
	@$(BIN)/python -m pytest $(ARGS)
endif

tutorial: setup
	@$(BIN)/python tools/tutorial/run.py $(ARGS)

figures: setup
	@$(BIN)/python -m tools.figures $(ARGS)

mutants: setup
	@$(BIN)/python -m tests.mutants $(ARGS)

fuzz: setup
	@$(BIN)/python -m tests.fuzz $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

types: setup
	@$(BIN)/mypy

docs: setup
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo 'docs: open site/index.html'

docs-reference: setup
	@$(BIN)/python -m tools.docs.reference

doctor: setup
	@$(BIN)/dspark doctor $(ARGS)

clean:
	rm -rf $(VENV) build dist site runs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -f sglang_dspark/backends/cpu/csrc/*.so
