# Quire: what a newcomer and CI run. Every target works in a fresh clone; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# uv does not read PIP_FIND_LINKS by itself: a folder of wheels named there (a CPU build of torch, say) is handed on.
FIND_LINKS := $(if $(PIP_FIND_LINKS),$(foreach l,$(PIP_FIND_LINKS),--find-links $(l)),)

.PHONY: help setup demo serve test test-all lint protos bench bench-peers clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

# Ray starts a dozen Python processes: with bytecode compiled here, once, a cluster starts in half the time.
setup: $(STAMP) ## make .venv with everything pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^uv==' constraints.txt)"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(FIND_LINKS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## start two groups, stream a chat, ask a follow-up, stop
	$(BIN)/quire demo

serve: setup ## serve the built-in model with two groups; Ctrl-C ends it
	$(BIN)/quire serve --groups 2

test: setup ## unit, integration, e2e and fault tests (under 20 minutes on 2 cores)
	$(BIN)/quire fetch smollm2-135m
	$(BIN)/python -m pytest -m "not slow and not gpu"

ORACLES := $(addprefix tests/integration/test_,engine_oracles.py random_mixes.py hf_parity.py prompt_logprobs.py model_steps.py)

test-all: setup ## everything, the long ones too, and the oracles once more without our kernels
	$(BIN)/quire fetch smollm2-135m
	$(BIN)/python -m pytest
	QUIRE_TEST_ATTENTION=reference $(BIN)/python -m pytest -m "not slow" $(ORACLES)

lint: setup ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: setup ## regenerate cluster/pb from proto/
	$(BIN)/python -m grpc_tools.protoc -I cluster/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/common.proto proto/inference.proto proto/worker.proto

bench: setup ## classical results as ratios on our own engine: tables and plots in bench-results/
	$(BIN)/quire fetch smollm2-135m
	$(BIN)/python -m tests.bench.run --out bench-results
	$(BIN)/quire bench engine --json > bench-results/engine.json

bench-peers: setup ## vLLM and OpenVINO beside ours, in environments of their own, 5 rounds (half an hour; 5 GB in .peers/)
	$(BIN)/quire fetch smollm2-135m
	$(BIN)/python -m tests.bench.peers.run --out bench-results

clean: ## remove the environment and caches (models stay in the cache folder)
	rm -rf $(VENV) .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
