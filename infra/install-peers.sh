#!/usr/bin/env bash
# Sets up .venv-peers: what the gateway benchmark runs beside us, in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv-peers/bin/python ] || .venv/bin/uv venv -q --python .venv/bin/python .venv-peers
.venv/bin/uv pip sync -q --python .venv-peers/bin/python --require-hashes requirements/peers.lock
