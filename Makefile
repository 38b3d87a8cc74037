# make demo | simulate | test | test-all | test-compile | lint | docs | show | clean. The environment is made first, in .venv, from the first Python that really runs;
# PYTHON=/path/to/python chooses one, in a .venv-X.Y of its own. ARGS are handed on: make test ARGS='-k house'.
ARGS ?=
ifdef PYTHON
  FOUND := $(shell sh scripts/find_python.sh '$(PYTHON)')
  ifeq ($(FOUND),)
    $(error no environment made)
  endif
  VENV := .venv-$(firstword $(FOUND))
else
  VENV := .venv
endif
STAMP := $(VENV)/installed.stamp

AOT := $(VENV)-aot
LINT := $(VENV)-lint
DOCS := $(VENV)-docs

.PHONY: demo simulate test test-all test-compile lint docs show clean

demo: $(STAMP)
	@$(VENV)/bin/python -m jaxrl_post.main --config=configs/demo.py $(ARGS)

# All of configs/sim/, as one table.
simulate: $(STAMP)
	@$(VENV)/bin/python -m jaxrl_post.simulate $(ARGS)

# A worker that dies ends the run: with a new worker in its place, pytest-xdist 3.8 waits for ever.
PYTEST := $(VENV)/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Processes that tests start import 300 modules. Where Python writes no bytecode, each of them would compile all of these.
BYTECODE := $(VENV)/bin/python -m compileall -q jaxrl_post kernels

# The first tier: every kind of fault. It ends with a table of CPU seconds by file.
test: $(STAMP)
	@$(BYTECODE)
	@$(PYTEST) -m "not extended and not shown" $(ARGS)

# With the second one: further variants, and planted faults. The tests of a file share what they compile, so this is one run.
# What a show measures too is left to it: make test ARGS='-m shown' runs that.
test-all: $(STAMP)
	@$(BYTECODE)
	@$(PYTEST) -m "not shown" $(ARGS)

# The compile tier: real compilers for TPU and GPU, without the devices, in an environment of its own.
test-compile: $(AOT)/installed.stamp
	@$(AOT)/bin/python -m pytest -n logical --maxprocesses 2 --dist load --maxschedchunk 1 -o faulthandler_timeout=1200 scripts/compile_tier $(ARGS)

# Style, formatting and types, in an environment of its own.
lint: $(LINT)/installed.stamp
	@$(LINT)/bin/ruff check .
	@$(LINT)/bin/ruff format --check .
	@$(LINT)/bin/mypy

show: $(STAMP)
	@$(VENV)/bin/python scripts/show.py --all $(ARGS)

# The pages of docs/ as a site in site/, in an environment of its own; a warning is an error. NO_MKDOCS_2_WARNING silences the
# theme's announcement of another project, which is no warning about these pages.
docs: $(DOCS)/installed.stamp
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict $(ARGS)

$(STAMP): pyproject.toml $(wildcard constraints/*.txt) scripts/make_venv.sh scripts/find_python.sh
	@sh scripts/make_venv.sh $(VENV) '$(PYTHON)'
	@touch $@

$(AOT)/installed.stamp: pyproject.toml $(wildcard constraints/*.txt) scripts/make_venv.sh scripts/find_python.sh
	@sh scripts/make_venv.sh $(AOT) '$(PYTHON)' test,aot-tpu,aot-cuda
	@touch $@

$(LINT)/installed.stamp: pyproject.toml $(wildcard constraints/*.txt) scripts/make_venv.sh scripts/find_python.sh
	@sh scripts/make_venv.sh $(LINT) '$(PYTHON)' lint
	@touch $@

$(DOCS)/installed.stamp: pyproject.toml $(wildcard constraints/*.txt) scripts/make_venv.sh scripts/find_python.sh
	@sh scripts/make_venv.sh $(DOCS) '$(PYTHON)' docs
	@touch $@

# Leaves runs/ and scripts/results/ alone.
clean:
	rm -rf .venv .venv-* .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
