# make demo: the recipes, dense and compressed, over slow links, in a table.   make test: lint, types and tests, one of
# each kind of what takes long.   make thorough: all tests, an hour or more.   make results: the tables of the recipes
# again, hours; with quick=true, minutes.
PYTHON ?= python3
DATA ?= data
BIN := .venv/bin

.PHONY: install demo results test thorough lint types unit clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/python -m benchmarks.demo

results: install
	$(BIN)/python -m recipes.results $(if $(quick),--quick,--data $(DATA))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -m "not thorough and not alone" --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m "alone and not thorough"

test: lint types unit

thorough: test
	$(BIN)/python -m pytest -m "thorough and not alone" --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m "alone and thorough"

clean:
	rm -rf .venv build dist *.egg-info outputs multirun
