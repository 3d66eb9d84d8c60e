# Everything runs in .venv, which these targets make and fill themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart test test-slow test-kernels lint format types docs lock audit clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

quickstart: install
	$(BIN)/motley run

# Two processes of one thread each: more threads a process fight over the cores.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations 12

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# The kernels for GPUs, interpreted and compiled by Triton on a CPU. Skipped where there is no Triton.
test-kernels: install
	OMP_NUM_THREADS=1 $(BIN)/python .ci/kernels.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

# The documentation as a site, in build/site. A broken link or reference is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Write requirements-lock.txt: the versions in .venv, with the hashes that the package index gives.
lock: install
	$(BIN)/python .ci/lock.py

# Known vulnerabilities of the locked packages. Skipped where advisories cannot be reached.
audit: install
	$(BIN)/python .ci/audit.py

clean:
	rm -rf .venv build dist src/*.egg-info
