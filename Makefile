# The two commands of the README:   make demo   and   make test
# Each does the set-up it needs, in .venv, and does it again only when a file that shapes it has changed.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG := cluster_configs
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile -c $(CONFIG)/constraints.txt
HOROVOD := $(CONFIG)/horovod

# Demo and tests start Python hundreds of times: bytecode is kept, or each time would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test soak lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     set up, train real Horovod ranks under each rule, write runs/demo/quickstart.html"
	@echo "make test     set up, run the tests"
	@echo "make soak     force failures inside collectives over and over, for some minutes"
	@echo "make lint     ruff, mypy --strict, notebooks without outputs"
	@echo "make format   let ruff rewrite the sources"
	@echo "make setup    only set up .venv"
	@echo "make clean    remove .venv and caches (not the cached Horovod wheel, not runs/)"

# Horovod compiles while pip installs the rest. (The second make is what allows two jobs, whatever -j the first one had.)
setup:
	@$(MAKE) --silent --no-print-directory -j2 $(VENV)/.horovod $(VENV)/.package

# The base: all that Horovod is built against, and nothing else, so that its build can start early.
$(VENV)/.base: $(CONFIG)/constraints.txt $(HOROVOD)/requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install it, or name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c "import venv, ensurepip" 2>/dev/null || { echo "$(PYTHON) has no venv module: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch numpy -r $(HOROVOD)/requirements.txt
	@touch $@

$(VENV)/.horovod: $(VENV)/.base $(HOROVOD)/build.py
	@$(BIN)/python $(HOROVOD)/build.py
	@touch $@

$(VENV)/.package: $(VENV)/.base pyproject.toml
	@$(PIP) --no-build-isolation -e ".[dask,lab,dev]"
	@touch $@

demo: setup
	@$(BIN)/slackring demo --out runs/demo

test: setup
	@$(BIN)/python -m pytest

soak: setup
	@$(BIN)/python -m pytest -m soak

lint: $(VENV)/.package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(wildcard notebooks/*.ipynb),$(BIN)/nbstripout --verify $(wildcard notebooks/*.ipynb))

format: $(VENV)/.package
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis plugins/*.egg-info
