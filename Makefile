# Needs make, Python 3.11 to 3.14 and a package index, nothing else. `make` lists the targets.

PYTHON ?= python3
WORKERS ?= 2
GROUND ?= cpu

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
TORCHAX := .venv-torchax
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints.txt

# The package is imported by a hundred processes of `make test`: compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo check lint types test tested test-all versions conformance lightning torchtitan trl bench torchax ops models presets depth pod memory layouts fuzz statements docs site faults endurance clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything installed (does nothing when up to date)

# torch first and alone: it decides the build (cpu or cuda) from the index at hand, and the rest then resolves around it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14) and "needs Python 3.11 to 3.14, $(PYTHON) is " + sys.version.split()[0] + "; fix: make setup PYTHON=python3.11")'
	@echo "setting up $(VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

demo: setup ## train, shard and save a small GPT-2 on 8 virtual devices (about three minutes)
	@$(BIN)/spmd demo

check: setup lint types ## lint, format, types and the house rules
	@$(PY) -m pytest --quiet tests/test_structure.py

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(PY)

PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal

# Types, a minute of one core, are looked at while the tests run; the house rules are among these.
test: setup lint ## lint and types, and all tests on 8 virtual devices, compiled fast: about 25 minutes on two cores
	@$(MAKE) --no-print-directory --jobs 2 types tested

tested: setup
	@$(PYTEST) tests

# Nothing is left out: every dtype, form and sample of every operator, recipes of 200 steps, other numbers of devices, XLA's optimizations.
test-all: setup check lightning torchtitan trl ## check, then all tests and sweeps, compiled as users' programs are (hours)
	@$(PYTEST) -m "slow or not slow" --optimize tests

# GROUND=tpu compiles for TPU topologies ahead of time, GROUND=gpu runs on this machine's GPU. Peers that are missing are left out.
bench: setup ## the small benchmarks beside their peers; rewrites benchmarks/results and docs/benchmarks.md
	@$(PY) -m spmd.bench --ground $(GROUND) --torchax-python $(TORCHAX)/bin/python

# An environment of its own: torchax and spmd both claim PyTorch's out-of-tree device slot.
torchax: $(TORCHAX)/.installed ## create .venv-torchax with torchax, a peer of the benchmarks

$(TORCHAX)/.installed:
	@$(PYTHON) -m venv $(TORCHAX)
	@$(TORCHAX)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0
	@$(TORCHAX)/bin/python -m pip install -qq --disable-pip-version-check --pre torchax==0.0.14.dev20261026 jax==0.10.2 transformers==5.23.0
	@touch $@

ops: setup ## which PyTorch ops the device computes as the CPU does (more than an hour)
	@$(PY) -m benchmarks.ops

# In a folder of its own: timm needs torchvision, beside which transformers does not load on a CPU build of torch.
models: setup ## which models of Hugging Face and timm run unmodified (about two hours)
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv-timm torchvision==0.28.0 timm==1.0.31
	@$(PY) -m benchmarks.models

presets: setup ## collectives of the presets of eight models beside the same layouts written by hand (some minutes)
	@$(PY) -m benchmarks.presets

depth: setup ## what each further layer costs, rolled, unrolled and by hand, on 8 devices and for v5e, and a process that finds the programs of an earlier one (an hour)
	@$(PY) benchmarks/depth.py
	@$(PY) benchmarks/second_process.py

pod: setup ## Llama-3-8B over 256 chips that are not here, compiled, beside JAX by hand (ten minutes)
	@$(PY) benchmarks/llama_pod.py

memory: setup ## host and device memory by phase, from a model on meta to a restored run, beside JAX by hand (ten minutes)
	@$(PY) -m benchmarks.memory

layouts: setup ## whether a layout ever changes a value: 3,000 random ones beside CPU torch (about an hour)
	@$(PY) -m benchmarks.layouts

MINUTES ?= 30

fuzz: setup ## whether compiled functions ever do anything else than Python: random programs with state, MINUTES (30)
	@$(PY) -m benchmarks.fuzz --minutes $(MINUTES)

statements: setup ## whether statements that read and write Python objects do what Python does: 10,000 cases beside CPU torch (twenty minutes)
	@$(PY) -m benchmarks.statements

docs: setup ## write the generated pages and pictures
	@$(BIN)/spmd ops --markdown > docs/ops.md
	@JAX_PLATFORMS=cpu $(PY) docs/site/gallery.py

# In a folder beside the environment: pages need none of it to be read.
site: setup ## docs/ as HTML that needs no network: search, reference, gallery, index of errors, the notebook run; in build/site
	@$(PY) -m pip install -qq --disable-pip-version-check --upgrade --target .venv-site sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19
	@PYTHONPATH=.venv-site JAX_PLATFORMS=cpu $(PY) -m sphinx -q -W --keep-going -b html -c docs/site docs build/site
	@echo "build/site/index.html"

TRIALS ?=

versions: setup ## a subset of the tests with each supported torch and jax, in environments of their own (20 GB the first time)
	@$(PY) -m benchmarks.versions --workers $(WORKERS)

# What those tests only import, in a folder of its own: beside torchvision transformers does not load on a CPU build of torch.
conformance: setup ## torch_xla's own tests and examples, unedited, from a checkout: make conformance XLA=path (an hour)
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv-conformance absl-py==2.5.1 torchvision==0.28.0
	@$(PY) -m benchmarks.conformance $(XLA)

# Beside the environment: a Trainer of its own would be one more package for every user of it.
lightning: setup ## Lightning's Trainer and Fabric, in a folder beside the environment, and their tests
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv-lightning lightning==2.6.6 torchmetrics==1.9.0 lightning-utilities==0.15.3
	@$(PYTEST) -m slow tests/lightning

torchtitan: setup ## torchtitan's Llama, in a folder beside the environment, and its tests
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv-torchtitan torchtitan==0.3.0 spmd_types==0.2.3
	@$(PYTEST) -m slow tests/torchtitan

# dill, by which `datasets` knows a function again, takes what lies in a folder of this name as imported, and the rest apart.
trl: setup ## TRL's trainers, in a folder beside the environment, and their tests
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv-trl/site-packages trl==1.16.0 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 aiohttp==3.14.5
	@$(PYTEST) -m slow tests/huggingface/test_trl.py

faults: setup ## what a job survives: faults thrown at it, an hour; TRIALS of each if given (network faults where root may make namespaces)
	@$(PY) benchmarks/faults.py $(if $(TRIALS),--trials $(TRIALS))

endurance: setup ## loops that read nothing on many virtual devices, and 10,000 steps with everything on: what grows
	@$(PY) benchmarks/unread.py
	@$(PY) benchmarks/days.py

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) $(TORCHAX) .venv-timm .venv-versions .venv-conformance .venv-lightning .venv-torchtitan .venv-trl .venv-site docs/_generated build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
