# make demo: the recipes, dense and compressed, over slow links, in a table.   make test: lint, types and tests, one of
# each kind of what takes long.   make thorough: all tests, an hour or more.   make results: the tables of the recipes
# again, hours; with quick=true, minutes.   make lowest: what meets Lightning and the other packages, in .venv_lowest,
# with the oldest versions that pyproject.toml promises; but torch, of which older builds for the CPU are not on PyPI.
PYTHON ?= python3
DATA ?= data
BIN := .venv/bin
WORKERS := 4
APART := unshare --net ip link >/dev/null 2>&1  # whether bytes are counted in a network namespace, beside other tests
unexport PYTHONDONTWRITEBYTECODE  # or each worker compiles all tests again

.PHONY: install demo results test thorough lowest lint types unit clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/python -m benchmarks.demo

results: install
	$(BIN)/python -m recipes.tables.results $(if $(quick),--quick,--data $(DATA))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
	$(APART) || $(BIN)/python -m pytest tests/collectives/test_wire.py

test: install
	$(MAKE) --no-print-directory --jobs lint types unit

thorough: test
	$(BIN)/python -m pytest -m thorough --numprocesses $(WORKERS) --dist worksteal
	$(APART) || $(BIN)/python -m pytest -m thorough tests/collectives/test_wire.py

lowest:
	test -x .venv_lowest/bin/python || $(PYTHON) -m venv .venv_lowest
	grep -oE '"[A-Za-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+' pyproject.toml | tr -d '"' | sed 's/>=/==/; s/\[[a-z]*\]//' \
		| grep -v -e '^torch=' -e '^setuptools=' > .venv_lowest/oldest.txt
	grep '^torch=' constraints.txt >> .venv_lowest/oldest.txt
	.venv_lowest/bin/python -m pip install --quiet --constraint .venv_lowest/oldest.txt --editable ".[dev]"
	.venv_lowest/bin/python -m pytest -W default tests/strategies tests/conformance tests/callbacks tests/config tests/settings

clean:
	rm -rf .venv .venv_lowest build dist *.egg-info outputs multirun
