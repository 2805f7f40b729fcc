# Every target has a help text; `make` alone prints them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
INSTALL := PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --disable-pip-version-check
ONCE   ?=
CLIENTS ?= $(CURDIR)/.clients
DEMO   := appliance/demo/qwen3.8-demo-groupwise-int.ginfer

export PYTHONDONTWRITEBYTECODE ?= 1

.DEFAULT_GOAL := help
.PHONY: help run install fmt fmt-check lint type size tree docs check test test-long test-service \
        test-oracle test-clients bench compile test-gpu warm serve pack golden dist clean

help:  ## Print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

$(VENV)/.run: setup.cfg pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) -e '.[test,pack]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.oracle: $(VENV)/.test
	$(INSTALL) -e '.[oracle]'
	@touch $@

install: $(VENV)/.run  ## Make the virtual environment and install the project into it

run: $(VENV)/.run  ## Start the server with the demo model and stream one answer (ONCE=1 ends after it)
	@$(PY) -m scripts.run_demo $(if $(ONCE),--once)

serve: $(VENV)/.run  ## Start the server: make serve PACKAGE=file.ginfer ARGS='--port 8001'
	@$(BIN)/ginfer-serve $(PACKAGE) $(ARGS)

test: $(VENV)/.test  ## All tests that need no GPU, in lanes side by side: what CI runs
	@$(PY) -m scripts.suite

test-long: $(VENV)/.oracle  ## Full counts and the live oracles, no GPU
	$(PY) -m pytest -m 'not gpu and not multi_gpu' --durations 20

test-service: $(VENV)/.test  ## Only the tests against a live server
	$(PY) -m pytest tests/service -m 'not long'

test-oracle: $(VENV)/.oracle  ## Only the tests that compare with Transformers live
	$(PY) -m pytest -m oracle

$(CLIENTS)/.installed: tests/clients/package.json
	@mkdir -p $(CLIENTS) && cp $< $(CLIENTS)/
	npm install --prefix $(CLIENTS) --no-audit --no-fund --no-package-lock --loglevel error
	@touch $@

test-clients: $(VENV)/.test $(CLIENTS)/.installed  ## Agent clients from npm, at fixed versions, against a live server
	GINFER_CLIENTS_DIR=$(CLIENTS) $(PY) -m pytest -m clients

fmt: $(VENV)/.dev  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fmt-check: $(VENV)/.dev  ## Whether the code is formatted
	@$(BIN)/ruff format --check --quiet .

lint: $(VENV)/.dev  ## Ruff
	@$(BIN)/ruff check --quiet .

type: $(VENV)/.dev  ## Mypy, strict
	@$(BIN)/mypy

size: $(VENV)/.run  ## Limits on files, functions and parameters
	@$(PY) -m scripts.size

tree: $(VENV)/.run  ## README tree against the first docstring lines
	@$(PY) -m scripts.tree --check

docs: $(VENV)/.run  ## Rewrite the generated documents
	@$(PY) -m scripts.tree
	@$(PY) -m scripts.cli_docs

check: fmt-check lint type tree size  ## The gate before each commit, together with test

bench: $(VENV)/.test  ## Measure the CPU image and record it in docs/performance/summary.json
	$(PY) -m tests.bench.cpu_engine --write
	$(PY) -m tests.bench.grammar --write

compile: $(VENV)/.test  ## Every kernel x plan x capability to a cubin, as a table (no GPU; FRESH=1 from nothing)
	@$(PY) -m scripts.compile_all $(if $(FRESH),--fresh)

test-gpu: $(VENV)/.test  ## Tests on the GPU of this machine, recorded in docs/performance
	$(PY) -m scripts.gpu_tests

warm: $(VENV)/.run  ## Compile the CPU kernels into the cache
	@$(BIN)/ginfer $(DEMO) --prompt 'Hello!' --max-new 1

pack: $(VENV)/.test  ## Pack a checkpoint: make pack FROM=folder TO=file.ginfer MODEL=qwen3.8-demo WEIGHTS=groupwise-int
	$(PY) -m scripts.pack $(FROM) $(TO) --model $(MODEL) --weights $(WEIGHTS)

golden: $(VENV)/.oracle  ## Rewrite tests/golden from an independent Transformers run
	$(PY) -m scripts.golden

dist: $(VENV)/.dev  ## Build a wheel
	$(PY) -m pip wheel --quiet --no-deps -w dist .

clean:  ## Remove caches and the virtual environment
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
