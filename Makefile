# Everything works from a clean clone with Python 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test proof lint types bench clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/penstock demo

# Two at a time, a file of tests to each: most of them wait for processes they have started.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

proof: install
	$(BIN)/python -m pytest tests/proof -m proof -s

lint: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: install
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/data.py --gb 4 --to benchmarks/data/text
	$(BIN)/python benchmarks/reshard.py benchmarks/data/text
	$(BIN)/python benchmarks/publish.py --to benchmarks/data/scans

clean:
	rm -rf .venv build dist demo-out benchmarks/data .mypy_cache .ruff_cache .pytest_cache .hypothesis
