# make demo: the recipes, dense and compressed, over slow links, in a table.   make test: lint, types and tests, one of
# each kind of what takes long.   make thorough: all tests, an hour or more.   make results: the tables of the recipes
# again, hours; with quick=true, minutes.   make test-oldest: what meets Lightning and the other packages, in .venv_oldest,
# with the oldest versions that are promised; but torch, of which PyPI has no older build for the CPU: OLDEST_TORCH=2.7.0
# where pip has an index of such builds.   make test-wheel: the package as users get it, in .venv_wheel, which is new.
# make docs: the site, in site/; a warning or a dead link is an error.
PYTHON ?= python3
DATA ?= data
OLDEST_TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := .venv/bin
WORKERS := 3
APART := unshare --net ip link >/dev/null 2>&1  # whether bytes are counted in a network namespace, beside other tests
unexport PYTHONDONTWRITEBYTECODE  # or each worker compiles all tests again

.PHONY: install demo docs results test thorough test-oldest test-wheel lint types unit clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt recipes/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" -r recipes/requirements.txt
	touch $@

demo: install
	$(BIN)/python -m benchmarks.demo

results: install
	$(BIN)/python -m recipes.tables.results $(if $(quick),--quick,--data $(DATA))

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

docs: .venv/.docs
	$(BIN)/python -m tools.pages
	$(BIN)/python -m tools.dark
	$(BIN)/zensical build --strict --clean

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

test-oldest:
	test -x .venv_oldest/bin/python || $(PYTHON) -m venv .venv_oldest
	grep -ohE '(^|")[A-Za-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+' pyproject.toml recipes/requirements.txt | tr -d '"' \
		| sed 's/>=/==/; s/\[[a-z]*\]//' | grep -v -e '^torch=' -e '^setuptools=' > .venv_oldest/oldest.txt
	echo 'torch==$(OLDEST_TORCH)' >> .venv_oldest/oldest.txt
	.venv_oldest/bin/python -m pip install --quiet --constraint .venv_oldest/oldest.txt --editable ".[dev]" -r recipes/requirements.txt
	.venv_oldest/bin/python -m pytest -W default --numprocesses $(WORKERS) --dist worksteal \
		tests/strategies tests/conformance tests/callbacks tests/config tests/settings

test-wheel: install
	rm -rf dist .venv_wheel
	$(BIN)/python -m build --no-isolation >/dev/null
	$(PYTHON) -m venv .venv_wheel
	.venv_wheel/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd $$(mktemp -d) && $(CURDIR)/.venv_wheel/bin/lightning-compress compressors \
		&& $(CURDIR)/.venv_wheel/bin/lightning-compress advise --params 12.5e6 --ranks 4 --gbit 0.1 --compute-ms 77 \
		&& $(CURDIR)/.venv_wheel/bin/python $(CURDIR)/examples/plain.py

clean:
	rm -rf .venv .venv_oldest .venv_wheel build dist site *.egg-info outputs multirun
