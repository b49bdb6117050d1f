# Two commands do everything: `make run` shows the product, `make test` checks it.
# Each makes its own .venv from constraints.txt; only Python 3.10+ and make must be there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RANKS  ?= 2

.PHONY: run test full soak lint types unit generate compat clean

run: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" RANKS=$(RANKS) sh docs/demo.sh

test: lint types unit

full: lint types
	$(MAKE) unit PYTEST_ARGS="-m ''"

# Random faults, start after start; the seed is printed, and SOAK_ARGS="--seed N" runs it again.
soak: $(STAMP)
	$(BIN)/python -m tests.distributed.soak $(SOAK_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not full" $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

generate: $(STAMP)
	$(BIN)/python docs/generate.py

compat: $(STAMP)
	$(BIN)/python -m tests.contract.releases --write

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		coverage hypothesis mypy pytest pytest-cov pytest-timeout ruff hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
