# Every target does its own set-up: Python 3.11 or newer with venv and pip is all a machine needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
AREA   ?= core

.PHONY: help demo test lint acceptance bench chaos test-vllm test-compose proto lock clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): requirements.lock pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP) ## compare round robin with the default policy on four simulated engines
	@$(BIN)/warmpath demo $(ARGS)

test: $(STAMP) lint ## lint, types, and all tests that need nothing but this machine
	$(BIN)/python -m pytest tests/unit tests/contract tests/wire tests/chaos tests/compose -m "not compose" -n 2 --dist loadfile $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

acceptance: $(STAMP) ## real Envoy, Valkey and simulated engines together: make acceptance AREA=core
	$(BIN)/python -m pytest tests/acceptance/$(AREA) $(ARGS)

bench: $(STAMP) ## measure the budgets; tables on screen, JSON in bench-results/
	$(BIN)/python -m tests.bench $(ARGS)

chaos: $(STAMP) ## ten minutes of load while workers, keepers, Valkey and engines are killed and stopped
	$(BIN)/python -m tests.chaos.run $(ARGS)

test-vllm: $(STAMP) ## two real vLLM CPU engines behind Warmpath (builds .venv-vllm, about six minutes once)
	$(BIN)/python scripts/vllm_env.py
	$(BIN)/python -m pytest tests/engines -m vllm $(ARGS)

test-compose: $(STAMP) ## the compose stack on a real Docker engine, started if none runs
	docker/engine.sh start
	docker/base-images.sh && docker/wheels.sh && $(BIN)/python -m pytest tests/compose $(ARGS); \
	  status=$$?; docker/engine.sh stop; exit $$status

proto: $(STAMP) ## generate extproc/_pb from proto/
	scripts/gen-proto.sh

lock: $(STAMP) ## resolve the pins of requirements.lock anew
	$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --extra demo --extra dev \
	  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --output-file requirements.lock pyproject.toml

clean: ## remove the environments and everything generated
	rm -rf $(VENV) .venv-vllm .docker .redis7 build dist bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis
