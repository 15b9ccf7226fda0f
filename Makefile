# PYTHON: the interpreter that .venv is made with. RECIPE: which one `make train` runs, by its configs/*.yaml of the same
# name. PRECISION, ARGS: what it passes to the recipe, as in
#     make train RECIPE=language_modeling PRECISION=fp16 ARGS="--seed 7 --number_of_epochs 3"
PYTHON ?= python3
RECIPE ?= image_classification
PRECISION ?= auto
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# A name that opens with an underscore is a helper of the benchmarks, not a benchmark.
NO_BENCHMARKS := benchmarks/_% benchmarks/gpu.py benchmarks/recipes.py benchmarks/collect_wheels.py
BENCHMARKS := $(filter-out $(NO_BENCHMARKS),$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help setup train test test-rest test-simulated test-oldest test-wheel test-all lint docs docs-serve bench gpu faults
.PHONY: clean

help:
	@echo "make setup   install into $(VENV), at the versions of constraints.txt"
	@echo "make train   train a recipe (RECIPE=$(RECIPE), PRECISION=$(PRECISION), ARGS=...)"
	@echo "make test    run the default tests, in a process per core (ARGS=...; ARGS='-n 0 ...' for one process)"
	@echo "make test-all   run all tests; make test-rest runs those that make test leaves out"
	@echo "make test-simulated   run what needs an accelerator, and many other tests, on a simulated one (needs a C++ compiler)"
	@echo "make test-oldest   run the default tests with torch $(OLDEST), the oldest that is supported"
	@echo "make test-wheel   install the wheel into an empty environment and run every recipe (ARGS='python3.10 python3.13')"
	@echo "make lint    check style, format and types"
	@echo "make docs    build the site of docs/ into build/site; make docs-serve shows it while you write"
	@echo "make bench   run every benchmark, each writes to benchmarks/results/"
	@echo "make gpu     check on a GPU what no other machine shows, with the python that has its torch (PYTHON=$(PYTHON), ARGS=...)"
	@echo "make faults  kill and damage hundreds of runs, writes benchmarks/results/faults.md (ARGS=...)"
	@echo "make clean   remove builds and caches"

setup: $(INSTALLED)

# The tests of docs/migrating/index.md take SpeechBrain, without what it depends on: PyPI's torchaudio is built for CUDA, and
# where it cannot be loaded, transformers cannot either.
# torch comes from wherever pip is set up to look: a CPU build ("2.13.0+cpu") also meets the constraint, and wins.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt -e '.[dev,recipes,report]'
	$(RUN) -m pip install -c constraints.txt --no-deps speechbrain
	touch $@

train: setup
	$(RUN) recipes/$(RECIPE)/train.py configs/$(RECIPE).yaml --precision $(PRECISION) $(ARGS)

# A process per core; worksteal keeps the tests of a file together, so that what they share is made about once.
IN_PROCESSES := -n auto --maxprocesses 8 --dist worksteal
PYTEST := $(RUN) -m pytest $(IN_PROCESSES)

test: setup
	$(PYTEST) $(ARGS)

test-rest: setup
	$(PYTEST) -m "extended and not nightly" $(ARGS)

# In processes of their own: the device, once loaded, is what torch takes for the machine's accelerator. First what needs
# one, then tests of the other folders.
test-simulated: setup
	$(PYTEST) tests/simulated_device -m "not nightly" $(ARGS)
	AMP_RECIPES_TEST_DEVICE=simulated $(PYTEST) @tests/simulated_device/existing_tests.txt $(ARGS)

# OLDEST_PYTHON: an interpreter that has this torch already, and what the tests need. By default one is made, with
# PyTorch's own build for CPUs ("+cpu"), as the usual one takes gigabytes. Where pip finds none, the tests are skipped:
# PIP_EXTRA_INDEX_URL tells pip where else to look.
OLDEST := 2.11.0
OLDEST_VENV := .venv-oldest
OLDEST_PYTHON ?= $(OLDEST_VENV)/bin/python
OLDEST_PIP = $(OLDEST_VENV)/bin/python -m pip install --retries 1 --timeout 10

test-oldest: setup
	@$(OLDEST_PYTHON) -c 'import torch; assert torch.__version__.startswith("$(OLDEST)")' 2>/dev/null \
	|| $(MAKE) --no-print-directory $(OLDEST_VENV)/.installed \
	|| { echo "skipped: torch $(OLDEST) cannot be installed here; OLDEST_PYTHON=... takes an interpreter that has it"; exit 0; }; \
	PYTHONPATH=. $(OLDEST_PYTHON) -m pytest $(IN_PROCESSES) $(ARGS)

$(OLDEST_VENV)/.installed: setup.cfg constraints.txt
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	sed 's/^torch==.*/torch==$(OLDEST)+cpu/' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_PIP) -c $(OLDEST_VENV)/constraints.txt torch
	$(OLDEST_PIP) -c $(OLDEST_VENV)/constraints.txt -e '.[dev,recipes,report]'
	$(OLDEST_PIP) -c $(OLDEST_VENV)/constraints.txt --no-deps speechbrain
	touch $@

# ARGS: interpreters, as in ARGS="python3.10 python3.13"; by default .venv's. Each gets an environment of its own.
test-wheel: setup
	$(RUN) tests/wheel/try_wheel.py $(ARGS)

test-all: setup docs
	$(PYTEST) -m "not nightly" $(ARGS)
	$(MAKE) test-simulated
	$(MAKE) test-oldest

# What a user's checker of types sees; the package's own inside is not checked.
TYPED := tests/types/recipe.py build/readme.py $(wildcard amp_recipes/templates/*/train.py)

lint: setup build/readme.py
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy $(TYPED)
	$(RUN) -m pyright --pythonpath $(RUN) $(TYPED)

build/readme.py: README.md
	@mkdir -p $(@D)
	sed -n '/^# tiny.py$$/,/^```/p' $< | sed '$$d' > $@

# In an environment of its own: docstrings are read without torch, and without the package. ruff lays out signatures.
DOCS_VENV := .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed

docs: $(DOCS_INSTALLED)
	$(DOCS_VENV)/bin/zensical build --strict --clean

docs-serve: $(DOCS_INSTALLED)
	$(DOCS_VENV)/bin/zensical serve

$(DOCS_INSTALLED): constraints.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -c constraints.txt zensical mkdocstrings mkdocstrings-python ruff
	touch $@

bench: setup
	@set -e; for benchmark in $(BENCHMARKS); do echo "== $$benchmark"; $(RUN) $$benchmark; done

# Nothing is installed: the machine may have no network. ARGS="--part right" for one part, of less than ten minutes.
gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

faults: setup
	$(RUN) tests/faults/matrix.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
