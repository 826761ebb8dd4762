# make demo       trains a model on real images on all devices (or 8 simulated ones)
# make test       runs the tests, but for the slowest
# make test-all   runs all of them
# make lint       checks format, style and types
# make bench      runs the benchmarks and writes the page of figures: 20 minutes, alone on
#                 the machine (QUICK=1: 5 minutes; CHECK=1: fails if something got slower)
# make docs       builds the site, build/site/index.html
# make dist       builds the package and tries it in an empty environment (dist-extras)
# make fuzz       calls all public names with odd arguments (CALLS=10000, SEED=now)
# Each sets up $(VENV) first; nothing but Python 3.11 or newer and make is needed.

PYTHON ?= python3
VENV ?= .venv
# Which JAX to install, for example JAX="jax==0.10.2"; by default the newest there is.
JAX ?= jax
# Test processes at once. Three for two cores: tests of several processes wait for each
# other, and leave a quarter of two cores idle with two (measured).
JOBS ?= 3
# Empty, so that bytecode is kept whatever the environment says: without it each test
# process takes 16 s to collect the tests and not 8, and each Python that a test starts
# compiles the package again (JAX 0.10.2, seconds of one core).
export PYTHONDONTWRITEBYTECODE =

IN_VENV = $(VENV)/bin/python
# Python compiles what is imported, a small part of what is installed.
INSTALL = $(IN_VENV) -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test test-all lint format bench docs dist dist-extras fuzz clean

demo: $(VENV)/.installed-demo
	$(IN_VENV) -m jaxstrategy.demo

# LLVM optimizes less, so that XLA compiles a training step in 0.24 s and not 0.38 s;
# XLA's own passes are those of users. `OPTIMIZE=1` compiles as users do.
test test-all: export JAX_DISABLE_MOST_OPTIMIZATIONS = $(if $(OPTIMIZE),0,1)
test: $(VENV)/.installed-test
	$(IN_VENV) -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-all: $(VENV)/.installed-test
	$(IN_VENV) -m pytest -n $(JOBS) --dist worksteal

fuzz: $(VENV)/.installed-test
	$(IN_VENV) tests/fuzz/run.py --calls $(or $(CALLS),10000) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.installed-lint
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m pyright --pythonpath $(IN_VENV)
	$(IN_VENV) -m mypy

format: $(VENV)/.installed-lint
	$(IN_VENV) -m ruff format .
	$(IN_VENV) -m ruff check --fix .

bench: $(VENV)/.installed-benchmarks
	$(IN_VENV) benchmarks/run_all.py $(if $(CHECK),--check) $(if $(QUICK),--quick) \
	  $(if $(BUSY),--busy) $(if $(OTHERS),--others-python $(OTHERS)) $(if $(ONLY),--only $(ONLY))

docs: $(VENV)/.installed-docs
	$(IN_VENV) -m sphinx --builder html --doctree-dir build/doctrees notebooks build/site

# The wheel is tried in an empty environment, and with the two extras that bring most; by
# `dist-extras` with each extra by itself, which takes minutes.
dist dist-extras: $(VENV)/.installed-dist
	rm -rf build/lib dist
	$(IN_VENV) -m build
	$(IN_VENV) -m twine check --strict dist/*
	$(IN_VENV) tests/wheel/try_wheel.py dist/*.whl $(if $(filter dist-extras,$@),--all,demo ray)

# One stamp for each extra, made again when the dependencies change.
$(VENV)/.installed-%: pyproject.toml | $(IN_VENV)
	$(INSTALL) "$(JAX)" --editable ".[$*]"
	touch $@

$(IN_VENV):
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Python 3.11 or newer is needed, this is ' + sys.version"
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache
