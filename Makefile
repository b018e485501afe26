# Everything from a fresh clone: `make serve` needs Python 3.11 or newer and make, nothing else; `make` alone lists the verbs.

PYTHON ?= python3
PORT ?= 8000
MODEL ?= bookworm
# Further options for the verb's command: make serve ARGS='--device cuda:1', make bench ARGS='engine'.
ARGS ?=
# Further options for pip: an index of your own, or one with CPU builds of torch where its CUDA libraries are of no use.
PIP_ARGS ?=

# Tests and commands start Python some hundred times: without bytecode each start compiles every module of the package again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup setup-serve setup-test serve check test test-compile test-plain test-programs test-interpret test-long test-gpu test-newest docs bench certify certify-all clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

setup: .venv/.installed ## create .venv and install tilewright into it, once

setup-test: .venv/.installed-test ## the same with what tests and checks need

setup-serve: .venv/.installed-serve ## the same with what a server needs

serve: setup-serve ## serve MODEL (bookworm) on http://127.0.0.1:PORT (8000)
	$(BIN)/tilewright serve $(MODEL) --port $(PORT) $(ARGS)

check: setup-test ## lint, formatting, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# Four runs, the longest first: two cores are then busy to the end.
test: test-plain test-programs test-interpret test-compile ## all tests; `make -j2 -Otarget test` uses two cores

# One thread each: the runs go side by side, and a tensor of a test is too small to share.
test-compile test-plain test-programs test-interpret: export OMP_NUM_THREADS := 1
# What keeps the compiler busy: every op for every card, in the order of COMPILED.
COMPILED := tests/asm tests/test_cli_asm.py
# What starts processes and waits for them: servers, trainers, ranks.
PROGRAMS := tests/server tests/host tests/simulation tests/train tests/rl tests/parallel tests/test_cli.py

test-compile: setup-test ## what kernels compile to, for cards that are not here
	$(BIN)/python -m pytest $(COMPILED) $(ARGS)

test-plain: setup-test ## the rest, but for kernels that need a GPU
	$(BIN)/python -m pytest $(COMPILED:%=--ignore=%) $(PROGRAMS:%=--ignore=%) $(ARGS)

test-programs: setup-test ## servers, trainers and commands, as whole programs
	$(BIN)/python -m pytest $(PROGRAMS) $(ARGS)

test-interpret: export TRITON_INTERPRET := 1
test-interpret: setup-test ## every kernel against its definition, in Triton's interpreter
	$(BIN)/python -m pytest tests/test_ops.py tests/kernels $(ARGS)

test-long: export OMP_NUM_THREADS := 1
test-long: setup-test ## the tests that take minutes, which `make test` leaves out, each named as it ends
	$(BIN)/python -m pytest -m long -vv --durations=30 $(ARGS)
	@# Long tests of kernels without a GPU; with one there are none, which is pytest's exit code 5.
	$(if $(ARGS),true,TRITON_INTERPRET=1 $(BIN)/python -m pytest -m long -vv tests/kernels || [ $$? = 5 ])

# With the Python that is there, and what it has: no environment is made, nothing is installed.
test-gpu: ## what only a GPU can show, in ten minutes; make test-gpu PYTHON=python3.12 ARGS='-k attention'
	$(PYTHON) scripts/test_gpu.py $(ARGS)

# The newest torch and triton of the index, with whatever else they bring, in an environment of its own.
test-newest: export OMP_NUM_THREADS := 1
test-newest: .venv-newest/.installed ## all tests with the newest torch and triton; ARGS='tests/test_ops.py' for some
	.venv-newest/bin/python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
	TRITON_INTERPRET=1 .venv-newest/bin/python -m pytest $(or $(ARGS),tests/test_ops.py tests/kernels)
	$(if $(ARGS),true,.venv-newest/bin/python -m pytest)

docs: .venv/.installed-docs ## the documentation site, into site/; fails where a link is broken
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q
	@echo "open site/index.html"

bench: setup ## measure operators or the engine: ARGS='ops', ARGS='engine'
	$(BIN)/tilewright bench $(ARGS)

certify: setup ## rewrite tilewright/asm/certificates: what every kernel and config compiles to on sm_80, 90, 100; no GPU
	$(BIN)/python scripts/certify.py $(ARGS)
	$(BIN)/python scripts/results_table.py

certify-all: setup ## the same under triton 3.6.0, 3.7.1 and 3.9.0, side by side; ARGS='softmax --spaces'
	$(BIN)/python scripts/certify_all.py $(ARGS)

clean: ## remove caches and build folders; .venv stays (to start over: rm -rf .venv)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find scripts tests tilewright -name __pycache__ -type d -prune -exec rm -rf {} +

# pip stands at the end of creating an environment, so it shows that the environment is whole.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), wanted 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot create environments; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: $(BIN)/pip pyproject.toml constraints.txt
	@echo "installing into .venv: torch is large, the first time takes minutes"
	$(INSTALL) -e .
	@touch $@

.venv/.installed-serve: .venv/.installed
	$(INSTALL) -e '.[serve,hub]'
	@touch $@

.venv/.installed-docs: .venv/.installed-serve
	$(INSTALL) -e '.[all,docs]'
	@touch $@

.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	@# The package asks for versions that were tested; here others are wanted, so it comes last and without what it asks for.
	.venv-newest/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) --upgrade torch triton numpy
	$(PYTHON) scripts/requirements.py test all | .venv-newest/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -r /dev/stdin
	.venv-newest/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .
	@touch $@

.venv/.installed-test: .venv/.installed-serve
	$(INSTALL) -e '.[all,test,dev]'
	rm -rf .data/openai-2
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) --target .data/openai-2 'openai>=2,<3' # the other major
	rm -rf .data/zoo
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) --no-deps --target .data/zoo 'timm==1.0.31' 'torchvision==0.28.0' 'pillow==13.0.0' # models of others
	@touch $@
