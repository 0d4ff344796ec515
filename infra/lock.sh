#!/usr/bin/env bash
# Resolves the locks again. No index or download address gets into them.
set -euo pipefail
cd "$(dirname "$0")/.."
data="--extra broker --extra gateway --extra jobs --extra lake --extra inspector --extra s3 --extra traces"
extras="$data --extra trainer --extra rollout-cpu --extra flow --extra demo --extra dev"
compile=".venv/bin/uv pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_35 --generate-hashes --no-emit-index-url --no-annotate --no-header"
# shellcheck disable=SC2086
$compile $extras pyproject.toml -o requirements/all.lock
# Of the containers without torch. The two last are what builds the project itself.
build='hatchling>=1.27\neditables>=0.5\n'
# shellcheck disable=SC2059,SC2086
printf "$build" | $compile $data --constraint requirements/all.lock pyproject.toml - -o requirements/core.lock
# Of the container for GPUs: vLLM's build for CUDA with all that it requires.
# shellcheck disable=SC2059,SC2086
printf "$build" | $compile --no-config --override requirements/gpu-overrides.in $data --extra trainer --extra rollout-gpu \
  pyproject.toml - -o requirements/gpu.lock
grep -E '^uv==' requirements/all.lock | tr -d ' \\' | $compile - -o requirements/uv.lock.txt
# Alone: .venv has the other packages that these need.
$compile --no-deps requirements/exports.in -o requirements/exports.lock
$compile --no-deps requirements/readers.in -o requirements/readers.lock
# Libraries of environments. Some have no wheels, so that an ordinary installation does without them.
$compile --constraint requirements/all.lock requirements/environments.in -o requirements/environments.lock
# In an environment of its own, without our overrides: it needs other versions of openai and mcp.
$compile --no-config requirements/verifiers.in -o requirements/verifiers.lock
# Alone: of the first only the model file is read.
$compile --no-deps requirements/smollm2.in -o requirements/smollm2.lock
# Alone: the documentation site is built outside of .venv.
$compile requirements/docs.in -o requirements/docs.lock
# Alone: .venv has the other packages that this needs.
$compile --no-deps requirements/kubernetes.in -o requirements/kubernetes.lock
# In an environment of its own: only the browser tests need it. The browser is the system's.
$compile requirements/browser.in -o requirements/browser.lock
