PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install --constraint constraints.txt --build-constraint constraints.txt
# What pip says is shown if it fails; -q would hide which versions are in conflict.
QUIETLY = > .venv/pip.log 2>&1 || { cat .venv/pip.log >&2; exit 1; }
DEMO = .venv/.demo
INSTALLED = .venv/.installed
LAB = .venv/.lab

.PHONY: help demo test test-all check format docs notebooks lab bench wheel compat constraints clean

help:  ## List these targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO)  ## Run the demo; ARGS="..." is passed on
	$(BIN)/balanced-dp demo $(ARGS)

test: $(INSTALLED)  ## Run the fast tests; ARGS="..." goes to pytest
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m "not slow" $(ARGS)

test-all: $(INSTALLED)  ## Run all tests, also the slow ones and the notebooks
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

check: $(INSTALLED)  ## Lint, check the formatting and the types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --collect-only --quiet --quiet benchmarks

format: $(INSTALLED)  ## Format the code and sort its imports
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

# Pages link to files of the repository, so the copy has the same layout.
docs: $(INSTALLED)  ## Build the guide and the API reference into build/site, and check links
	rm -rf build/docs build/site
	mkdir -p build/docs
	cp -r *.md LICENSE benchmarks docs notebooks build/docs
	$(BIN)/mkdocs build --strict

notebooks: $(INSTALLED)  ## Run the notebooks and store their outputs
	$(BIN)/pytest --overwrite notebooks

lab: $(LAB)  ## Open the notebooks in JupyterLab; ARGS="..." is passed on
	$(BIN)/jupyter lab notebooks $(ARGS)

# The tests run away from the sources, which would be imported in place of the wheel.
wheel: $(INSTALLED)  ## Build the wheel, and test it with nothing but its dependencies installed
	rm -rf build/wheel
	$(PIP) wheel --no-deps --constraint constraints.txt --build-constraint constraints.txt \
		--wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt pip
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt \
		--group core-test build/wheel/*.whl
	cp -r *.md Makefile pyproject.toml constraints.txt benchmarks docs notebooks tests build/wheel
	cd build/wheel && venv/bin/pytest -o addopts= -n auto --dist worksteal tests $(ARGS)

# Constraints of torch's own dependencies go with its version.
compat:  ## Run the fast tests with another torch, TORCH=2.6.0, in build/compat (gigabytes)
	@test -n "$(TORCH)" || { echo 'which torch? for example: make compat TORCH=2.6.0'; exit 2; }
	mkdir -p build/compat
	sed -E '/^(torch|triton|setuptools|sympy|cuda-|nvidia-)/d' constraints.txt > build/compat/constraints.txt
	$(PYTHON) -m venv build/compat/$(TORCH)
	build/compat/$(TORCH)/bin/python -m pip install --quiet --constraint build/compat/constraints.txt pip
	build/compat/$(TORCH)/bin/python -m pip install --quiet --constraint build/compat/constraints.txt \
		--group core-test torch==$(TORCH) '.[cli]'
	build/compat/$(TORCH)/bin/python -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
	build/compat/$(TORCH)/bin/pytest -o addopts= -n auto --maxprocesses 8 --dist worksteal \
		-m "not slow" tests $(ARGS)

bench: $(INSTALLED)  ## Run the benchmarks; ARGS="..." goes to pytest
	$(BIN)/pytest benchmarks --benchmark-only $(ARGS)

# Installs what pyproject.toml asks for, in the versions of constraints.txt, when either is newer:
# first what the demo needs, then the rest. pip itself comes first of all: the one in a new
# environment may be too old for --group (25.1) and --build-constraint (25.3).
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit("balanced-dp needs Python 3.10 or newer, and $(PYTHON) is " + v + "; try: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@echo 'Installing torch and what else the demo needs in .venv: 1.1 GB and a minute or two, more with CUDA.'
	@$(PYTHON) -m venv .venv
	@$(PIP) install --constraint constraints.txt pip $(QUIETLY)
	@$(INSTALL) --editable '.[cli]' $(QUIETLY)
	@touch $@

$(INSTALLED): $(DEMO)
	@echo 'Installing the tools for tests, notebooks, checks and documentation in .venv: 0.8 GB and a minute.'
	@$(INSTALL) --group dev --editable '.[cli,hf]' $(QUIETLY)
	@touch $@

$(LAB): $(INSTALLED)
	@echo 'Installing JupyterLab in .venv: 0.1 GB and half a minute.'
	@$(INSTALL) --group lab $(QUIETLY)
	@touch $@

# uv, because it resolves for every supported Python and platform at once, from metadata alone.
# torch keeps its line, so that a large download is never a surprise: edit that line to move it.
# pip, hatchling and editables are what installing takes besides the dependencies.
constraints:  ## Resolve constraints.txt again (torch keeps its version)
	$(PYTHON) -m venv .venv/uv
	.venv/uv/bin/python -m pip install --quiet --upgrade uv
	(grep '^torch==' constraints.txt; printf '%s\n' pip hatchling editables) | \
		.venv/uv/bin/uv pip compile - pyproject.toml --group dev --group lab --extra cli --extra hf \
		--universal --python-version 3.10 --no-python-downloads --upgrade --no-annotate --quiet \
		--custom-compile-command 'make constraints' --output-file constraints.txt

clean:  ## Remove the environment, caches and build output
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
