#!/usr/bin/env bash
# Resolves the locks again. No index or download address gets into them.
set -euo pipefail
cd "$(dirname "$0")/.."
pythons="3.13 3.12 3.11"
platform="--python-platform x86_64-manylinux_2_35 --generate-hashes --no-emit-index-url --no-annotate --no-header"

# Usage: lock FILE OPTION...
# One lock serves all Pythons: it fails where they resolve to different versions.
lock() {
  local file=$1 python
  shift
  for python in $pythons; do
    [ -e requirements/.previous ] && cp "$file" requirements/.previous
    # shellcheck disable=SC2086
    .venv/bin/uv pip compile -q --python-version "$python" $platform "$@" -o "$file"
    [ ! -e requirements/.previous ] || cmp "$file" requirements/.previous
    touch requirements/.previous
  done
  rm requirements/.previous
}

data="--extra broker --extra gateway --extra jobs --extra lake --extra inspector --extra s3 --extra traces"
# shellcheck disable=SC2086
lock requirements/all.lock $data --extra trainer --extra rollout-cpu --extra flow --extra demo --extra dev pyproject.toml
# Of the containers without torch, with what builds the project itself.
# shellcheck disable=SC2086
lock requirements/core.lock $data --constraint requirements/all.lock pyproject.toml requirements/build.in
# Of the container for GPUs: vLLM's build for CUDA with all that it requires.
# shellcheck disable=SC2086
lock requirements/gpu.lock --no-config --override requirements/gpu-overrides.in $data --extra trainer --extra rollout-gpu \
  pyproject.toml requirements/build.in
lock requirements/uv.lock.txt --constraint requirements/all.lock requirements/uv.in
# Alone: .venv has the other packages that these need.
lock requirements/exports.lock --no-deps requirements/exports.in
lock requirements/readers.lock --no-deps requirements/readers.in
lock requirements/kubernetes.lock --no-deps requirements/kubernetes.in
# Libraries of environments. Some have no wheels, so that an ordinary installation does without them.
lock requirements/environments.lock --constraint requirements/all.lock requirements/environments.in
# In an environment of its own, without our overrides: it needs other versions of openai and mcp.
lock requirements/verifiers.lock --no-config requirements/verifiers.in
# Alone: only the model file is read.
lock requirements/smollm2.lock --no-deps requirements/smollm2.in
# Alone: the documentation site is built outside of .venv.
lock requirements/docs.lock requirements/docs.in
# In an environment of its own: only the browser tests need it. The browser is the system's.
lock requirements/browser.lock requirements/browser.in
