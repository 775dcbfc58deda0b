# A fresh machine needs git, make and Python 3.11, 3.12 or 3.13; everything else is installed into .venv by these targets.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v))) python3)
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help reproduce resume ui test test-all reference lint types format bench bench-convert compile-check compile-check-gpu clean

help:                ## this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

reproduce: $(VENV)/installed  ## reproduce the laptop run, all seven stages
	$(BIN)/python flows/reproduce.py run

resume: $(VENV)/installed     ## go on after a failure, from the stage that failed
	$(BIN)/python flows/reproduce.py resume

ui: $(VENV)/installed         ## browse the cards of the latest run on http://127.0.0.1:8324
	$(BIN)/python tools/cards_on_loopback.py

test: $(VENV)/installed-tests ## the default tests (adds PyTorch, OLMo-core, transformers)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(VENV)/installed-tests  ## the slow ones too
	$(BIN)/python -m pytest -m ""

reference: $(VENV)/installed-tests  ## make the laptop reference anew with the real OLMo-core
	$(BIN)/python tools/make_reference.py

lint: $(VENV)/installed-tests  ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/installed-tests  ## the type checker
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed-tests
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed-tests  ## speed, side by side with OLMo-core
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/loader.py

bench-convert: $(VENV)/installed-tests  ## conversion at 7B's size: memory and disk speed (needs 60 GB of disk)
	$(BIN)/python benchmarks/convert.py

compile-check: $(VENV)/installed-tests  ## compile the 7B step for TPU topologies (adds libtpu; many minutes)
	$(PIP) -e '.[tpu]'
	$(BIN)/olmo-jax compile --recipe olmo3_7b --hardware v5p-256
	$(BIN)/olmo-jax compile --recipe olmo3_7b --hardware tpu7x-4x4x4
	$(BIN)/olmo-jax compile --recipe olmo3_7b --hardware v6e-256

compile-check-gpu: $(VENV)/installed-tests  ## compile the 7B step for NVIDIA GPUs (adds 5 GB of CUDA; a minute)
	$(PIP) -e '.[cuda]'
	$(BIN)/python -m pytest -m "" tests/compile/test_ahead.py

clean:               ## remove the virtual environment; runs stay
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v < (3, 14) and f"Python 3.11 to 3.13 is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV): JAX, Flax, Orbax, Metaflow, lm-eval and what they need, about 350 MB to download;"
	@echo "two minutes or so in which pip says nothing"
	$(PIP) -e .
	@touch $@

$(VENV)/installed-tests: $(VENV)/installed
	@echo "Adding PyTorch, OLMo-core and transformers: about 300 MB where the index has a CPU build of PyTorch,"
	@echo "about 3 GB where it has only CUDA builds"
	$(PIP) -e '.[gcs,gke,hub,reference,dev]'
	@touch $@
