# Every target sets up what it needs: a virtual environment in this folder.

# The first Python >= 3.11 on PATH, unless PYTHON= names one.
NEW_ENOUGH = -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; \
  do $$p $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
EXTRAS ?= colab,plot,test
ROWS ?= day
BIN = $(VENV)/bin
QUICK_VENV = .venv-quick-$(shell $(or $(PYTHON),false) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# Large buffers in huge pages: the training step page-faults less (docs/methods.md).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: help demo tables notebooks docs reproduce test test-quick test-tpu \
  test-gpu test-eval test-browser test-foreign mutants lint clean

help:  ## Shows this.
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/installed  ## Trains p=1 and p=.5 on real text, and compares.
	$(BIN)/python -m docs.demo $(ARGS)

tables: $(VENV)/installed  ## Writes tables of documents from results/.
	@$(BIN)/python -m docs.tables $(ARGS)

notebooks: $(VENV)/installed  ## Executes colabs/: make notebooks ARGS=--only=routes
	@$(BIN)/python -m docs.notebooks $(ARGS)

docs: $(VENV)/installed  ## Builds the documents as a site, site/index.html.
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]"
	$(BIN)/python -m docs.site

reproduce: $(VENV)/installed  ## Runs claims again: make reproduce ARGS="1.1 5.1"
	@$(BIN)/python -m docs.reproduce $(ARGS)

test: $(VENV)/installed lint  ## Runs the tests; ROWS=all: all rows of long tables.
	TEST_ROWS=$(ROWS) $(BIN)/python -m pytest -n 2 --dist loadfile \
	  --no-loadscope-reorder --max-worker-restart=0 -q --durations=10

test-quick:  ## Runs a subset of the laws: make test-quick PYTHON=python3.13
	@$(MAKE) --no-print-directory VENV=$(QUICK_VENV) $(QUICK_VENV)/installed
	$(QUICK_VENV)/bin/python -m pytest -n 2 --dist loadfile \
	  --no-loadscope-reorder -q -W default -m quick

test-tpu:  ## Compiles for TPUs that are not here (libtpu, about 200 MB).
	@$(MAKE) --no-print-directory VENV=.venv-tpu EXTRAS=plot,test,tpu \
	  .venv-tpu/installed
	.venv-tpu/bin/python -m pytest -q tests/tpu

test-gpu:  ## Compiles for GPUs (CUDA plugin, 5.8 GB); runs kernels on one.
	@$(MAKE) --no-print-directory VENV=.venv-gpu EXTRAS=plot,test,cuda \
	  .venv-gpu/installed
	.venv-gpu/bin/python -m pytest -q tests/gpu
	if [ -e /dev/nvidiactl ]; then \
	  TEST_PLATFORM=cuda,cpu .venv-gpu/bin/python -m pytest -q -W default \
	    $(addprefix tests/parallel/kernels/,add_norm_test.py \
	      codec_kernels_test.py gather_rows_test.py paged_attention_test.py \
	      reduce_add_norm_test.py); \
	fi

test-eval:  ## Runs lm-evaluation-harness on local tasks (1.4 GB).
	@$(MAKE) --no-print-directory VENV=.venv-eval EXTRAS=eval,test \
	  .venv-eval/installed
	.venv-eval/bin/python -m pytest -q -W default tests/eval

test-foreign: $(VENV)/installed  ## Reads programs of other projects (6 GB).
	FOREIGN=.cache/foreign FOREIGN_PYTHON=$(PYTHON) $(BIN)/python -m pytest -q -W default tests/foreign

test-browser:  ## Looks at pages in Chromium, if it is on PATH.
	@$(MAKE) --no-print-directory VENV=.venv-browser EXTRAS=browser,test \
	  .venv-browser/installed
	.venv-browser/bin/python -m pytest -q -rs tests/browser

mutants: $(VENV)/installed  ## Plants one-line bugs: make mutants ARGS="--seed=1"
	@$(BIN)/python -m tests.mutation $(ARGS)

lint: $(VENV)/installed  ## Checks style and wording.
	$(BIN)/ruff check .
	@$(BIN)/python -m docs.prose

clean:  ## Removes virtual environments and caches, not runs/.
	rm -rf .venv .venv-tpu .venv-gpu .venv-eval .venv-browser .venv-quick-* .pytest_cache .ruff_cache build site *.egg-info

$(VENV)/installed: setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with venv on PATH; \
	name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; }
	@$(PYTHON) $(NEW_ENOUGH) || { echo "error: $(PYTHON) is not a Python >= 3.11 \
	with venv and ensurepip" >&2; exit 2; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version) (about a minute)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check \
	  -e ".[training,$(EXTRAS)]"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps \
	  "mlc-chakra>=1.0"
	@touch $@
